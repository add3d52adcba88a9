"""The prompts of a run: read, some of them held out, and, once they have labels, in batches."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import numpy as np

from ..errors import check_integer, count
from ..models import T5Config
from ..tokenizers import (
    JSON_SUFFIXES,
    PROMPT_FIELD,
    Format,
    PromptEncoder,
    Shard,
    Tokenizer,
    read_lines,
)

HELD_OUT, MOST_HELD_OUT = 20, 200  # one prompt in 20, and no more than 200
TABLES = (".csv", ".tsv")
COMPLETION = "completion"  # the field of a JSON object that has the output
POOL = 2048  # labels that are sorted by length together


@dataclass(frozen=True)
class Example:
    """A prompt, perhaps with the output to learn.

    Attributes:
        line: The number of its line in its file, from 1.
        prompt: Source ids, EOS included.
        completion: Target ids, EOS included; None if the target is to generate them.
    """

    line: int
    prompt: list[int]
    completion: list[int] | None


@dataclass(frozen=True)
class Label:
    """An output to learn.

    Attributes:
        line: The number of the prompt's line in its file, from 1.
        prompt: Source ids, EOS included.
        tokens: Target ids; EOS is the last unless `max_tokens` cut the output.
    """

    line: int
    prompt: list[int]
    tokens: list[int]

    def to_json(self) -> bytes:
        """Return one line of JSON, newline included."""
        return json.dumps(vars(self), separators=(",", ":")).encode() + b"\n"


@dataclass(frozen=True)
class Data:
    """The usable prompts of a file or a folder, and an account of its lines.

    Attributes:
        train: Examples to train on, shuffled.
        valid: Held-out examples, in an order that is random but follows from their prompts alone;
            none has a prompt of `train`.
        read: The number of lines read: all of `train`, `valid` and `skipped`.
        skipped: Lines that are not used, counted by reason: "empty", "too long", "repeated",
            "completion too long", "completion out of vocabulary" and "held out beyond 200".
        digest: Hexadecimal SHA-256 that depends on every byte of the files.
    """

    train: list[Example]
    valid: list[Example]
    read: int
    skipped: Mapping[str, int]
    digest: str


def read_data(
    path: str | Path,
    encoder: PromptEncoder,
    tokenizer: Tokenizer,
    *,
    field: str = PROMPT_FIELD,
    form: Format | None = None,
    seed: int = 0,
    max_tokens: int = 256,
) -> Data:
    """Read the prompts of a file, or of the files train and valid of a folder.

    A file has a prompt a line, as text or, if its name ends in .jsonl, .ndjson or .json, as JSON
    objects. A folder has train.jsonl or train.txt, and perhaps valid.jsonl or valid.txt, of which
    200 prompts are used; without those, one usable prompt in 20 is held out, at least 1 and at most
    200. Those whose ids have the smallest digests are chosen, whatever their order.

    Args:
        path: The file or folder.
        encoder: Encodes the prompts, with their prefix.
        tokenizer: Encodes the completions.
        field: The field of a JSON object that has the prompt; its `completion`, if any, is the
            output to learn.
        form: "text" or "jsonl", whatever the names of the files say; None to go by the names.
        seed: For the order of `Data.train`.
        max_tokens: The longest completion in tokens, EOS included.

    Raises:
        ValueError: If a line cannot be read, or there are too few usable prompts.
        OSError: If a file cannot be read.
    """
    check_integer("max_tokens", max_tokens, 1)
    if field == COMPLETION:
        raise ValueError(
            f"field is {field!r}, which has the outputs: give the name of the prompts' field"
        )
    train_path, valid_path = _find_files(Path(path))
    forms = [form or _form_of(each) for each in (train_path, valid_path) if each]
    if field != PROMPT_FIELD and "jsonl" not in forms:
        raise ValueError(
            f"field is {field!r}, and {train_path} is text, whose lines have no fields: leave out "
            "field, or give format jsonl"
        )
    reader = _Reader(encoder, tokenizer, field, form, max_tokens, encoder.vocab_size)
    # The valid file comes first, so that its prompts are the ones kept.
    valid = reader.read(valid_path, 1) if valid_path else []
    train = reader.read(train_path, 1 if valid_path else 2)
    if valid_path is None:
        valid = _hold_out(train, min(max(len(train) // HELD_OUT, 1), MOST_HELD_OUT))
        chosen = {example.line for example in valid}
        train = [example for example in train if example.line not in chosen]
    else:
        if (beyond := len(valid) - MOST_HELD_OUT) > 0:
            reader.skipped[f"held out beyond {MOST_HELD_OUT}"] = beyond
        valid = _hold_out(valid, MOST_HELD_OUT)
    random.Random(seed).shuffle(train)
    digest = hashlib.sha256(b"".join(reader.digests)).hexdigest()
    return Data(train, valid, reader.lines, dict(reader.skipped), digest)


def _find_files(path: Path) -> tuple[Path, Path | None]:
    """Return the file to train on, and the file of held-out prompts if there is one."""
    if path.is_file():
        return path, None
    path.stat()  # raises an error if there is nothing
    if not path.is_dir():
        raise ValueError(f"{path} is a device or a pipe, expected a file or a folder")
    train, valid = _find(path, "train"), _find(path, "valid")
    if train is None:
        raise ValueError(
            f"the folder {path} has neither train.jsonl nor train.txt: give one that has, or a "
            "file of prompts"
        )
    return train, valid


def _find(folder: Path, name: str) -> Path | None:
    """Return the one file of that name with either suffix; None if there is none."""
    found = [path for end in (".jsonl", ".txt") if (path := folder / f"{name}{end}").is_file()]
    if len(found) > 1:
        raise ValueError(
            f"the folder {folder} has both {found[0].name} and {found[1].name}: delete one of them"
        )
    return found[0] if found else None


@dataclass
class _Reader:
    """Reads files into examples with different prompts, and accounts for their lines."""

    encoder: PromptEncoder
    tokenizer: Tokenizer
    prompt_field: str
    form: Format | None
    max_tokens: int
    vocab_size: int
    lines: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    seen: set[bytes] = field(default_factory=set)
    digests: list[bytes] = field(default_factory=list)  # SHA-256 of each file

    def read(self, path: Path, least: int) -> list[Example]:
        """Read a file; refuse it if it has fewer than `least` usable prompts."""
        examples: list[Example] = []
        lines, skipped = 0, Counter[str]()
        with path.open("rb") as stream:
            self.digests.append(hashlib.file_digest(stream, "sha256").digest())
            stream.seek(0)
            form = self.form or _form_of(path)
            found = read_lines(stream, form, self.prompt_field, Shard(), completion=COMPLETION)
            for line in found:
                lines += 1
                if line.is_empty:
                    skipped["empty"] += 1
                elif line.prompt is None:
                    raise ValueError(f"{path}, line {line.number}: {line.error}")
                else:
                    example = self._example(line.number, line.prompt, line.completion)
                    if isinstance(example, Example):
                        examples.append(example)
                    else:
                        skipped[example] += 1
        self.lines += lines
        self.skipped += skipped
        if len(examples) < least:
            raise ValueError(
                f"{path} has {count(len(examples), 'usable prompt')} in {count(lines, 'line')}"
                f"{reasons(skipped)}: give at least {count(least, 'different prompt')} that "
                "the model can read"
            )
        return examples

    def _example(self, line: int, prompt: str, completion: str | None) -> Example | str:
        """Encode an example; return why it is skipped if it cannot be used."""
        ids = self.encoder.ids(prompt)
        try:
            ids = self.encoder.fit(ids, self.max_tokens).ids
        except ValueError:  # there is no other reason left
            return "too long"
        if (key := _digest(ids)) in self.seen:
            return "repeated"
        target = None
        if completion is not None:
            target = self.tokenizer.encode(completion)
            # A completion may name EOS itself.
            target = target[: target.index(target[-1]) + 1]
            if len(target) > self.max_tokens:
                return "completion too long"
            if max(target) >= self.vocab_size:
                return "completion out of vocabulary"
        self.seen.add(key)
        return Example(line, ids, target)


def _form_of(path: Path) -> Format:
    """Return the format that a file's name stands for."""
    suffix = path.suffix.lower()
    if suffix in TABLES:
        raise ValueError(f"{path} is a table, expected lines of text or JSON Lines")
    return "jsonl" if suffix in JSON_SUFFIXES else "text"


