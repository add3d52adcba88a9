"""Corrections that a model is not sure of, taken out of training examples.

Trained on what is right, a model guesses where it cannot know, and a wrong guess does more harm
than an error that stays. GECToR (Omelianchuk et al. 2020, arXiv:2005.12592) therefore makes no
correction below a least probability. Here the weights learn this: where a model gives the words of
a correction less than that, the example says to leave the text as it is.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import accumulate, pairwise
from math import prod

import sentencepiece as spm
import torch
from corruption import PREFIX
from train_correct import Example, pad
from transformers import T5ForConditionalGeneration

APART = 2  # corrections with fewer unchanged words between them stand or fall together


@dataclass(frozen=True)
class Correction:
    """Tokens of a source, and those of a target that replace them; either may be none."""

    source: slice
    target: slice

    def probability(self, tokens: Sequence[float]) -> float:
        """Return its probability, given those of all tokens of the target, EOS included.

        It includes that of the next token: what is taken out at the end shows there alone.
        """
        return prod(tokens[self.target.start : self.target.stop + 1])


class Caution:
    """Takes corrections out of examples if a model gives them less than a least probability."""

    def __init__(
        self,
        model: T5ForConditionalGeneration,
        tokenizer: spm.SentencePieceProcessor,
        *,
        least: float,
        autocast: bool = False,
    ) -> None:
        self._model, self._least, self._autocast = model.eval(), least, autocast
        pieces = map(tokenizer.id_to_piece, range(tokenizer.get_piece_size()))
        self._begins = {i for i, piece in enumerate(pieces) if piece.startswith("▁")}
        self._prefix = len(tokenizer.encode(PREFIX.rstrip()))

    def __call__(self, ids: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return labels, (B, L) int64, with the source's words where the model is not sure.

        For the arguments see `train_correct.batches`.
        """
        probabilities = self._probabilities(ids, mask, labels)
        rows = []
        for source, target, tokens in zip(ids, labels, probabilities, strict=True):
            example = [i for i in source.tolist() if i], [i for i in target.tolist() if i >= 0]
            rows.append(self.target(example, tokens.tolist()))
        return pad(rows, -100)[0]

    @torch.no_grad()
    def _probabilities(
        self, ids: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self._autocast):
            logits = self._model(input_ids=ids, attention_mask=mask, labels=labels).logits
        asked = labels.clamp(min=0)[..., None]
        return logits.float().softmax(-1).gather(-1, asked)[..., 0]

    def target(self, example: Example, tokens: Sequence[float]) -> list[int]:
        """Return the target of an example without the corrections that are not likely enough.

        `tokens` are the probabilities of the target's.
        """
        source, target = example[0][self._prefix :], example[1]
        result, at = [], 0
        for group in self._groups(source, target):
            if min(each.probability(tokens) for each in group) >= self._least:
                continue
            result += target[at : group[0].target.start]
            result += source[group[0].source.start : group[-1].source.stop]
            at = group[-1].target.stop
        return result + target[at:]

    def _groups(self, source: list[int], target: list[int]) -> Iterator[list[Correction]]:
        """Yield the corrections that make the target of the source, close ones together."""
        words = [self._words(tokens) for tokens in (source, target)]
        starts = [[0, *accumulate(map(len, side))] for side in words]
        group: list[Correction] = []
        last = 0
        for kind, *ends in SequenceMatcher(None, *words, autojunk=False).get_opcodes():
            if kind == "equal":
                continue
            if group and ends[0] - last >= APART:
                yield group
                group = []
            spans = [slice(starts[k][ends[2 * k]], starts[k][ends[2 * k + 1]]) for k in (0, 1)]
            group.append(Correction(*spans))
            last = ends[1]
        if group:
            yield group

    def _words(self, tokens: list[int]) -> list[tuple[int, ...]]:
        """Split tokens into words; the EOS is one by itself."""
        first = [i for i, token in enumerate(tokens) if i and (token in self._begins or token == 1)]
        return [tuple(tokens[i:j]) for i, j in pairwise([0, *first, len(tokens)])]
