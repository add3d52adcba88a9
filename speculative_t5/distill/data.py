"""The prompts of a run: read, encoded, and some of them held out."""

import hashlib
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from .. import tokenizers
from ..errors import count
from ..options import check_integer
from ..tables import TABLES
from ..tokenizers import (
    PROMPT_FIELD,
    PROMPT_SUFFIXES,
    Format,
    PromptEncoder,
    Tokenizer,
    TransformersTokenizer,
)

HELD_OUT, MOST_HELD_OUT = 20, 200  # one prompt in 20, and no more than 200
COMPLETION_FIELD = "completion"  # the field of a JSON object that has the output


@dataclass(frozen=True)
class Example:
    """A prompt, perhaps with the output to learn."""

    line: int  # the number of its line in its file, from 1
    prompt: list[int]  # source ids, EOS included
    completion: list[int] | None  # target ids, EOS included; None: the target generates them


@dataclass(frozen=True)
class Data:
    """The usable prompts of a file or a folder, and an account of its lines."""

    train: list[Example]  # shuffled
    valid: list[Example]  # in a random order that follows from their prompts; none is in `train`
    read: int  # lines: all of `train`, `valid` and `skipped`
    skipped: Mapping[str, int]  # lines that are not used, by reason
    digest: str  # hexadecimal SHA-256 that depends on every byte of the files


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

    The `field` of a JSON object has the prompt, and its `completion`, if any, is the output to
    learn, of at most `max_tokens` tokens, EOS included. `form` is "text" or "jsonl", whatever the
    names of the files say. The seed is for the order of `Data.train`. A line that cannot be read,
    or too few usable prompts, are a ValueError.
    """
    check_integer("max_tokens", max_tokens, 1)
    if field == COMPLETION_FIELD:
        raise ValueError(
            f"field is {field!r}, which has the outputs: give the name of the prompts' field"
        )
    train_path, valid_path = _find_files(Path(path))
    forms = {each: form or _form_of(each) for each in (train_path, valid_path) if each}
    if field != PROMPT_FIELD and "jsonl" not in forms.values():
        raise ValueError(
            f"field is {field!r}, and {train_path} is text, whose lines have no fields: leave out "
            "field, or give format jsonl"
        )
    reader = _Reader(encoder, tokenizer, field, forms, max_tokens)
    # The valid file comes first, so that its prompts are the ones kept.
    valid = reader.read(valid_path, 1) if valid_path else []
    train = reader.read(train_path, 1 if valid_path else 2)
    most = MOST_HELD_OUT
    if valid_path is None:
        valid, most = train, min(max(len(train) // HELD_OUT, 1), MOST_HELD_OUT)
    elif len(valid) > most:
        reader.skipped[f"held out beyond {most}"] = len(valid) - most
    valid = sorted(valid, key=lambda example: _digest_of_ids(example.prompt))[:most]
    if valid_path is None:
        chosen = {example.line for example in valid}
        train = [example for example in train if example.line not in chosen]
    random.Random(seed).shuffle(train)
    digest = hashlib.sha256(b"".join(reader.digests)).hexdigest()
    return Data(train, valid, reader.lines, dict(reader.skipped), digest)


def _find_files(path: Path) -> tuple[Path, Path | None]:
    """Return the file to train on, and that of held-out prompts if there is one."""
    if path.is_file():
        return path, None
    path.stat()  # raises an error if there is nothing
    if not path.is_dir():
        raise ValueError(f"{path} is a device or a pipe, expected a file or a folder")
    found: list[Path | None] = []
    for name in ("train", "valid"):
        files = [file for end in ("jsonl", "txt") if (file := path / f"{name}.{end}").is_file()]
        if len(files) > 1:
            raise ValueError(
                f"the folder {path} has both {files[0].name} and {files[1].name}: delete one of "
                "them"
            )
        found.append(files[0] if files else None)
    train, valid = found
    if train is None:
        raise ValueError(
            f"the folder {path} has neither train.jsonl nor train.txt: give one that has, or a "
            "file of prompts"
        )
    return train, valid


@dataclass
class _Reader:
    """Reads files into examples with different prompts, and accounts for their lines."""

    encoder: PromptEncoder
    tokenizer: Tokenizer
    prompt_field: str
    forms: Mapping[Path, Format]
    max_tokens: int
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
            form, shard = self.forms[path], tokenizers.Shard()
            for line in tokenizers.read_lines(
                stream, form, self.prompt_field, shard, completion=COMPLETION_FIELD
            ):
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
            ids = self.encoder.fit(ids).ids
        except ValueError:  # there is no other reason left
            return "too long"
        if (key := _digest_of_ids(ids)) in self.seen:
            return "repeated"
        target = None if completion is None else self._target(completion)
        if target is not None:
            if len(target) > self.max_tokens:
                return "completion too long"
            if max(target) >= self.encoder.model.info.vocab_size:
                return "completion out of vocabulary"
        self.seen.add(key)
        return Example(line, ids, target)

    def _target(self, completion: str) -> list[int]:
        """Return the ids that an output has: up to EOS, which a completion may name itself."""
        info, ids = self.encoder.model.info, self.tokenizer.encode(completion)
        if isinstance(self.tokenizer, TransformersTokenizer):  # it begins texts, and ends none
            ids = ids[len(self.tokenizer.encode("")) :]
        ids = [*ids, info.eos_token_id]  # GPT-2's and BERT's tokenizers, too, add none
        return ids[: next(i for i, token in enumerate(ids, 1) if token in info.eos_token_ids)]


def _form_of(path: Path) -> Format:
    suffix = path.suffix.lower()
    if suffix in TABLES:
        raise ValueError(f"{path} is a table, expected lines of text or JSON Lines")
    return "jsonl" if suffix in PROMPT_SUFFIXES else "text"


def _digest_of_ids(ids: Sequence[int]) -> bytes:
    return hashlib.sha256(np.array(ids, "<i4").tobytes()).digest()


def reasons(skipped: Mapping[str, int]) -> str:
    """Return counts by reason in brackets, a space before them; nothing if there are none."""
    listed = ", ".join(f"{number:,} {reason}" for reason, number in skipped.items())
    return f" ({listed})" if listed else ""
