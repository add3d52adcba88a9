"""Bad input of any command is one line that says what to do, and so is every error in the sources.

Of the sources only the form is checked, and only as far as they have the text; what a message says
at run time is checked where it is raised.
"""

import ast
import pickle
import re
import shlex
from collections.abc import Iterator
from dataclasses import fields
from itertools import chain
from pathlib import Path

from speculative_t5.cli.options import flag
from speculative_t5.generation import DecodingOptions, GenerationOptions
from speculative_t5.options import OptionError, option_error
from speculative_t5.serve.requests import as_json

import pytest
from commands import Call
from conftest import REPOSITORY
from messages import complaint

HOLE = "{}"  # stands for what is only known at run time
ERRORS = {
    "RowError",
    "ValueError",
    "OptionError",
    "OSError",
    "RuntimeError",
    "Failure",
    "Refused",
    "StartError",
    "Unsupported",
}
WITHOUT_A_MESSAGE = {  # of their own
    "AttributeError", "TypeError", "KeyboardInterrupt", "Exit", "PromptTooLong",
    "ClientDisconnect", "ImportError", "EOFError", "Unfinished",
}  # fmt: skip
FIRST = {"fail", "OptionError"}  # have the text before other arguments
NOTES = {"note", "fail"}  # show a line
MOST = 300  # characters of a message's own

# What need not say what to do: by a part of its file's path, or by its text.
COMPLETED_IN = {
    "torch_bin": "read_bin adds the file before it and what to do after it",
}
COMPLETED = {
    "it has {} characters": "_code says what names a language",
    "{}: expected tensors of floats, found {}": "read_npz adds the file and what to do",
    "{} declares {} bytes of numbers, its place in the file has {}": "read_npz does",
    "{} is in version {} of the npy format": "read_npz does",
    "the checksum of {} is wrong": "_damage_named does",
}
# A text from elsewhere ends these.
PASSES_ON = re.compile(r".*(([:;]| is| and) \{\}|[:;] \{\}, [^{}]*)")


