"""The target labels prompts, chunk by chunk; a run that was killed goes on to the same bytes."""

from __future__ import annotations

import errno
import itertools
import os
from pathlib import Path
from typing import Any

from speculative_t5 import SpeculativeDecoder
from speculative_t5.distill import Example, Label, label
from speculative_t5.distill.labels import _whole_chunks
from speculative_t5.files import LineFile

import pytest
from conftest import EOS, tiny_model
from messages import check_message

pytestmark = pytest.mark.cpu  # chunks of other sizes are to have the same bits

CHUNK, MOST = 4, 8
MODEL = tiny_model(vocab_size=20, seed=18, layers=2)  # some outputs end, some at once
EXAMPLES = [
    Example(3 * i + 1, [*(2 + (i * k) % 17 for k in range(1, 2 + i % 5)), EOS],
            [7] * (i % 3) + [EOS] if i % 7 == 5 else None)
    for i in range(26)
]  # fmt: skip


def run(path: Path, examples: list[Example] = EXAMPLES, **options: Any) -> list[Label]:
    defaults: dict[str, Any] = {"max_tokens": MOST, "chunk": CHUNK, "batch_size": 3}
    return label(MODEL, examples, path, **defaults | options)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file of an uninterrupted run."""
    path = tmp_path_factory.mktemp("whole") / "labels.jsonl"
    run(path, temperature=1.0, seed=5)
    return path.read_bytes()


def test_labels_are_the_targets_outputs(tmp_path: Path) -> None:
    labels = run(tmp_path / "labels.jsonl")
    assert [(x.line, x.prompt) for x in labels] == [(e.line, e.prompt) for e in EXAMPLES]
    decoder = SpeculativeDecoder(MODEL)
    seen = set()
    for example, found in zip(EXAMPLES, labels, strict=True):
        if example.completion is not None:
            assert found.tokens == example.completion != []
            continue
        done = decoder.generate(example.prompt, max_tokens=MOST)
        end = [EOS] if done.finish_reason == "eos" else []
        assert found.tokens == done.tokens + end
        assert end or len(found.tokens) == MOST
        seen |= {done.finish_reason, bool(done.tokens)}
    assert seen == {"eos", "length", True, False}, "empty outputs are labels, too"
    assert run(tmp_path / "labels.jsonl") == labels, "read back"


def test_sampled_labels_depend_on_the_seed_and_the_place_alone(tmp_path: Path) -> None:
    same = [Example(1, [5, 6, EOS], None)] * 20
    options: dict[str, Any] = {"temperature": 1.0, "seed": 2}
    labels = run(tmp_path / "a", same, **options)
    assert len({tuple(x.tokens) for x in labels}) > 10, "each place has its own draws"
    assert run(tmp_path / "b", same, chunk=7, batch_size=2, **options) == labels
    some = same[:9] + [Example(1, [5, 6, EOS], [EOS])] + same[10:]
    others = run(tmp_path / "c", some, **options)
    assert others[:9] + others[10:] == labels[:9] + labels[10:]
    assert run(tmp_path / "d", same, temperature=1.0, seed=3) != labels


def test_what_a_kill_left_of_a_chunk_is_cut_off(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "labels.jsonl"
    ends = [0, *(place + 1 for place, byte in enumerate(whole) if byte == ord("\n"))]
    counts = [*range(0, len(EXAMPLES), CHUNK), len(EXAMPLES)]
    for size in sorted({*range(0, len(whole), 13), *ends, *(end - 1 for end in ends[1:])}):
        for zeros in (b"", b"\x00" * 50)[: 1 + (size < len(whole))]:
            path.write_bytes(whole[:size] + zeros)
            with LineFile(path, "busy") as file:
                kept = len(_whole_chunks(file, path, EXAMPLES, CHUNK))
            assert kept == max(count for count in counts if ends[count] <= size)
            assert path.read_bytes() == whole[: ends[kept]]


def test_other_files_are_left_alone(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "labels.jsonl"
    lines = whole.splitlines(keepends=True)
    number = str(EXAMPLES[0].prompt[0]).encode()
    others = {
        b"something else\n": "line 1, is not a label of line 1 of the data",
        b"\x00" * 50 + b"\n" + lines[0]: "line 1, is not a label",
        b"[1]\n" * 3: "line 1, is not a label",
        lines[0].replace(b"[" + number, b"[19", 1): "line 1, is not a label",
        lines[0].replace(b'"line":1', b'"line":2') + lines[1]: "line 1, is not a label",
        lines[0] + lines[2]: "line 2, is not a label of line 4",
        lines[0][:-9] + b"\n" + lines[1]: "line 1, is not a label",
    }  # fmt: skip
    for content, found in others.items():
        path.write_bytes(content)
        with pytest.raises(ValueError) as caught:
            run(path)
        check_message(str(caught.value), found)
        assert path.read_bytes() == content


def test_a_full_disk_leaves_whole_chunks(
    tmp_path: Path, whole: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, write, calls = tmp_path / "labels.jsonl", os.write, itertools.count(1)

    def full(file: int, data: Any) -> int:
        if (call := next(calls)) > 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data[:10] if call == 3 else data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space left on device: .*labels.jsonl"):
            run(path, temperature=1.0, seed=5)
    kept = path.read_bytes()
    assert whole.startswith(kept) and kept.count(b"\n") == CHUNK * 2
    run(path, temperature=1.0, seed=5)
    assert path.read_bytes() == whole


def test_labelling_stops_when_there_are_enough(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "labels.jsonl"
    counts: list[tuple[int, int]] = []
    options: dict[str, Any] = {"temperature": 1.0, "seed": 5}

    def enough(labels: list[Label]) -> bool:
        return sum(len(x.tokens) for x in labels) >= 30

    labels = run(path, enough=enough, progress=lambda *count: counts.append(count), **options)
    assert 0 < len(labels) < len(EXAMPLES) and len(labels) % CHUNK == 0
    assert enough(labels) and not enough(labels[:-CHUNK])
    assert [done for done, _ in counts] == list(range(len(labels) + 1))
    assert counts[-1][1] == sum(len(x.tokens) for x in labels)
    assert run(path, enough=enough, **options) == labels, "read back"
    run(path, **options)
    assert path.read_bytes() == whole, "more are wanted later"


def test_options_are_checked_before_the_file_is_made(tmp_path: Path) -> None:
    path = tmp_path / "labels.jsonl"
    for options in ({"max_tokens": 0}, {"temperature": -1.0}, {"batch_size": 0}):
        with pytest.raises(ValueError, match=f"{next(iter(options))} must be"):
            run(path, **options)
    assert not path.exists()
    assert run(path, []) == []
