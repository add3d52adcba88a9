"""Every error says what was wrong, what was found and what to do, in one line.

The sources are walked for everything that raises or shows a message; messages that others complete
are listed with them, and triggered for real.
"""

from __future__ import annotations

import ast
import errno
import io
import itertools
import json
import os
import pickle
import re
import signal
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from speculative_t5.checkpoints.npz import read_npz
from speculative_t5.checkpoints.t5 import open_checkpoint
from speculative_t5.checkpoints.torch_bin import read_bin
from speculative_t5.cli import main as cli
from speculative_t5.cli import terminal
from speculative_t5.cli.bench import _starts
from speculative_t5.cli.job import Record, process
from speculative_t5.cli.prompts import Shard, read_lines
from speculative_t5.tokenizers import ByteTokenizer, JSONTokenizer
from speculative_t5.tokenizers.encoding import PromptEncoder

import numpy as np
import pytest
from conftest import REPOSITORY, run, tiny_model
from messages import IMPERATIVES, check_message, complaint, what_is_wrong

HOLE = "{}"  # what is only known when it is raised

# Messages that show nothing found, and why there is nothing to show.
NOTHING_FOUND = {
    "the records were to go to standard output, which is closed: give an --output": "no more",
    "the prompt was to come from standard input, which is closed: give it by --prompt": "no more",
    "the prompts were to come from standard input, which is closed: give a file": "no more",
    "--resume keeps OUTPUT and --force replaces it: give one of them": "both have no value",
    "--plot needs matplotlib, which is not installed: run pip install matplotlib": "it is not",
    "the prompt is empty: give some text by --prompt or on standard input": "it is empty",
    "the prompt is empty: give some text": "it is empty",
    "this process was forked from one that had used MLX, and has none of its threads: use "
    "multiprocessing's spawn start method": "that it was forked",
    "the prompt is empty: give some ids": "it is empty",
    "empty: write a prompt there, or delete the line": "it is empty",
    "there are no statistics yet: give a prompt first": "nothing was done",
    "there is nothing to compare yet: give a prompt, or /compare TEXT": "nothing was done",
    "the prompts come from standard input, which is closed: give it lines": "no more",
    "another conversion is at work on it: wait for its end, or choose another --output": (
        "what it is comes before it, as with every OSError"
    ),
    "a prompt as text needs a tokenizer, and this decoder has none: give ids": "None was found",
    "a chat needs a decoder-only model's tokenizer, and this decoder has none: leave chat out": (
        "it is of another kind, or None"
    ),
    "the model's tokenizer has no chat template: leave chat out, or choose a model that is tuned "
    "for chats": "it is not there",
    "truncate would cut the form that chat puts prompts into: leave one of them out": (
        "both have no value"
    ),
    "it cannot be a name on the Hub: check the path": "_from_hub tells the name before it",
}

# Functions whose messages leave a part to another: what puts them into its own text, with a file's
# name before it or what to do behind it.
COMPLETED = {
    ("plain_pickle.py", "Machine.load"): ("pickles.py", "read_bin"),
    ("plain_pickle.py", "Machine._next"): ("pickles.py", "read_bin"),
    ("plain_pickle.py", "Machine._line"): ("pickles.py", "read_bin"),
    ("plain_pickle.py", "Machine._top"): ("pickles.py", "read_bin"),
    ("plain_pickle.py", "Machine._last"): ("pickles.py", "read_bin"),
    ("plain_pickle.py", "Machine._since_mark"): ("pickles.py", "read_bin"),
    ("plain_pickle.py", "Machine._recall"): ("pickles.py", "read_bin"),
    ("plain_pickle.py", "Machine._declare"): ("pickles.py", "read_bin"),
    ("plain_pickle.py", "expect"): ("pickles.py", "read_bin"),
    ("plain_pickle.py", "_find_global"): ("pickles.py", "read_bin"),
    ("plain_pickle.py", "_reduce"): ("pickles.py", "read_bin"),
    ("plain_pickle.py", "_rebuild_tensor"): ("pickles.py", "read_bin"),
    ("plain_pickle.py", "_set_items"): ("pickles.py", "read_bin"),
    ("pickles.py", "_read_member"): ("pickles.py", "read_bin"),
    ("pickles.py", "_start_of"): ("pickles.py", "read_bin"),
    ("pickles.py", "_read_archive"): ("pickles.py", "read_bin"),
    ("pickles.py", "_read_old"): ("pickles.py", "read_bin"),
    ("pickles.py", "_dtype"): ("pickles.py", "read_bin"),
    ("pickles.py", "_check_storage"): ("pickles.py", "read_bin"),
    ("pickles.py", "_describe"): ("pickles.py", "read_bin"),
    ("tensors.py", "_read_member"): ("tensors.py", "read_npz"),
    ("tokenizer.py", "_read_bpe"): ("tokenizer.py", "JSONTokenizer.__init__"),
    # Names what the system's error is about; what to do is told by the error's number.
    ("weights.py", "_replacing"): ("terminal.py", "_with_advice"),
    ("benchmark.py", "first_token_seconds"): ("bench_command.py", "_starts"),
}

