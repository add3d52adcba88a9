"""What may be wrong with a tokenizer.json: steps that make texts very long, and panics."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import first_line, read_json
from .settings import GET_FILE_AGAIN

MAX_STEPS = 100  # that a text goes through; published files have up to six
MAX_GROWTH = 1000.0  # of a text, by all steps together; NFKC makes 18 characters of one
MAX_ADDED = 1000  # characters that steps put before a text, and control tokens around it
# Bytes that a Precompiled normalizer puts in place of one: those of a published one, and more.
USUAL_REPLACEMENT, MAX_REPLACEMENT = 33, 256
_NESTED = ("normalizers", "pretokenizers", "decoders", "processors")


def check_steps(path: Path) -> None:
    """Refuse steps that take a time out of proportion to the text they are given.

    Args:
        path: A tokenizer.json.
    """
    stored = read_json(path, GET_FILE_AGAIN)
    steps = [
        step
        for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder")
        for step in _flattened(stored.get(name))
    ]
    growth, added, around, longest = 1.0, 0, 0, 0
    for step in steps:
        growth *= _growth(step)
        prepended = step.get("prepend") if step.get("type") == "Prepend" else None
        added += len(prepended) if isinstance(prepended, str) else 0
        single = step.get("single")
        around = max(around, len(single) if isinstance(single, list) else 0)
        if (charsmap := _charsmap(step)) is not None:
            replacements = _replacements(charsmap)
            if not replacements:  # the library would panic
                raise ValueError(
                    f"{path} has a Precompiled normalizer that is damaged: {GET_FILE_AGAIN}"
                )
            most = max(map(len, replacements))
            longest = max(longest, most)
            growth *= max(1.0, most / USUAL_REPLACEMENT)
    for what, found, limit in (
        ("steps for a text", len(steps), MAX_STEPS),
        ("characters that it puts before a text", added, MAX_ADDED),
        ("control tokens that it puts around a text", around, MAX_ADDED),
        ("bytes that it puts in place of one", longest, MAX_REPLACEMENT),
        ("times the length that a text may get", growth, MAX_GROWTH),
    ):
        if found > limit:
            raise ValueError(
                f"{path} has {found:,.0f} {what}, expected at most {limit:,.0f}: use another "
                "tokenizer.json"
            )


def _flattened(step: Any) -> Iterator[dict[str, Any]]:
    """Yield the steps of a part of the file, those of sequences one by one."""
    waiting = [step]
    while waiting:
        found = waiting.pop()
        if not isinstance(found, dict):
            continue
        nested = [found[name] for name in _NESTED if isinstance(found.get(name), list)]
        if nested:
            waiting += [each for steps in nested for each in steps]
        else:
            yield found


def _growth(step: dict[str, Any]) -> float:
    """Return how many characters a step may make of one."""
    content, pattern = step.get("content"), step.get("pattern")
    if step.get("type") != "Replace" or not isinstance(content, str):
        return 1.0
    text = pattern.get("String") if isinstance(pattern, dict) else None
    if isinstance(text, str) and text:
        return max(1.0, len(content) / len(text))
    return 1.0 + (len(content) if len(content) > 1 else 0)  # a regular expression may match nothing


def _charsmap(step: dict[str, Any]) -> bytes | None:
    """Return what a Precompiled normalizer holds; None for another step."""
    stored = step.get("precompiled_charsmap")
    if step.get("type") != "Precompiled" or not isinstance(stored, str):
        return None
    with contextlib.suppress(ValueError):  # b"" is damaged, too
        return base64.b64decode(stored)
    return b""


def _replacements(charsmap: bytes) -> list[bytes]:
    """Return the UTF-8 that a charsmap puts in place of others; none if it is damaged."""
    size = int.from_bytes(charsmap[:4], "little")  # of the trie before them
    whole = charsmap[4 + size :]
    with contextlib.suppress(UnicodeDecodeError):
        if size and size % 4 == 0 and whole.endswith(b"\0") and whole.decode():
            return whole.split(b"\0")
    return []


@contextlib.contextmanager
def in_one_line(found: str, advice: str) -> Iterator[None]:
    """Turn whatever the libraries raise into a ValueError: what was found, the cause, the advice.

    They raise errors of several types; a panic of `tokenizers` is no Exception.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise ValueError(f"{found}: {first_line(error)}; {advice}") from error
