"""The form that errors have: what was wrong, what was found, what to do, in one line."""

import re

# What to do begins with one of these.
IMPERATIVES = frozenset(
    "accept check choose convert copy create delete distill download free give install leave load "
    "merge name put raise run save see send split train use wait write".split()
)


def complaint(text: str) -> str | None:
    """What the form of a message lacks; None if it is one of the two that errors have here.

    "NAME must be WHAT IS EXPECTED, got FOUND" and "NAME is FOUND, expected WHAT IS EXPECTED", of
    arguments and entries of files; or "WHAT IS WRONG: WHAT TO DO", or with a semicolon.
    """
    if not text or text != " ".join(text.split()) or not text.isprintable():
        return "it is not one plain line"
    if text.endswith((".", "!", "?", ":", ";", ",")):
        return "it ends in a punctuation mark"
    expected = r".+ (must be .+, got|(is|has|holds) .+, expected) (?P<rest>.+)"
    if (found := re.fullmatch(expected, text)) and not re.search("[:;] ", found["rest"]):
        return None
    parts = re.fullmatch(r"(?P<wrong>.+)[:;] (?P<verb>[a-z]+) (?P<rest>.+)", text)
    if parts is None:
        return "it does not say what to do"
    if parts["verb"] not in IMPERATIVES:
        return f"what to do begins with {parts['verb']!r}"
    return None


def what_is_wrong(text: str) -> str:
    """A message without what to do, where that is a part of its own."""
    return (
        text
        if re.search(", (got|expected) [^:;]+$", text)
        else re.split("[:;] (?!.*[:;] )", text)[0]
    )


def check_message(text: str, found: str = "") -> None:
    """Check a message as a user gets it, and that it shows what was found."""
    assert complaint(text) is None, f"{text}: {complaint(text)}"
    assert found in what_is_wrong(text), text