def _hold_out(examples: Sequence[Example], count: int) -> list[Example]:
    """Return those whose prompts have the smallest digests, in their order."""
    return sorted(examples, key=lambda example: _digest(example.prompt))[:count]


def _digest(ids: Sequence[int]) -> bytes:
    return hashlib.sha256(np.array(ids, "<i4").tobytes()).digest()


def reasons(skipped: Mapping[str, int]) -> str:
    """Return counts by reason in brackets, a space before them; nothing if there are none."""
    listed = ", ".join(f"{number:,} {reason}" for reason, number in skipped.items())
    return f" ({listed})" if listed else ""


@dataclass(frozen=True)
class LabelBatch:
    """Labelled prompts, padded.

    Attributes:
        sources: (B, S) int32.
        source_mask: (B, S) bool, True at real tokens.
        fed: What the decoder reads, the start token and then all labels but the last, (B, L) int32.
        positions: Where `fed` is real, as indices of the flattened (B * L,) array, (P,) int32.
        labels: The token after each of these, (P,) int32.
    """

    sources: mx.array
    source_mask: mx.array
    fed: mx.array
    positions: mx.array
    labels: mx.array


def make_batch(examples: Sequence[Label], config: T5Config) -> LabelBatch:
    """Pad examples to one batch for a target of that configuration."""
    start, pad = config.decoder_start_token_id, config.pad_token_id
    sources = [example.prompt for example in examples]
    fed = [[start, *example.tokens[:-1]] for example in examples]
    width, length = max(map(len, sources)), max(map(len, fed))
    positions = [row * length + i for row, ids in enumerate(fed) for i in range(len(ids))]
    return LabelBatch(
        mx.array([ids + [pad] * (width - len(ids)) for ids in sources], dtype=mx.int32),
        mx.array([[True] * len(ids) + [False] * (width - len(ids)) for ids in sources]),
        mx.array([ids + [pad] * (length - len(ids)) for ids in fed], dtype=mx.int32),
        mx.array(positions, dtype=mx.int32),
        mx.array([token for example in examples for token in example.tokens], dtype=mx.int32),
    )