def name_of(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def text_of(node: ast.expr, known: dict[str, str]) -> str:
    """Render a message as far as the source has it, with `HOLE` for the rest."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part, known) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return text_of(node.value, known)
    return known.get(name_of(node), HOLE)


def messages(source: str) -> Iterator[tuple[int, str, str]]:
    """Yield the line, the kind and the text of each message; of other errors, their name."""
    tree = ast.parse(source)
    known = {
        name_of(node.targets[0]): text_of(node.value, {})
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and name_of(node.targets[0])
        and text_of(node.value, {}) not in (HOLE, "")
    }
    handlers = [node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler)]
    names = {name_of(each.type) for each in handlers if each.type}
    caught = {name for name in names if name.startswith("_")}  # a module's own, which it catches
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            kind = name_of(node.func)
            if kind in ERRORS | NOTES:
                yield node.lineno, kind, text_of(node.args[0 if kind in FIRST else -1], known)
        elif isinstance(node, ast.Raise) and node.exc is not None:
            raised = name_of(node.exc.func if isinstance(node.exc, ast.Call) else node.exc)
            known_ones = ERRORS | WITHOUT_A_MESSAGE | caught
            if raised not in known_ones and not raised.lstrip("_").islower():
                yield node.lineno, "other", raised


def fault(kind: str, text: str, place: str = "") -> str | None:
    """Say what is wrong with a message, or return None."""
    if kind == "other":
        return "no command turns it into one line"
    if text == HOLE or (kind == "note" and not text):  # an empty line
        return None
    if len(text.replace(HOLE, "")) > MOST:
        return f"it has more than {MOST} characters"
    if not text or text != " ".join(text.split()) or text.endswith((".", "!")):
        return "it is not one line without a full stop"
    if text[0].isupper() and not text.startswith("No space left on device"):  # as the system says
        return "it starts with a capital"
    completed = text in COMPLETED or PASSES_ON.fullmatch(text)
    completed = completed or any(part in place for part in COMPLETED_IN)
    return None if completed or kind in NOTES else complaint(text)


SITES = [
    (str(path.relative_to(REPOSITORY)), *site)
    for path in [*(REPOSITORY / "speculative_t5").rglob("*.py"), REPOSITORY / "convert.py"]
    for site in messages(path.read_text(encoding="utf-8"))
]


def test_every_message_has_the_form() -> None:
    faults = [
        f"{place}:{line}: {text!r}: {wrong}"
        for place, line, kind, text in SITES
        if (wrong := fault(kind, text, place))
    ]
    assert not faults, "\n".join(faults)


def test_most_messages_are_found_and_no_exception_is_left_over() -> None:
    texts = {text for *_, text in SITES}
    assert len(texts) > 200 and texts >= COMPLETED.keys()
    for part in COMPLETED_IN:
        assert any(part in place for place, *_ in SITES)


BAD = {
    "raise ValueError('the prompt is empty')": "does not say what to do",
    "raise ValueError('num_draft must be at least 1')": "does not say what to do",
    "raise ValueError(f'k must be at least 1, got {k}; or else')": "what to do begins with",
    "raise ValueError(f'n is {n}, expected at least 1: or what')": "what to do begins with",
    "text = f'{path} is bad: expected more'\nraise ValueError(text)": "what to do begins",
    "raise OSError(28, 'The disk is full: free some')": "starts with a capital",
    "raise Failure(f'{path} cannot be read: use another.')": "without a full stop",
    "raise Refused('it is\\ndamaged: use another')": "not one line",
    "def made():\n    return ValueError('no')": "does not say what to do",
    f"note('{'x' * 301}')": "more than 300 characters",
    "fail('interrupted.', 130)": "without a full stop",
    "raise LookupError('nothing')": "no command turns it into one line",
}
GOOD = (
    "raise ValueError(f'k must be at least 1, got {k}')\n"
    "raise ValueError(f'{path} is damaged: copy it again') from error\n"
    "raise ValueError(f'{path}: {error}')\nnote(f'[{parts}]')\nnote(line)\nraise typer.Exit(3)"
)


def test_bad_messages_are_found() -> None:
    for source, wrong in BAD.items():
        *_, (_, kind, text) = messages(source)
        assert wrong in str(fault(kind, text))
    assert [fault(kind, text) for _, kind, text in messages(GOOD)] == [None] * 5


WORDS = {
    "PAIR": ["--model", "target", "--draft-model", "draft"],
    "HELLO": ["--prompt", "Hello."],
    "BATCH": ["batch", "in.txt", "--output", "x"],
    "CONVERT": ["convert", "--model", "checkpoint"],
}
# Each value that an option refuses is tried with its option in Python; here, each kind of refusal.
BAD_INPUT = {
    "--nonsense": "No such option: --nonsense",
    "--prompt": "--prompt",
    "--max-tokens many": "--max-tokens must be an integer, got 'many'",
    "--temperature warm": "--temperature must be a number, got 'warm'",
    "-n two": "--num-return-sequences must be an integer, got 'two'",
    "--verify all": "--verify must be 'auto', 'coupled', 'token' or 'block', got 'all'",
    "document in.txt --by word": "--by must be one of 'sentence', 'paragraph', 'tokens', got",
    "in.txt": "No such command 'in.txt' (to give a prompt, use --prompt)",
    "--seed 1 batch x": "--seed comes before 'batch'",
    "PAIR --temperature -1 HELLO": "--temperature must be 0 or at least",
    "PAIR --prompt -": "the prompt is empty",
    "batch in.txt PAIR --output weights": "weights: Is a directory",
    "--model absent HELLO": "the Hub cannot be reached",
    "--model broken HELLO": "broken/config.json",
    "--model ./in.txt HELLO": "./in.txt is a file, expected a folder or a name",
    "--model number HELLO": "number/config.json is 3",
    "--model correct-small": "there is no prompt for correct-small",
    "PAIR --draft-model other HELLO": "123 pieces",
    "PAIR --num-draft some HELLO": "--num-draft must be an integer of at least 1 or",
    "PAIR --verify block --delta 0.1 HELLO": "--verify 'block' is exact and",
    "--model target --show-drafts --num-beams 2 HELLO": "a beam search has no drafts",
    "PAIR --logit-bias 9999=1 HELLO": "--logit-bias has the id 9999",
    "PAIR --logit-bias 5 HELLO": "--logit-bias must be ID=BIAS, such as 17=-2.5",
    "PAIR --suppress-tokens 3,x HELLO": "'3,x'",
    "PAIR --stop '' HELLO": "a stop string must be text that is not empty, got ''",
    "BATCH PAIR -n 2": "greedy decoding has only one output",
    "repl PAIR -n 2 --temperature 1": "--num-return-sequences is 2",
    "PAIR --dtype int3 HELLO": "'int3'",
    "--prompt caf\udce9": "--prompt is not UTF-8: byte 0xe9",
    "batch": "INPUT",
    "batch ''": "the input must be the name of a file, or -, got ''",
    "batch in.txt in.txt": "in.txt",
    "batch absent.txt": "absent.txt: No such file or directory",
    "batch weights": "weights is a folder, expected a file",
    "batch in.txt PAIR --output absent/out": "absent/out: No such file",
    "batch in.txt --output old": "old is not empty",
    "batch in.txt --output ''": "the output must be the name of a file, or -",
    "batch in.txt --resume": "a file, which standard output is not",
    "batch in.txt PAIR --resume --output old": "old, line 1, is not a record",
    "BATCH --resume --force": "--resume keeps OUTPUT",
    "BATCH --format text --field a": "the field 'a' is given, and lines of text have none",
    "bench PAIR --prompts empty.txt": "empty.txt has no prompts",
    "bench --num-draft 4-2": "'4-2'",
    "bench --random t5-base": "'t5-base'",
    "bench --random gpt2:t5-base": "there is no shape 'gpt2'",
    "doctor --only row": "'row'",
    "doctor --draft-model no-such-model": "'no-such-model'",
    "convert": "convert takes one checkpoint, got 0",
    "CONVERT --quantize half": "'half'",
    "CONVERT --quantize 8 --output x": "d_model is 24",
    "CONVERT --revision v2": "checkpoint is a folder",
    "convert --model absent": "no folder 'absent', it is not in the Hub's cache",
    "convert --model weights": "weights is not a model folder",
    "CONVERT --output in.txt": "in.txt exists",
    "CONVERT --output in.txt/out": "cannot be written: Not",
}


@pytest.fixture
def here(place: Path, tmp_path: Path) -> Path:
    """A folder with models, and with files that are none."""
    for name in ("weights", "checkpoint"):
        (tmp_path / name).symlink_to(place / name)
    files = {
        "in.txt": b"The old man.\n", "old": b"precious\nthings\n", "empty.txt": b"\n\n",
        "broken/config.json": b"{", "number/config.json": b'{"prefix": 3}',
    }  # fmt: skip
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    return tmp_path


@pytest.mark.usefixtures("loaded_once")
@pytest.mark.parametrize("line", BAD_INPUT)
def test_bad_input_is_one_line(call: Call, here: Path, line: str) -> None:
    before = {path: path.read_bytes() for path in here.glob("*.*") if path.is_file()}
    done = call(*(part for word in shlex.split(line) for part in WORDS.get(word, [word])))
    done.check_error(BAD_INPUT[line])
    assert not (here / "x").exists() and (here / "old").read_bytes() == b"precious\nthings\n"
    assert all(path.read_bytes() == content for path, content in before.items())


def is_out_of_range() -> Iterator[tuple[str, str]]:
    """Yield each option of numbers with a range, and a value that is out of it."""
    for each in chain(fields(GenerationOptions), fields(DecodingOptions)):
        if each.metadata and each.metadata["help"] and each.metadata["least"] is not None:
            yield each.name, str(each.metadata["least"] - 1)


OUT_OF_RANGE = dict(is_out_of_range()) | {"num_draft": "0", "top_p": "0", "temperature": "inf"}


@pytest.mark.usefixtures("here")
def test_the_command_line_names_options_as_one_types_them(call: Call) -> None:
    assert len(OUT_OF_RANGE) > 12
    for name, value in OUT_OF_RANGE.items():
        (line,) = call("--prompt", "a", f"{flag(name)}={value}").err
        assert line.startswith(f"error: {flag(name)} must be ") and "_" not in line, line


def test_an_option_is_spelled_as_its_user_does() -> None:
    error = OptionError("{top_k} is {!r}, and {top_p} is {}: leave out one", "{top_p}", 0.5)
    assert str(error) == "top_k is '{top_p}', and top_p is 0.5: leave out one"
    assert error.names == ["top_k", "top_p"]
    assert error.spelled(flag, as_json) == (
        "--top-k is '{top_p}', and --top-p is 0.5: leave out one"
    )
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    for spoiled, text in (
        (OptionError("{n} must be {}, got {!r}", "true", None), "--n must be true, got null"),
        (option_error("an id of {stop}", "0", True), "an id of --stop must be 0, got true"),
        (option_error("a prompt's index", "0", 1), "a prompt's index must be 0, got 1"),
    ):
        assert spoiled.spelled(flag, as_json) == text


def test_the_message_names_the_help_of_its_command(call: Call) -> None:
    for arguments, command in ((("--no",), ""), (("batch", "--no"), " batch"), (("no",), "")):
        (line,) = call(*arguments).err
        assert line.endswith(f"; see python -m speculative_t5{command} --help")


def test_a_bad_pipe(call: Call) -> None:
    for stdin, found in ((b"", "the prompt is empty"), (b"caf\xe9", "byte 0xe9 at offset 3")):
        call(*WORDS["PAIR"], stdin=stdin).check_error(found)
