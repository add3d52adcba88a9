"""Training a sharing draft: batches in, weights out, resumable at every saved step."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, Literal, cast, get_args

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from ..decoding import argmax, check_temperature
from ..files import replacing
from ..models import MOST_BLOCK, EncoderDecoder, SharingDraft, plain_weight
from ..options import OptionError, check_number, check_options, option, option_error
from .labels import Label, LabelBatch, group, make_batch, shuffled

LossName = Literal["ce", "kl"]
LOSSES: tuple[LossName, ...] = get_args(LossName)
MAX_LOGITS = 2**22  # that exist at a time, of draft and target each
DEFAULT_STEPS = 2000
MIN_WIDTH = 96  # the least width of a draft by default; otherwise a quarter of its target's
WARM_UP, WARM_SHARE = 50, 0.1  # steps, or a share of the training if that is less
CLIP_NORM = 1.0  # norm of the gradient
KEPT_BYTES = 2**30  # bytes of encoded prompts that are kept from one epoch to the next, at most


@dataclass(frozen=True)
class DistillOptions:
    """How to distill a draft: the options of the command, by the same names.

    `label_batch` prompts are labelled side by side. The learning rate is the largest, after a short
    warm-up; it falls to 0. Of `minutes`, labelling takes `LABEL_SHARE` at most.

    Raises:
        ValueError: If one is out of its range.
    """

    layers: int | None = option(None, "Decoder layers of the draft.", shown="1", least=1)
    d_model: int | None = option(
        None,
        "Width of its layers.",
        shown=f"a quarter of the target's, at least {MIN_WIDTH}",
        least=1,
    )
    steps: int | None = option(
        None, "Steps to train.", shown=f"{DEFAULT_STEPS} without --minutes", least=1
    )
    minutes: float | None = option(None, "Minutes for the whole run, instead of --steps.")
    batch_tokens: int = option(
        2048, "Tokens of a training step, prompts and outputs together.", least=1
    )
    learning_rate: float = option(1e-3, "Peak learning rate.")
    loss: LossName = option("ce", f"Loss: {', '.join(LOSSES)}.")
    block: int = option(1, "Tokens that a pass of the draft proposes.", least=1, most=MOST_BLOCK)
    draft_vocab: int | None = option(
        None, "Let the draft propose only the first N ids.", shown="all", least=1
    )
    temperature: float = option(0.0, "0 trains on the target's greedy outputs, above 0 on samples.")
    max_tokens: int = option(256, "Upper bound on the tokens of an output, EOS included.", least=1)
    seed: int = option(0, "Seed for the order of prompts, and for samples.", least=0)
    label_batch: int = 16

    def __post_init__(self) -> None:
        check_options(self)
        if self.steps is not None and self.minutes is not None:
            raise OptionError("{steps} and {minutes} exclude each other: give one of them")
        for name in ("minutes", "learning_rate"):
            value = getattr(self, name)
            if value is not None and not 0 < check_number(name, value) < math.inf:
                raise option_error(name, "above 0 and finite", value)
        check_temperature(self.temperature)
        if self.loss not in LOSSES:
            raise option_error("loss", f"one of {', '.join(LOSSES)}", self.loss)

    @property
    def num_steps(self) -> int | None:
        """Optimizer steps; None if there are minutes instead."""
        return self.steps or (DEFAULT_STEPS if self.minutes is None else None)


class Training:
    """A draft being trained on labels.

    The target's encoder runs once for each prompt, as far as there is memory to keep what it gives;
    its decoder once a step, where the loss needs its distributions. Both run without gradients. The
    draft's weights are float32 whatever the target's type.
    """

    def __init__(
        self, draft: SharingDraft, labels: Sequence[Label], options: DistillOptions
    ) -> None:
        self.step_number = 0  # how many steps were taken
        self.draft = draft
        self._options = options
        self._groups = group(labels, options.batch_tokens)
        self._kept: dict[int, LabelBatch] = {}  # by group
        self._room = KEPT_BYTES
        draft.set_dtype(mx.float32)
        self._output_weight = output_weight(draft)
        mx.eval(self._output_weight)
        self._optimizer = optim.Adam(options.learning_rate, betas=[0.9, 0.99], bias_correction=True)
        self._optimizer.init(draft.trainable_parameters())
        self._order = shuffled(len(self._groups), options.seed)

    def step(self, done: float) -> float:
        """Train on the next batch, and return its loss per token.

        `done` is the share of the training before this step, which the learning rate depends on.
        """
        draft, options, weight = self.draft, self._options, self._output_weight
        target = draft.target
        loss, batch = options.loss, self._batch(next(self._order))
        warm = min(1.0, max((self.step_number + 1) / WARM_UP, done / WARM_SHARE))
        falling = 0.5 * (1 + math.cos(math.pi * done))
        self._optimizer.learning_rate = mx.array(options.learning_rate * warm * falling)
        target_logits, widest = None, weight.shape[0]
        if loss != "ce":
            target_logits, widest = logits_of(target, batch), target.info.vocab_size

        def surrogate(draft: SharingDraft) -> tuple[mx.array, float]:
            """Return a scalar with the loss's gradient, and the loss."""
            hidden = last_hidden(draft, batch)
            value, gradient = head_loss(
                loss, hidden, weight, batch.labels, target_logits, widest, target.head.capped
            )
            count = batch.labels.size
            return (hidden * gradient / count).sum(), value / count

        (_, value), gradients = nn.value_and_grad(draft, surrogate)(draft)
        gradients, _ = optim.clip_grad_norm(gradients, CLIP_NORM)
        self._optimizer.update(draft, gradients)
        mx.eval(draft.parameters(), self._optimizer.state)
        self.step_number += 1
        return float(value)

    def _batch(self, number: int) -> LabelBatch:
        if (kept := self._kept.get(number)) is not None:
            return kept
        batch = make_batch(self._groups[number], self.draft.target, self.draft.own.block)
        if (size := batch.memory.nbytes) <= self._room:
            self._room -= size
            self._kept[number] = batch
        return batch

    def save(self, path: Path) -> None:
        """Write weights, the optimizer's state and the step to a safetensors file, atomically."""
        state = {"draft": self.draft.parameters(), "optimizer": self._optimizer.state}
        arrays = dict(cast(list[tuple[str, mx.array]], tree_flatten(state)))
        with replacing(path) as new:
            mx.save_safetensors(str(new), arrays, {"step": str(self.step_number)})

    def restore(self, path: Path) -> None:
        """Go on from a file that `save` has written; refuse one that is damaged."""
        try:
            arrays, metadata = cast(Any, mx.load(str(path), return_metadata=True))
        except RuntimeError as error:
            raise ValueError(
                f"{path} is truncated or damaged: delete the file, and run the same command again"
            ) from error
        state = cast(dict[str, Any], tree_unflatten(list(arrays.items())))
        self.draft.update(state["draft"])
        self._optimizer.state = state["optimizer"]
        self.step_number = int(metadata["step"])
        self._order = shuffled(len(self._groups), self._options.seed, self.step_number)


