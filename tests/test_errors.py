"""Every error and note in the sources has the form of `messages`: one line that says what to do.

Only the form is checked, and only as far as a source has the text; what a message says at run time
is checked where it is raised.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from conftest import REPOSITORY
from messages import complaint

HOLE = "{}"  # stands for what is only known at run time
ERRORS = {"ValueError", "OSError", "RuntimeError", "Failure", "Refused", "StartError"}
WITHOUT_A_MESSAGE = {  # of their own
    "AttributeError", "TypeError", "KeyboardInterrupt", "Exit", "Busy", "WrongPrompt",
    "PromptTooLong", "ClientDisconnect",
}  # fmt: skip
NOTES = {"note", "fail"}  # show a line
MOST = 300  # characters of a message's own

# What need not say what to do: by a part of its file's path, or by its text.
COMPLETED_IN = {
    "torch_bin": "read_bin adds the file before it and what to do after it",
}
COMPLETED = {
    "it has no <s> and </s>": "_read_bpe adds the file and what to do",
    "{} is to be {}, which is not the next free id": "_read_bpe adds the file and what to do",
    "{}: expected tensors of floats, found {}": "read_npz adds the file and what to do",
    "{} declares {} bytes of numbers, its place in the file has {}": "read_npz does",
    "{} is in version {} of the npy format": "read_npz does",
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
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            kind = name_of(node.func)
            if kind in ERRORS | NOTES:
                yield node.lineno, kind, text_of(node.args[0 if kind == "fail" else -1], known)
        elif isinstance(node, ast.Raise) and node.exc is not None:
            raised = name_of(node.exc.func if isinstance(node.exc, ast.Call) else node.exc)
            if raised not in ERRORS | WITHOUT_A_MESSAGE and not raised.lstrip("_").islower():
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