# Messages that are another's, whole as that is.
PASSED_ON = {
    ("causal_checkpoint.py", "_about", "{}: {}"): "causal.py's or opt.py's, behind the folder",
    (
        "loading.py",
        "_from_hub",
        "no model here (found: {}) is named {}, and {}",
    ): "hub.py's, behind where else it was looked for",
    ("checkpoint.py", "read_config", "{}: {}"): "config.py's, behind the folder",
    ("batch.py", "_encoded", "{}"): "a Line's, which are walked where they are made",
    ("terminal.py", "run", "{}"): "a ValueError's",
    ("terminal.py", "run", "{}: {}"): "an OSError's, by _with_advice",
    ("terminal.py", "_with_advice", "{}"): "an OSError's of ours",
    ("terminal.py", "_with_advice", "{}; {}"): "what to do is one of ADVICE, which is walked too",
    ("terminal.py", "run", "failed while running: {}"): "a Failure's",
    ("terminal.py", "run", "interrupted"): "no error, but what the user has done",
}

# What to do about errors of the system.
ADVICE = (*terminal.ADVICE.values(), terminal.OTHERWISE)

# Makes parts of messages for several files.
TEXT = ast.parse((REPOSITORY / "speculative_t5" / "text.py").read_text(encoding="utf-8"))
RAISED = {"ValueError": 0, "RuntimeError": 0, "Failure": 0, "Refused": 0, "OSError": 1}
NO_MESSAGE = ("KeyboardInterrupt", "Exit")