def head_loss(
    loss: LossName,
    hidden: mx.array,
    weight: mx.array,
    labels: mx.array,
    target_logits: Callable[[int, int], mx.array] | None,
    widest: int,
    capped: Callable[[mx.array], mx.array],
) -> tuple[float, mx.array]:
    """Compute a loss, summed over positions, and its gradient by the draft's last hidden states.

    The output head is the target's and is not trained, so this gradient is all that training needs
    of it. Logits of a few hundred positions exist at a time, and never those of a whole batch.

    Args:
        loss: Which.
        hidden: What the output matrix multiplies, (P, d_model) float32, as the gradient.
        weight: The output matrix, (V, d_model), of the ids that the draft may propose.
        labels: The target's tokens, (P,) int32; ids of V and above do not count for "ce".
        target_logits: Returns the target's logits of a range of positions; None for "ce".
        widest: The most logits of a position, of `weight` or `target_logits`.
        capped: What the target's head does to products with `weight`.
    """
    rows = max(1, MAX_LOGITS // widest)
    total, gradients = 0.0, []
    for first in range(0, hidden.shape[0], rows):
        last = min(first + rows, hidden.shape[0])
        targets = target_logits(first, last) if target_logits else None
        value, gradient = mx.value_and_grad(loss_sum)(
            hidden[first:last], loss, weight, labels[first:last], targets, capped
        )
        # What is traced, as by a gradient outside of this one, would keep the logits of all.
        gradients.append(np.array(gradient))
        total += float(np.array(value))
    return total, mx.array(np.concatenate(gradients))


def _log_sum_and_gradient(logits: mx.array) -> tuple[mx.array, mx.array]:
    """Return logsumexp over the last axis, and the softmax, which is its gradient.

    MLX's own computes the exponentials again for the gradient, which on a CPU takes longer than the
    products around it.
    """
    q = mx.softmax(logits, axis=-1)
    return logits.max(axis=-1) - mx.log(q.max(axis=-1)), q


_log_sum: Any = mx.custom_function(_log_sum_and_gradient)
_log_sum.vjp(lambda _, cotangents, outputs: cotangents[0][..., None] * outputs[1])


def loss_sum(
    hidden: mx.array,
    loss: LossName,
    weight: mx.array,
    labels: mx.array,
    target_logits: mx.array | None,
    capped: Callable[[mx.array], mx.array],
) -> mx.array:
    """Return the sum of a loss over positions.

    q is the draft's distribution and p the target's, both (P, V). Of p only the ids that the draft
    has count; what lies beyond them is lost to any draft.

    ce: -log q(label). kl: KL(p || q) (distillation, arXiv 1503.02531).
    """
    size = weight.shape[0]
    logits = capped(hidden @ weight.T)
    log_sum: mx.array = _log_sum(logits)[0]
    if loss == "ce":
        # The label's logit as a product of its own: its gradient is not as wide as the vocabulary.
        chosen = capped((hidden * weight[mx.minimum(labels, size - 1)]).sum(-1))
        return mx.where(labels < size, log_sum - chosen, 0.0).sum()
    assert target_logits is not None
    p = mx.softmax(target_logits, axis=-1)[:, :size]
    log_ratio = log_sum - mx.logsumexp(target_logits, axis=-1)
    divergence = (p * (target_logits[:, :size] - logits)).sum(-1) + p.sum(-1) * log_ratio
    return divergence.sum()


def logits_of(target: EncoderDecoder, batch: LabelBatch) -> Callable[[int, int], mx.array]:
    """Return the `target_logits` of `head_loss`."""
    hidden = target.decode(batch.memory, batch.fed, batch.mask)
    hidden = hidden.reshape(-1, hidden.shape[-1])[batch.before]
    mx.eval(hidden)
    return lambda first, last: target.logits(hidden[None, first:last])[0].astype(mx.float32)


def last_hidden(draft: SharingDraft, batch: LabelBatch) -> mx.array:
    """Return what the target's output matrix multiplies at each position to learn, (P, d)."""
    block, size = draft.own.block, draft.info.vocab_size
    masks = [mx.full(batch.fed.shape, size + i, mx.int32) for i in range(block - 1)]
    embedded = draft.embed(mx.concatenate([batch.fed, *masks], axis=1))
    x, memory, mask = (a.astype(mx.float32) for a in (embedded, batch.memory, batch.mask))
    x = draft.decoder.whole(x, memory, mask, block)
    x = x.reshape(-1, x.shape[-1])[batch.positions]
    x = draft.decoder.norm(x) * draft.target.head.scale
    hidden: mx.array = draft.widen(x) if draft.own.d_model else x
    return hidden


def output_weight(draft: SharingDraft) -> mx.array:
    """Return the target's output matrix for the ids that the draft may propose, (V, d) float32."""
    size = draft.own.draft_vocab or draft.info.vocab_size
    return plain_weight(draft.target.output, slice(size))


class Agreement:
    """Agreement of greedy drafting with the target's greedy outputs.

    One pass of the draft over each output is enough to know the rounds of greedy decoding for any
    number of drafted tokens: up to its first wrong token a draft follows the true tokens, which are
    those that the pass has read.

    `rows` say for each output whether the draft has each token right, EOS included, as the first of
    a block, then as the second without the first token, and so on.
    """

    def __init__(self, rows: Sequence[Sequence[Sequence[bool]]]) -> None:
        self.rows = rows
        self.num_tokens = sum(len(row[0]) for row in rows)
        self.rate = sum(sum(row[0]) for row in rows) / self.num_tokens

    def tokens_per_pass(self, num_draft: int) -> float:
        """Return the tokens per pass of the target."""
        return self.num_tokens / sum(1 for _ in self._rounds(num_draft))

    def by_place(self, num_draft: int) -> list[float]:
        """Return the chance that each token of a draft is right, given that those before it are.

        The list ends where no draft came so far; places after the end of an output do not count.
        """
        reached, passed = [0] * num_draft, [0] * num_draft
        for run, left in self._rounds(num_draft):
            for place in range(min(run + 1, left, num_draft)):
                reached[place] += 1
                passed[place] += place < run
        return [p / r for p, r in zip(passed, reached, strict=True) if r]

    def _rounds(self, num_draft: int) -> Iterator[tuple[int, int]]:
        """Yield, for each round, the drafted tokens that are right and the tokens still to come."""
        for row in self.rows:
            pos, length = 0, len(row[0])
            while pos < length:
                places = range(min(num_draft, length - pos))
                # The parts of the row have one token less each.
                right = (row[i % len(row)][pos + i - i % len(row)] for i in places)
                run = len([*takewhile(bool, right)])
                yield run, length - pos
                pos += run + 1


def agreement(draft: SharingDraft, labels: Sequence[Label], batch_tokens: int) -> Agreement:
    """Compare the draft's greedy choices with labels, which are the target's greedy outputs."""
    rows: list[list[list[bool]]] = []
    weight, block = output_weight(draft), draft.own.block
    step = max(1, MAX_LOGITS // weight.shape[0])
    for examples in group(labels, batch_tokens):
        batch = make_batch(examples, draft.target, block)
        hidden = last_hidden(draft, batch)
        parts = range(0, len(batch.labels), step)
        chosen = mx.concatenate([argmax(hidden[i : i + step] @ weight.T) for i in parts])
        right = iter(cast(list[bool], (chosen == batch.labels).tolist()))
        rows += [
            [list(islice(right, max(0, len(each.tokens) - part))) for part in range(block)]
            for each in examples
        ]
    return Agreement(rows)


def own_parameters(draft: SharingDraft) -> int:
    """Return the number of weights that are the draft's own."""
    flat = cast(list[tuple[str, mx.array]], tree_flatten(draft.parameters()))
    return sum(weight.size for _, weight in flat)
