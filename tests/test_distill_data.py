"""Prompts become examples, and examples labels; a run that was killed labels the same bytes."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from speculative_t5 import SpeculativeDecoder
from speculative_t5.distill import Data, Example, Label, label, read_data
from speculative_t5.distill.labels import _whole_chunks
from speculative_t5.files import LineFile
from speculative_t5.tokenizers import (
    ByteTokenizer,
    PromptEncoder,
    TransformersTokenizer,
    load_tokenizer,
)

import pytest
from checkpoints import refused
from conftest import EOS, edit_json, tiny_gemma, tiny_model
from families import write_tokenizer

MODEL = tiny_model(vocab_size=384)


@pytest.fixture
def read(tmp_path: Path) -> Any:
    """Write the given files below a folder, and read it or one file of it."""
    tokenizer = ByteTokenizer(tmp_path)

    def call(files: dict[str, str | bytes], name: str = "", **options: Any) -> Data:
        (tmp_path / "data").mkdir(exist_ok=True)
        for file, content in files.items():
            raw = content.encode() if isinstance(content, str) else content
            (tmp_path / "data" / file).write_bytes(raw)
        prompts = {key: options.pop(key) for key in ("prefix", "truncate") if key in options}
        encoder = PromptEncoder(MODEL, tokenizer, max_source_length=20, **prompts)
        data = read_data(tmp_path / "data" / name, encoder, tokenizer, **options)
        assert data.read == len(data.train) + len(data.valid) + sum(data.skipped.values())
        return data

    return call


def ids(text: str) -> list[int]:
    return [*(byte + 3 for byte in text.encode()), EOS]


def texts(examples: list[Example]) -> list[str]:
    return [bytes(i - 3 for i in example.prompt[:-1]).decode() for example in examples]


def as_json(*records: dict[str, Any]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def test_every_line_is_an_example_or_skipped_for_a_reason(read: Any) -> None:
    content = "one\n\ntwo\n" + "x" * 20 + "\n  \none\nfix: two\n" + "y" * 14 + "\nend"
    data = read({"a.txt": content}, "a.txt", prefix="fix: ")
    found = sorted(data.train + data.valid, key=lambda example: example.line)
    assert texts(found) == ["fix: one", "fix: two", "fix: " + "y" * 14, "fix: end"]
    assert found[0] == Example(1, ids("fix: one"), None)
    assert [example.line for example in found] == [1, 3, 8, 9]
    assert data.read == 9 and data.skipped == {"empty": 2, "too long": 1, "repeated": 2}
    cut = read({}, "a.txt", prefix="fix: ", truncate=True)
    assert cut.skipped == {"empty": 2, "repeated": 2}


def test_a_completion_is_the_output_to_learn(read: Any) -> None:
    records = as_json(
        {"prompt": "a", "completion": "A"},
        {"prompt": "b", "completion": ""},
        {"prompt": "c"},
        {"prompt": "d", "completion": "1234"},
        {"prompt": "e", "completion": "123"},
        {"prompt": " ", "completion": "x"},
        {"prompt": "f", "completion": "x\x01"},
        {"prompt": "d"},
        {"prompt": "g", "completion": None},
    )
    data = read({"a.jsonl": records}, "a.jsonl", max_tokens=4)
    found = {example.line: example.completion for example in data.train + data.valid}
    assert found == {
        1: ids("A"),
        2: [EOS],
        3: None,
        5: ids("123"),
        7: ids("x\x01"),
        8: None,
        9: None,
    }
    assert data.skipped == {"completion too long": 1, "empty": 1}


def test_a_completion_ends_at_its_first_eos(tmp_path: Path) -> None:
    class NamesEOS(ByteTokenizer):
        def encode(self, text: str) -> list[int]:
            return [EOS if i == 3 + ord("$") else i for i in super().encode(text)]

    tokenizer = NamesEOS(tmp_path)
    file = tmp_path / "a.jsonl"
    file.write_text(as_json({"prompt": "a", "completion": "x$y"}, {"prompt": "b"}))
    data = read_data(file, PromptEncoder(MODEL, tokenizer), tokenizer)
    (given,) = [example for example in data.train + data.valid if example.completion]
    assert given.completion == ids("x")


def test_a_completion_ends_where_the_tokenizer_ends_no_text(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, "bpe")
    edit_json(tmp_path / "tokenizer_config.json", tokenizer_class="GPT2Tokenizer")
    tokenizer, file = load_tokenizer(tmp_path), tmp_path / "a.jsonl"
    file.write_text(as_json({"prompt": "a", "completion": "He goes."}, {"prompt": "b"}))
    data = read_data(file, PromptEncoder(MODEL, tokenizer), tokenizer)
    (given,) = [example for example in data.train + data.valid if example.completion]
    assert given.completion == [*tokenizer.encode("He goes."), EOS]


def test_a_completion_for_t5gemma_is_what_it_would_write(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, "gemma")
    tokenizer, file = TransformersTokenizer(tmp_path), tmp_path / "a.jsonl"
    file.write_text(as_json({"prompt": "a", "completion": "He goes."}, {"prompt": "b"}))
    encoder = PromptEncoder(tiny_gemma("t5gemma2", vocab_size=320), tokenizer)
    data = read_data(file, encoder, tokenizer)
    (given,) = [example for example in data.train + data.valid if example.completion]
    assert given.completion == [*tokenizer.encode("He goes.")[1:], EOS]
    assert given.prompt == tokenizer.encode("a") and given.prompt[0] == 2


def test_labels_end_as_the_outputs_do(tmp_path: Path) -> None:
    """Where several ids may end an output."""
    model = tiny_gemma("t5gemma", vocab_size=20, seed=0, layers=2)
    model.info = replace(model.info, eos_token_ids=frozenset(range(1, 8)))
    given = [Example(line, [5, line, 9, 1], None) for line in range(2, 14)]
    labels = label(model, given, tmp_path / "labels.jsonl", max_tokens=12)
    ends = {each.tokens[-1] for each in labels if len(each.tokens) < 12}
    assert len(ends) > 1 and ends <= set(range(1, 8))


def test_a_completion_of_other_ids_than_the_targets_is_skipped(tmp_path: Path) -> None:
    tokenizer, file = ByteTokenizer(tmp_path), tmp_path / "a.jsonl"
    file.write_text(as_json({"prompt": "a", "completion": "z"}, {"prompt": "b"}, {"prompt": "c"}))
    small = PromptEncoder(tiny_model(vocab_size=ord("z") + 3), tokenizer)
    assert read_data(file, small, tokenizer).skipped == {"completion out of vocabulary": 1}


def test_the_field_and_the_format_can_be_given(read: Any) -> None:
    records = as_json({"text": "a", "prompt": "x"}, {"text": "b"})
    files = {"a.json": records, "a.JSONL": records, "a.data": records}
    for name, form in (("a.json", None), ("a.JSONL", None), ("a.data", "jsonl")):
        data = read(files, name, field="text", form=form)
        assert sorted(texts(data.train + data.valid)) == ["a", "b"]


def test_a_folder_has_its_own_held_out_prompts(read: Any) -> None:
    train = as_json(*({"prompt": str(i)} for i in range(10)))
    files = {"train.jsonl": train, "valid.txt": "9\nz\ny\n9\n3\n", "test.jsonl": "not read"}
    data = read(files)
    assert sorted(texts(data.valid)) == ["3", "9", "y", "z"]
    assert sorted(texts(data.train)) == [str(i) for i in range(10) if i not in (3, 9)]
    assert data.read == 15 and data.skipped == {"repeated": 3}, "nothing held out is trained on"


def test_some_prompts_are_held_out(read: Any) -> None:
    for lines, held in ((2, 1), (39, 1), (40, 2), (5000, 200)):
        data = read({"a.txt": "".join(f"{i}\n" for i in range(lines))}, "a.txt")
        assert len(data.valid) == held and len(data.train) == lines - held
        assert not set(texts(data.valid)) & set(texts(data.train))


def test_no_more_than_200_prompts_of_a_valid_file_are_held_out(read: Any) -> None:
    lines = {"train.txt": "a\n7\n", "valid.txt": "".join(f"{i}\n" for i in range(203))}
    data = read(lines)
    assert len(data.valid) == 200 and data.skipped == {"held out beyond 200": 3, "repeated": 1}


def test_prompts_decide_what_is_held_out_and_the_seed_the_order_to_train_in(read: Any) -> None:
    names = [str(i) for i in range(100)]
    files = {"a.txt": "\n".join(names), "b.txt": "\n".join(reversed(names))}
    one, same, other = (read(files, "a.txt", seed=seed) for seed in (3, 3, 4))
    held_out = texts(one.valid)
    assert held_out == texts(read(files, "b.txt", seed=7).valid) and len(held_out) == 5
    assert held_out != sorted(held_out, key=int), "not the first of the file first"
    assert one == same
    assert one.train != other.train and sorted(texts(one.train)) == sorted(texts(other.train))
    assert one.train != sorted(one.train, key=lambda example: example.line)


def test_the_digest_depends_on_every_byte(read: Any) -> None:
    contents = [("a\nb\n", "c\n"), ("a\nb\n", "c"), ("a\n", "b\nc\n"), ("a\nb\n", "c\n")]
    digests = [read({"train.txt": a, "valid.txt": b}).digest for a, b in contents]
    assert len(set(digests)) == 3 and digests[0] == digests[3]


BAD: list[tuple[dict[str, str | bytes], str, str]] = [
    ({"a.jsonl": '{"prompt": "a"}\nb\n'}, "a.jsonl", "a.jsonl, line 2: not JSON"),
    ({"a.jsonl": '{"text": "a"}\n'}, "a.jsonl", "line 1: no field 'prompt' (found: 'text')"),
    ({"a.txt": b"a\nb\xff\n"}, "a.txt", "a.txt, line 2: not UTF-8: byte 0xff"),
    ({"a.jsonl": '{"prompt": "a", "completion": 3}'}, "a.jsonl", "'completion' is a number"),
    ({"a.csv": "a,b\n"}, "a.csv", "a.csv is a table"),
    ({"valid.txt": "a\nb\n"}, "", "has neither train.jsonl nor train.txt"),
    ({"train.txt": "a\n", "train.jsonl": ""}, "", "both train.jsonl and train.txt"),
    ({"a.txt": ""}, "a.txt", "a.txt has 0 usable prompts in 0 lines"),
    ({"a.txt": "a\n\na\n"}, "a.txt", "1 usable prompt in 3 lines (1 empty, 1 repeated)"),
    ({"a.txt": "x" * 20}, "a.txt", "0 usable prompts in 1 line (1 too long)"),
    ({"train.txt": "a\n", "valid.txt": "a\nb\n"}, "", "train.txt has 0 usable prompts in 1 line"),
    ({"train.txt": "a\nb\n", "valid.txt": "\n"}, "", "valid.txt has 0 usable prompts in 1 line"),
]


@pytest.mark.parametrize(("files", "name", "found"), BAD, ids=[found for *_, found in BAD])
def test_bad_data_is_refused_in_one_line(read: Any, files: Any, name: str, found: str) -> None:
    with refused(re.escape(found), found):
        read(files, name)


def test_what_is_no_file_is_refused(read: Any, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="data/gone"):
        read({}, "gone")
    os.mkfifo(tmp_path / "data" / "pipe")
    with pytest.raises(ValueError, match="pipe is a device or a pipe, expected"):
        read({}, "pipe")
    with pytest.raises(ValueError, match="has the outputs: give the name of the prompts' field"):
        read({"a.txt": "a\nb\n"}, "a.txt", field="completion")


pytestmark = pytest.mark.cpu  # chunks of other sizes are to have the same bits

CHUNK, MOST = 4, 8
TARGET = tiny_model(vocab_size=20, seed=18, layers=2)  # some outputs end, some at once
EXAMPLES = [
    Example(
        3 * i + 1,
        [*(2 + (i * k) % 17 for k in range(1, 2 + i % 5)), EOS],
        [7] * (i % 3) + [EOS] if i % 7 == 5 else None,
    )
    for i in range(26)
]


def run(path: Path, examples: list[Example] = EXAMPLES, **options: Any) -> list[Label]:
    defaults: dict[str, Any] = {"max_tokens": MOST, "chunk": CHUNK, "batch_size": 3}
    return label(TARGET, examples, path, **defaults | options)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file of an uninterrupted run."""
    path = tmp_path_factory.mktemp("whole") / "labels.jsonl"
    run(path, temperature=1.0, seed=5)
    return path.read_bytes()


def test_labels_are_the_targets_outputs(tmp_path: Path) -> None:
    labels = run(tmp_path / "labels.jsonl")
    assert [(x.line, x.prompt) for x in labels] == [(e.line, e.prompt) for e in EXAMPLES]
    decoder = SpeculativeDecoder(TARGET)
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
        lines[0].replace(b'"line": 1', b'"line": 2') + lines[1]: "line 1, is not a label",
        lines[0] + lines[2]: "line 2, is not a label of line 4",
        lines[0][:-9] + b"\n" + lines[1]: "line 1, is not a label",
    }  # fmt: skip
    for content, found in others.items():
        path.write_bytes(content)
        with refused(found):
            run(path)
        assert path.read_bytes() == content


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