def group(examples: Sequence[Label], batch_tokens: int) -> list[list[Label]]:
    """Group examples of similar length, at most `batch_tokens` tokens a group, padding included.

    An example that has more makes a group of its own.
    """
    ordered = sorted(examples, key=lambda each: (len(each.prompt), len(each.tokens), each.line))
    groups: list[list[Label]] = []
    width = length = 0
    for example in ordered:
        width, length = max(width, len(example.prompt)), max(length, len(example.tokens))
        if not groups or (len(groups[-1]) + 1) * (width + length) > batch_tokens:
            groups.append([])
            width, length = len(example.prompt), len(example.tokens)
        groups[-1].append(example)
    return groups


def batches(
    examples: Sequence[Label], batch_tokens: int, seed: int, first: int = 0
) -> Iterator[list[Label]]:
    """Yield groups of examples without end, epoch by epoch, from the group number `first` on.

    An epoch's order depends on its number and the seed only, so that a run can be resumed anywhere.
    """
    for epoch in itertools.count():
        rng = random.Random(f"{seed} {epoch}")
        shuffled = rng.sample(examples, len(examples))
        pools = (shuffled[start : start + POOL] for start in range(0, len(shuffled), POOL))
        groups = [each for pool in pools for each in group(pool, batch_tokens)]
        rng.shuffle(groups)
        yield from groups[first:]
        first = max(0, first - len(groups))
