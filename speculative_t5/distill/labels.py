"""Has the target label prompts, chunk by chunk, as long as the time of a run allows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..decoding import LanguageModel, in_order_of_length
from ..errors import check_integer
from ..files import LineFile
from ..generation import SpeculativeDecoder
from .data import Example, Label
from .folder import TimeBudget

MAX_LINE = 2**27  # bytes; no label is longer


class LabelFile(LineFile):
    """A file of labels, one line of JSON for each example in order, appended a chunk at a time.

    To enter it (`with`) creates and locks the file, reads the labels in it into `labels`, and cuts
    off the part of a chunk that a killed run may have left at the end. Chunks end after every
    `chunk` examples and after the last.

    Args:
        path: The file.
        examples: What its labels are about.
        chunk: The number of examples of a chunk.

    Raises:
        ValueError: When it is entered, if the file holds anything but labels of these examples, or
            another process is writing to it.
    """

    def __init__(self, path: Path, examples: Sequence[Example], chunk: int) -> None:
        super().__init__(path, f"another process is writing to {path}: wait for it to end")
        self._path = path
        self._examples = examples
        self._chunk = chunk
        self.labels: list[Label] = []

    def opened(self) -> None:
        """Read the labels of whole chunks, and cut off the rest."""
        labels: list[Label] = []
        size = kept = end = 0
        for raw in self.lines(MAX_LINE):
            if len(labels) == len(self._examples):
                raise self._foreign(len(labels), "is more than there are examples")
            example = self._examples[len(labels)]
            label = _parse(raw, example)
            if label is None:
                if _is_torn(raw, example):
                    break
                about = f"is not a label of line {example.line} of the data"
                raise self._foreign(len(labels), about)
            labels.append(label)
            size += len(raw)
            if len(labels) % self._chunk == 0 or len(labels) == len(self._examples):
                kept, end = len(labels), size
        self.labels = labels[:kept]
        self.cut(end)

    def append(self, labels: Sequence[Label]) -> None:
        """Write a chunk, and wait until it is on the disk; write nothing if the disk is full."""
        self.append_bytes(b"".join(label.to_json() for label in labels), sync=True)
        self.labels += labels

    def _foreign(self, before: int, what: str) -> ValueError:
        return ValueError(
            f"{self._path}, line {before + 1}, {what}: delete the file to label again, or move it"
        )


def label(
    target: LanguageModel,
    examples: Sequence[Example],
    path: Path,
    *,
    max_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    batch_size: int = 16,
    chunk: int = 256,
    enough: Callable[[list[Label]], bool] = lambda labels: False,
    progress: Callable[[int, int], None] = lambda examples, tokens: None,
) -> list[Label]:
    """Label examples, in their order, and return the labels.

    The label of an example with a completion is that; all others are the target's own outputs.
    Each chunk is decoded by itself, so that a run that was killed is resumed to the same bytes. The
    file does not record the options: give a resumed run the same ones.

    Args:
        target: The model that labels.
        examples: The examples; a sampled output depends on its place among them and the seed.
        path: A file for the labels. Those in it are kept, and labelling goes on after them.
        max_tokens: Upper bound on an output's tokens, EOS included.
        temperature: 0 for the greedy outputs, above 0 to sample them.
        seed: For sampling.
        batch_size: Prompts to decode side by side.
        chunk: The number of examples to label at a time.
        enough: Takes all labels so far, after each chunk; True ends the labelling.
        progress: Takes the numbers of examples labelled so far and of tokens in their labels; is
            called at the start, for labels that were there, and as each output ends.

    Raises:
        ValueError: If an option is out of its range, or the file is not about these examples.
        OSError: If the file cannot be written.
    """
    check_integer("chunk", chunk, 1)
    # What was allowed in the data may be longer than the target was made for.
    longest = max((len(example.prompt) for example in examples), default=0)
    decoder = SpeculativeDecoder(target, max_source_length=max(longest, 2))

    def outputs(part: Mapping[int, Example]) -> Iterator[tuple[int, list[int]]]:
        """Yield index and output of each example of a part, EOS included, as they end."""
        wanted = []
        for index, example in part.items():
            if example.completion is None:
                wanted.append((index, example.prompt))
            else:
                yield index, example.completion
        # Rows of similar length pad less; the order within a chunk is the same in a resumed run.
        for index, done in decoder.iter_batch(
            in_order_of_length(wanted, chunk), batch_size=batch_size, by_length=False,
            max_tokens=max_tokens, temperature=temperature, seed=seed,
        ):  # fmt: skip
            yield index, done.tokens + [target.info.eos_token_id] * (done.finish_reason == "eos")

    list(outputs({}))  # checks the options before the file is made
    with LabelFile(path, examples, chunk) as file:
        tokens = sum(len(known.tokens) for known in file.labels)
        progress(len(file.labels), tokens)
        while len(file.labels) < len(examples) and not (file.labels and enough(file.labels)):
            first = len(file.labels)
            part = dict(enumerate(examples[first : first + chunk], first))
            found: dict[int, list[int]] = {}
            for index, output in outputs(part):
                found[index] = output
                tokens += len(output)
                progress(first + len(found), tokens)
            file.append([Label(e.line, e.prompt, found[i]) for i, e in part.items()])
        return file.labels


def _parse(raw: bytes, example: Example) -> Label | None:
    """Parse the label of an example; return None if this is anything else."""
    try:
        tokens = json.loads(raw)["tokens"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        return None
    if example.completion not in (None, tokens):
        return None
    label = Label(example.line, example.prompt, tokens)
    return label if label.to_json() == raw else None


def _is_torn(raw: bytes, example: Example) -> bool:
    """Whether this is the beginning of the example's label, perhaps followed by zeros."""
    if raw.endswith(b"\n"):
        return False
    written = raw.rstrip(b"\x00")
    head = Label(example.line, example.prompt, []).to_json().removesuffix(b"]}\n")
    return written.startswith(head) or head.startswith(written)


@dataclass
class LabelBudget:
    """Says when labelling ends: with enough tokens, or when its share of the time is spent.

    Args:
        examples: What is labelled.
        chunk: The number of examples that are labelled at a time.
        tokens: Of prompts and labels; None for all examples. A limit on time goes first.
        time: The time of the run.
        share: Of that time, counted from the run's beginning.
    """

    examples: Sequence[Example]
    chunk: int
    tokens: int | None
    time: TimeBudget
    share: float
    _first: tuple[int, float] | None = None  # labels and time at the first report

    def is_spent(self, labels: Sequence[Label]) -> bool:
        """Whether these labels are enough."""
        self.time.save()
        if self.time.limit is not None:
            return self.time.spent > self.share * self.time.limit
        if self.tokens is None:
            return False
        return sum(len(each.prompt) + len(each.tokens) for each in labels) >= self.tokens

    def total(self, done: int, tokens: int) -> int:
        """Estimate the number of labels at the end, given those done and the tokens in them."""
        spent, most = self.time.spent, len(self.examples)
        first, began = self._first = self._first or (done, spent)
        if done == first:
            return most
        if self.time.limit is not None:
            left = max(0.0, self.share * self.time.limit - spent)
            whole = done + (done - first) * left / max(spent - began, 1e-9)
        elif self.tokens is not None:
            sources = sum(len(each.prompt) for each in self.examples) / most
            whole = self.tokens / (sources + tokens / done)
        else:
            return most
        chunks = -(-max(whole, done) // self.chunk)
        return min(most, round(chunks * self.chunk))