@dataclass(frozen=True)
class Site:
    """A place in the sources that has a message."""

    file: str
    function: str
    line: int
    raised: bool  # and not given to what shows or keeps it
    texts: tuple[str, ...]  # more than one where a part of it depends on a condition

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class Walker(ast.NodeVisitor):
    """Finds the messages of one file."""

    def __init__(self, path: Path) -> None:
        self.file = path.name
        self.sites: list[Site] = []
        self.unknown: list[str] = []
        self._tree = ast.parse(path.read_text(encoding="utf-8"))
        self._names: list[str] = []
        self._scopes: list[ast.AST] = [self._tree]
        self.visit(self._tree)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._names.append(node.name)
        self.generic_visit(node)
        self._names.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._names.append(node.name)
        self._scopes.append(node)
        self.generic_visit(node)
        self._scopes.pop()
        self._names.pop()

    def visit_Raise(self, node: ast.Raise) -> None:
        if node.exc is not None:
            kind = name_of(node.exc.func if isinstance(node.exc, ast.Call) else node.exc)
            call = self._made_by(kind) or node.exc
            kind = name_of(call.func) if isinstance(call, ast.Call) else kind
            if kind in RAISED and isinstance(call, ast.Call):
                self._add(node, call.args[RAISED[kind]])
            elif kind not in NO_MESSAGE:
                self.unknown.append(f"{self.file}:{node.lineno} raises {kind}")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if name_of(node.func) == "Line" and len(node.args) > 3:
            self._add(node, node.args[3])
        if name_of(node.func) == "fail":
            self._add(node, node.args[0])
        self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        # The one function that makes a part of messages and raises none.
        if self.file == "terminal.py" and self._names[-1] == "_with_advice":
            assert node.value is not None
            self._add(node, node.value)
        self.generic_visit(node)

    def _add(self, node: ast.expr | ast.stmt, message: ast.expr) -> None:
        texts = tuple(self._texts(message, node.lineno, whole=True))
        raised = isinstance(node, ast.Raise)
        if texts:
            self.sites.append(Site(self.file, ".".join(self._names), node.lineno, raised, texts))

    def _made_by(self, function: str) -> ast.Call | None:
        """The error that a function makes, if that is all it does."""
        returned = self._returned(function)
        return returned[0] if len(returned) == 1 and isinstance(returned[0], ast.Call) else None

    def _returned(self, function: str) -> list[ast.expr]:
        for node in (*self._tree.body, *TEXT.body):
            if isinstance(node, ast.FunctionDef) and node.name == function:
                return [n.value for n in ast.walk(node) if isinstance(n, ast.Return) and n.value]
        return []

    def _texts(self, node: ast.expr, line: int, *, whole: bool = False) -> list[str]:
        """What an expression may be, HOLE standing for what is not in the sources."""
        if isinstance(node, ast.Constant):
            return [] if node.value is None else [str(node.value)]
        if isinstance(node, ast.JoinedStr):
            parts = [self._texts(part, line) for part in node.values]
            return ["".join(chosen) for chosen in itertools.product(*parts)]
        if isinstance(node, ast.FormattedValue):
            plain = node.conversion == -1 and node.format_spec is None
            return self._texts(node.value, line) if plain else [HOLE]
        if isinstance(node, ast.IfExp):
            return [*self._texts(node.body, line), *self._texts(node.orelse, line)]
        if isinstance(node, ast.Name) and (value := self._assigned(node.id, line)):
            return self._texts(value, line)
        if isinstance(node, ast.Call) and (whole or name_of(node.func) == "not_utf8"):
            made = self._returned(name_of(node.func))
            return [t for value in made for t in self._texts(value, line, whole=True)] or [HOLE]
        return [HOLE]

    def _assigned(self, name: str, line: int) -> ast.expr | None:
        """What was last assigned to a name, in the function or else in the file."""
        for scope in reversed(self._scopes):
            found = [
                node.value
                for node in ast.walk(scope)
                if isinstance(node, ast.Assign)
                and [name_of(target) for target in node.targets] == [name]
                and (scope is self._tree) == (node in self._tree.body)
                and node.lineno < line
            ]
            if found:
                return max(found, key=lambda value: value.lineno)
        return None


