"""`correct` and `translate` as a user types them: texts, files, streams."""

from pathlib import Path

from speculative_t5.cli import terminal, translate
from speculative_t5.cli.options import flag
from speculative_t5.cli.targets import text_of
from speculative_t5.documents import Document, RewriteOptions
from speculative_t5.options import OptionError

import pytest
from commands import Call
from conftest import REPOSITORY
from messages import check_message
from pieces import Scripted
from test_languages import make_translator

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("loaded_once")]


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "weights").symlink_to(REPOSITORY / "weights")
    (tmp_path / "in.md").write_text("# Top\n\nShe have a apple.\n")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["He go home"], "He goes home.\n"),  # which is no sentence in a file
        (["She", "have", "a", "apple."], "She has an apple.\n"),
        (["She have a apple.\nHe go home."], "She has an apple.\nHe goes home.\n"),
        (["in.md"], "# Top\n\nShe has an apple.\n"),
    ],
)
def test_a_text_or_files_are_corrected(
    call: Call, here: Path, words: list[str], wanted: str
) -> None:
    done = call("correct", *words)
    assert (done.code, done.out) == (0, wanted)
    assert done.err[-1].startswith(("1 of 1", "2 of 2"))


def test_standard_input_is_read_where_nothing_is_given(
    call: Call, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert call("correct", stdin="She have a apple.\n").out == "She has an apple.\n"
    monkeypatch.setattr(terminal, "is_terminal", lambda stream: True)
    call("correct").check_error("correct was given nothing")
    call("translate", "--to", "de").check_error("translate was given nothing")


def test_a_text_is_written_compared_and_checked(call: Call, here: Path) -> None:
    done = call("correct", "She have a apple.", "-o", "out.txt", "--diff", "html")
    assert done.code == 0 and (here / "out.txt").read_text() == "She has an apple.\n"
    assert "Changes in the text" in (here / "out.txt.diff.html").read_text()
    assert call("correct", "She have a apple.", "--check").code == 1
    assert call("correct", "She has an apple.", "--check").code == 0
    (record,) = call("correct", "She have a apple.", "--json").records
    assert (record["file"], record["text"]) == (None, "She has an apple.")


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("in.md", "apple"), "in.md is a file or folder here, and apple is none"),
        (("reprot.md",), "reprot.md is no file or folder"),
        (("notes.log",), "notes.log is no file or folder"),
        (("x/y",), "x/y is no file or folder"),
        (("He go.", "--in-place"), "--in-place is for files, and a text was given"),
        (("He go.", "--format", "md"), "--format is for files"),
        (("He go.", "-o", "weights"), "weights is a folder"),
        (("He go.", "-o", "in.md"), "in.md exists"),
        (("He go.", "--no-guard", "--min-similarity", "0.5"), "--min-similarity belongs to the"),
        (("He go.", "--no-guard", "--min-probability", "1"), "--min-probability belongs to the"),
    ],
)
def test_what_is_neither_a_text_nor_files_is_refused(
    call: Call, here: Path, words: tuple[str, ...], found: str
) -> None:
    call("correct", *words).check_error(found)


@pytest.mark.parametrize(
    "text", ["He go (see a.md)!", "He go to U.S. and/or home", "Go. Home", "a"]
)
def test_a_text_may_name_files(text: str) -> None:
    assert text_of([text]) == text
    assert text_of(text.split()) == text


def test_the_guard_can_be_switched_off() -> None:
    answers = {"He has 3 apples.": "He has 4 apples.", "She is here.": "", "It is so.": "Zebra!"}
    text = " ".join(answers)
    kept = Document(Scripted(answers.__getitem__), text, RewriteOptions())
    assert kept.result(kept.rewrite()).text == text
    free = Document(Scripted(answers.__getitem__), text, RewriteOptions(guard=False))
    done = free.result(free.rewrite())
    assert done.text == "He has 4 apples. She is here. Zebra!"
    assert [piece.reason for piece in done.kept] == ["its output is empty"]


def test_translate_takes_the_first_model_here_that_can(call: Call, here: Path) -> None:
    call("translate", "Hello.").check_error("translate needs a language")
    call("translate", "--to", "German", "Hello.").check_error("no model on this machine")
    (here / "weights").unlink()
    make_translator(here)
    done = call("translate", "--to", "German", "Hello there.", "--no-guard", "--max-tokens", "9")
    assert done.code == 0 and "with model" in done.err
    with pytest.raises(OptionError) as refused:
        translate.translator("Japanese", None)
    check_message(str(refused.value.spelled(flag)), "--to is 'Japanese'")
