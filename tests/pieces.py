"""A decoder whose outputs are set, to test what is done with them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from speculative_t5.decoding import Stats
from speculative_t5.generation import BatchOptions, Generation
from speculative_t5.tokenizers import Source

STATS = Stats((1,), (1,), (1,), emitted=2, seconds=0.1)


@dataclass
class Scripted:
    """Answers each text that it reads by `answer`; a token is a word.

    `cut` outputs do not end, and a snowman is outside the vocabulary.
    """

    answer: Callable[[str], str]
    limit: int = 12  # words that it reads
    cut: Callable[[str], bool] = lambda _: False
    prefix: str = "fix: "
    tokenizer: Any = "there is one"
    min_probability: float = 0.0
    trained_length: int | None = None
    languages: tuple[str, str] | None = None
    is_steady: bool = False
    beams: Sequence[str] = ("",)  # the outputs of a beam search, for any text
    read: list[str] = field(default_factory=list)
    limits: list[int] = field(default_factory=list)  # max_tokens of each call
    known: dict[tuple[int, ...], str] = field(default_factory=dict)

    def encode(self, prompt: str) -> list[int]:
        ids = [hash(word) for word in prompt.split()]
        self.known[tuple(ids)] = prompt
        return ids

    def fit(self, prompt: str) -> Source:
        ids = self.encode(prompt)
        if len(ids) > self.limit:
            raise ValueError("too long")
        return Source(ids, 0, "\u2603" if "\u2603" in prompt else "")

    def check_batch(self, options: BatchOptions) -> None:
        pass

    def iter_batch(
        self,
        prompts: Iterable[tuple[int, list[int]]],
        *,
        batch_size: int | None = None,
        max_tokens: int = 256,
        speculative: bool = True,
        num_beams: int = 1,
        num_return_sequences: int = 1,
        logprobs: int | None = None,
    ) -> Iterator[tuple[int, Generation]]:
        requests = list(prompts)
        self.limits += [max_tokens] * bool(requests)

        def outputs() -> Iterator[tuple[int, Generation]]:
            for index, ids in reversed(requests):
                text = self.known[tuple(ids)]
                assert text.startswith(self.prefix)
                text = text.removeprefix(self.prefix)
                self.read.append(text)
                reason: Any = "length" if self.cut(text) else "eos"
                answers = self.beams if num_beams > 1 else [self.answer(text)]
                first, *others = (
                    Generation(answer, [*map(hash, answer.split())], reason, STATS)
                    for answer in answers
                )
                yield index, replace(first, alternatives=tuple(others))

        return outputs()