def name_of(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


WALKERS = [
    Walker(path)
    for path in [*sorted((REPOSITORY / "speculative_t5").glob("*.py")), REPOSITORY / "convert.py"]
]
SITES = [site for walker in WALKERS for site in walker.sites]


def test_all_are_found() -> None:
    assert [text for walker in WALKERS for text in walker.unknown] == []
    lines = [
        line
        for path in (REPOSITORY / "speculative_t5").glob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.match(r" +raise \w+\(", line)
    ]
    assert len([site for site in SITES if site.raised]) == len(lines) > 120
    shown = {(site.file, site.function) for site in SITES if not site.raised}
    assert shown >= {("prompts.py", "_read_line"), ("terminal.py", "run")}


@pytest.mark.parametrize("site", SITES, ids=str)
def test_every_message_has_the_form(site: Site) -> None:
    own = [t for t in site.texts if (site.file, site.function, t) not in PASSED_ON]
    for text in own:
        assert not text[0].isupper() or text.startswith(os.strerror(errno.ENOSPC))
        assert text == " ".join(text.split()) and not text.endswith((".", "!"))
        if (site.file, site.function) not in COMPLETED:
            assert complaint(text) is None, f"{text}: {complaint(text)}"
    if own and (site.file, site.function) not in COMPLETED and not {*own} <= NOTHING_FOUND.keys():
        assert any(HOLE in what_is_wrong(text) for text in own), f"{own}: what was found?"


def test_what_completes_others_is_whole() -> None:
    """It shows a file or a command, and the other message, before it says what to do."""
    for file, function in COMPLETED.values():
        texts = {t for s in SITES if (s.file, s.function) == (file, function) for t in s.texts}
        if function == "_with_advice":  # behind the file's name, which run puts there
            texts = {text.replace("; {}", f"; {advice}") for text in texts for advice in ADVICE}
            texts -= {HOLE}
        assert texts
        for text in texts:
            assert complaint(text) is None and HOLE in what_is_wrong(text)


def test_the_tables_hold_nothing_more() -> None:
    texts = {(site.file, site.function, text) for site in SITES for text in site.texts}
    assert texts >= PASSED_ON.keys()
    assert {text for *_, text in texts} >= NOTHING_FOUND.keys()
    functions = {(site.file, site.function) for site in SITES}
    assert functions >= COMPLETED.keys() and functions >= {*COMPLETED.values()}
    verbs = {m[1] for *_, text in texts if (m := re.search(r"[:;] (\w+) [^:;]+$", text))}
    verbs |= {advice.split()[0] for advice in ADVICE}
    assert verbs >= IMPERATIVES


@pytest.mark.parametrize(
    "text",
    [
        "",
        "the prompt is empty",
        "the prompt is empty: expected source ids, EOS included",
        "{} is truncated or damaged: {}",
        "{} on the Hub has no config.json: it is no model",
        "another process is writing to {}",
        "--field is for --format jsonl; lines of text have no fields",
        "--field is for --format jsonl; use",
        "{} exists: --force replaces it",
        "num_draft must be at least 1",
        "num_draft is {}",
        "num_draft is {}, expected at least 1: or what",
        "{} must be at least 1, got {}; or else",
        "{} cannot be read: use another.",
        "{} cannot be read: use another!",
        "{} cannot be read:\nuse another",
        "{} cannot be read:  use another",
        "{} cannot be read: Use another",
        "{} cannot be read: use another; as this one is damaged",
        "use another",
    ],
)
def test_other_messages_are_rejected(text: str) -> None:
    assert complaint(text) is not None


def test_what_was_found_is_looked_for_before_what_to_do() -> None:
    assert what_is_wrong("a file is damaged: copy {} again") == "a file is damaged"
    assert what_is_wrong("{} is damaged: {}; copy it again") == "{} is damaged: {}"
    assert what_is_wrong("k must be above {}, got {}") == "k must be above {}, got {}"


def test_sources_are_walked_as_they_are_written(tmp_path: Path) -> None:
    (tmp_path / "some.py").write_text(
        "AGAIN = 'copy it again'\n"
        "def outer(path, error, folder):\n"
        "    kind = ', a folder' if folder else ''\n"
        "    raise ValueError(f'{path} is damaged{kind}: {AGAIN}') from error\n"
        "def other(path):\n"
        "    raise made(path)\n"
        "def made(path):\n"
        "    return ValueError('bad ' f'{path!r}')\n"
        "def odd():\n"
        "    raise LookupError('nothing')\n"
    )
    walker = Walker(tmp_path / "some.py")
    assert [site.texts for site in walker.sites] == [
        ("{} is damaged, a folder: copy it again", "{} is damaged: copy it again"),
        ("bad {}",),
    ]
    assert walker.unknown == ["some.py:10 raises LookupError"]


class Persistent(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return ("module", "FloatStorage", "0", "cpu", 1) if obj == "here" else None


def persistent() -> bytes:
    file = io.BytesIO()
    Persistent(file, 2).dump("here")
    return file.getvalue()


def archive(held: Any, *, change: Callable[[str, bytes], bytes] = lambda _, old: old) -> bytes:
    """What torch saves, each member changed."""
    import torch

    file, changed = io.BytesIO(), io.BytesIO()
    torch.save(held, file)
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(changed, "w") as new:
        for name in old.namelist():
            new.writestr(name, change(name, old.read(name)))
    return changed.getvalue()


def numbers(dtype: str) -> dict[str, Any]:
    import torch

    return {"a": torch.ones(4, dtype=getattr(torch, dtype))}


@pytest.mark.parametrize(
    ("function", "content", "found"),
    [
        ("_find_global", lambda: pickle.dumps(os.getcwd), "posix.getcwd"),
        ("Machine._declare", persistent, "describes a storage by str, str, str, str, int"),
        ("_read_old", lambda: pickle.dumps((3,), 2) * 3, "it is not a checkpoint of PyTorch"),
        (
            "_read_archive",
            lambda: archive({}, change=lambda n, old: b"big" if "byteorder" in n else old),
            "big-endian",
        ),
        ("_dtype", lambda: archive(numbers("int64")), "'LongStorage'"),
        (
            "_check_storage",
            lambda: archive(
                numbers("float32"), change=lambda n, old: old[:8] if n.endswith("/0") else old
            ),
            "storage 0 declares 4 numbers, its place in the file holds 2",
        ),
        ("_describe", lambda: archive([1]), "it holds a list"),
    ],
)
def test_what_is_wrong_with_pickles_is_completed(
    tmp_path: Path, function: str, content: Callable[[], bytes], found: str
) -> None:
    (tmp_path / "a.bin").write_bytes(content())
    with pytest.raises(ValueError, match=re.escape(found)) as caught:
        read_bin(tmp_path / "a.bin")
    assert raised_in(caught.value.__cause__)[1] == function
    check_message(str(caught.value), f"{tmp_path}/a.bin")


def raised_in(error: BaseException | None) -> tuple[str, str]:
    """The entry of COMPLETED for the function that an error comes from."""
    assert error is not None and (trace := error.__traceback__) is not None
    while trace.tb_next:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    file = Path(code.co_filename).name
    (key,) = {k for k in COMPLETED if k[0] == file and k[1].split(".")[-1] == code.co_name}
    return key


def test_other_messages_are_completed(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", a=np.ones(3, int))
    with pytest.raises(ValueError, match="found int64") as caught:
        read_npz(tmp_path / "a.npz")
    assert raised_in(caught.value.__cause__) == ("tensors.py", "_read_member")
    check_message(str(caught.value), "a.npz")
    (tmp_path / "vocab.json").write_text('{"a": 0}')
    (tmp_path / "merges.txt").write_text("")
    with pytest.raises(ValueError, match="it has no <s> and </s>") as caught:
        JSONTokenizer(tmp_path)
    assert raised_in(caught.value.__cause__) == ("tokenizer.py", "_read_bpe")
    check_message(str(caught.value), "vocab.json")
    with pytest.raises(terminal.Failure, match=r"gave no text \(exit code 2\)") as failed:
        _starts("absent", {"--draft-model": None, "--dtype": "float32"})
    assert raised_in(failed.value.__cause__) == ("benchmark.py", "first_token_seconds")
    check_message(str(failed.value), "--model absent")
    assert "--dtype float32" in str(failed.value) and "--draft-model" not in str(failed.value)


def encoder(max_source_length: int) -> PromptEncoder:
    return PromptEncoder(
        tiny_model(vocab_size=384), ByteTokenizer(REPOSITORY), max_source_length=max_source_length
    )


def test_configs_and_lines_are_passed_on(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "t5", "d_model": -1}')
    with pytest.raises(ValueError, match="d_model in config.json is -1") as caught:
        open_checkpoint(tmp_path)
    check_message(str(caught.value), str(tmp_path))
    content = (
        b'\n\xff\n[\n[1]\n{"a": 1}\n{"text": 1}\n{"text": " "}\n{"text": "\\ud800"}\n'
        b'{"id": [], "text": "a"}\n{"text": "' + b"a" * 99 + b'"}\n'
    )
    records: list[Record] = []
    process(
        read_lines(io.BytesIO(content), "jsonl", "text", Shard()), lambda r: iter([*r][:0]),
        partial(encoder(9).fit, max_tokens=9), records.append,
    )  # fmt: skip
    assert len(records) == content.count(b"\n")
    for number, record in enumerate(records, 1):
        check_message(json.loads(record.to_json())["error"], f"line {number}")


@pytest.fixture
def here(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder: with models, and files that are none."""
    for name in ("weights", "checkpoint", "bert"):
        (tmp_path / name).symlink_to(place / name)
    (tmp_path / "in.txt").write_text("The old man.\n")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9\n")
    (tmp_path / "empty.txt").write_bytes(b"\n\n")
    configs = {
        "broken": b"{", "latin": b'{"a": "\xe9"}', "list": b"[]", "number": b'{"prefix": 3}',
    }  # fmt: skip
    for name, content in configs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_bytes(content)
    monkeypatch.chdir(tmp_path)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield tmp_path
    for number, handler in before.items():
        signal.signal(number, handler)


def told(capsys: pytest.CaptureFixture[str], main: Callable[[], Any]) -> tuple[str, int]:
    """The one line that a command ends with, and its exit code."""
    with pytest.raises(SystemExit) as ended:
        main()
    out, errors = capsys.readouterr()
    (line,) = errors.splitlines()
    assert out == "" and line.startswith("error: ")
    return line.removeprefix("error: "), int(str(ended.value.code))


MODELS = ("--model", "target", "--draft-model", "draft")


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (("--nonsense",), "--nonsense"),
        (("--promt", "Hello."), "--promt"),
        (("--prompt",), "--prompt"),
        (("--max-tokens", "many"), "'many'"),
        (("--delta", "half"), "'half'"),
        (("nonsense",), "'nonsense'"),
        (("--json=1",), "--json"),
        (("batch",), "INPUT"),
        (("batch", "in.txt", "in.txt"), "in.txt"),
        (("batch", "in.txt", "--batch-size", "1.5"), "'1.5'"),
        (("bench", "--turns", "some"), "'some'"),
        (("--model", "absent", "--prompt", "Hello."), "'absent'"),
        (("--model", "in.txt", "--prompt", "Hello."), "'in.txt'"),
        (("--model", "broken", "--prompt", "Hello."), "broken/config.json"),
        (("--model", "latin", "--prompt", "Hello."), "latin/config.json"),
        (("--model", "list", "--prompt", "Hello."), "list/config.json holds a list"),
        (("--model", "bert", "--prompt", "Hello."), "bert: this is a bert"),
        ((*MODELS, "--draft-model", "other", "--prompt", "Hello."), "123 pieces"),
        ((*MODELS, "--num-draft", "some", "--prompt", "Hello."), "'some'"),
        ((*MODELS, "--max-tokens", "0", "--prompt", "Hello."), "got 0"),
        (("--prompt", " "), "the prompt is empty"),
        (("--prompt", "-"), "standard input, which is closed"),
        (("--prompt", "caf\udce9"), "byte 0xe9"),
        (("--model", "number", "--prompt", "Hello."), "number/config.json is 3"),
        (("--prefix", "caf\udce9", "--prompt", "Hello."), "--prefix is not UTF-8: byte 0xe9"),
        (("--seed", "3", "batch", "in.txt"), "--seed stands before the word batch"),
        (("batch", "absent.txt"), "absent.txt: No such file or directory"),
        (("batch", "weights"), "weights is a folder"),
        (("batch", "in.txt", *MODELS, "--output", "absent/out"), "absent/out: No such file"),
        (("batch", "in.txt", *MODELS, "--output", "weights"), "weights: Is a directory"),
        (("batch", "in.txt", *MODELS, "--output", "in.txt/out"), "in.txt/out: Not a directory"),
        (("batch", "in.txt", "--output", "latin.txt"), "latin.txt has something in it"),
        (("batch", "in.txt", "--output", "in.txt"), "the output in.txt is the input"),
        (("batch", "in.txt", "--output", ""), "''"),
        (("batch", "in.txt", "--resume", "--output", "/dev/null"), "/dev/null"),
        (("batch", "in.txt", "--output", "x", "--resume", "--force"), "--resume keeps OUTPUT"),
        (("batch", "in.txt", "--output", "x", "--shard", "3/2"), "'3/2'"),
        (("batch", "in.txt", "--output", "x", "--format", "csv"), "'csv'"),
        (
            ("batch", "in.txt", "--output", "x", "--format", "text", "--field", "a"),
            "--field 'a' is for --format jsonl",
        ),
        (
            ("batch", "in.txt", "--output", "latin.txt", *MODELS, "--resume"),
            "latin.txt, line 1, is no record",
        ),
        (("bench", *MODELS, "--prompts", "absent.txt"), "absent.txt: No such file or directory"),
        (("bench", *MODELS, "--prompts", "weights"), "weights: Is a directory"),
        (("bench", *MODELS, "--prompts", "latin.txt"), "byte 0xe9"),
        (("bench", *MODELS, "--prompts", "empty.txt"), "empty.txt has no prompts"),
        (("bench", "--num-draft", "4-2"), "'4-2'"),
        (("bench", "--num-draft", "a"), "'a'"),
        (("bench", "--turns", "0"), "got 0"),
        (("bench", "--acceptance", "2"), "got 2.0"),
        (("bench", "--dtype", "int3"), "'int3'"),
        (("--dtype", "int3", "--prompt", "Hello."), "'int3'"),
        (("bench", "--random", "t5-base"), "'t5-base'"),
        (("bench", "--random", "t5-tiny:t5-tiny"), "'t5-tiny'"),
        (
            ("bench", "--random", "t5-base:gpt2"),
            "t5-base has the vocabulary of t5, gpt2 that of gpt2",
        ),
        (("bench", "--random", "qwen3-4b:gpt2"), "of qwen3, gpt2 that of gpt2"),
        (("bench", "--random", "gpt2-xl:gpt2", "--source", "1000"), "got 1000 and 128"),
        (("bench", "--plot", "absent/plot.png"), "--plot"),
    ],
)
def test_errors_of_the_command_line(
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    found: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["speculative_t5", *arguments])
    line, code = told(capsys, cli.main)
    check_message(line, found)
    assert code == terminal.BAD_INPUT and not (here / "x").exists()


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ((), "--model"),
        (("--nonsense",), "--nonsense"),
        (("--model", "checkpoint", "--quantize", "half"), "'half'"),
        (("--model", "checkpoint", "--quantize", "3"), "got 3"),
        (("--model", "checkpoint", "--quantize", "8", "--output", "x"), "d_model is 24"),
        (("--model", "checkpoint", "--dtype", "int3"), "'int3'"),
        (("--model", "checkpoint", "--revision", "v2"), "checkpoint is a folder"),
        (("--model", "a/b/c"), "'a/b/c'"),
        (("--model", "some--where"), "'some--where'"),
        (("--model", "broken"), "broken/config.json"),
        (("--model", "bert", "--inspect"), "this is a bert"),
        (("--model", "weights"), "weights is not a model folder"),
        (("--model", "checkpoint", "--output", "in.txt"), "in.txt exists"),
        (
            ("--model", "checkpoint", "--output", "in.txt/out"),
            "in.txt/out: cannot be written: Not a directory",
        ),
        (("--model", "checkpoint", "--output", "checkpoint"), "is or holds the checkpoint"),
        (("--model", "checkpoint", "--output", "weights/target"), "weights/target exists"),
    ],
)
def test_errors_of_convert(
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    found: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["convert.py", *arguments])
    line, code = told(capsys, cli.convert_main)
    check_message(line, found)
    assert code == terminal.BAD_INPUT


@pytest.mark.parametrize(
    ("error", "found", "code"),
    [
        *(
            (OSError(number, os.strerror(number), "some/file"), "some/file: ", None)
            for number in terminal.ADVICE
        ),
        (OSError(errno.ELOOP, os.strerror(errno.ELOOP), "some/file"), "some/file: ", 2),
        (OSError("some text"), "some text", 2),
        (OSError(errno.EAGAIN, "a text: wait for its end"), "a text", 2),
        (RuntimeError("[malloc] Unable to allocate 9 bytes."), "Unable to allocate", 1),
        (RuntimeError("two\nlines"), "two lines", 1),
        (MemoryError(), "failed while running: MemoryError", 1),
        (terminal.Failure("a file has 3 lines: run it again"), "failed while running: a file", 1),
        (ValueError("a file is damaged: copy it again"), "a file is damaged", 2),
    ],
)
def test_errors_that_come_from_anywhere(
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    found: str,
    code: int | None,
) -> None:
    app = terminal.new_app()

    @app.command()
    def fail() -> None:
        raise error

    monkeypatch.setattr(sys, "argv", ["some"])
    line, ended = told(capsys, lambda: terminal.run(app, "python -m some"))
    check_message(line, found)
    assert ended == (code or ended)


def test_help_is_that_of_the_command(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, command in ((("--no",), ""), (("batch", "--no"), " batch"), (("no",), "")):
        monkeypatch.setattr(sys, "argv", ["speculative_t5/__main__.py", *arguments])
        line, _ = told(capsys, cli.main)
        assert line.endswith(f"; see python -m speculative_t5{command} --help")


def test_errors_of_whole_processes(here: Path, place: Path) -> None:
    for arguments, script, found in (
        (("--model", "someone/some-t5"), True, "there is no folder 'someone/some-t5'"),
        (("--no",), True, "No such option: --no"),
        (("batch", "in.txt", "--output", "out", "--top-p", "2", *MODELS), False, "got 2.0"),
    ):
        done = run(here, *arguments, script=script)
        (line,) = done.stderr.decode().splitlines()
        assert done.returncode == 2 and line.startswith("error: ")
        check_message(line.removeprefix("error: "), found)
