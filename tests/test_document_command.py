"""`document` as a user runs it: files, streams, resuming, differences."""

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

from speculative_t5.cli import terminal
from speculative_t5.cli.pieces import PartialFile
from speculative_t5.cli.report import named, summary
from speculative_t5.decoding import Stats
from speculative_t5.documents import Piece, Rewritten, rewriting

import pytest
from commands import Call, in_a_shell, start
from conftest import REPOSITORY
from messages import check_message

# Outputs of commands are compared with those of others.
pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("loaded_once")]
DOCUMENT = ("document", "in.txt", "--output", "out.txt")
TEXT = (
    "# Top\r\n\r\n- She have a apple.\r\n  \u2603 She have gone.\r\n\r\n"
    "> I thinks that this is\n> a good idea.  She have a apple.\n"
)
PAGE = ("--diff", "html", "--diff-output")
MANY = 24  # sentences: a run must not end before it is stopped


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder with the shipped models and a text."""
    (tmp_path / "weights").symlink_to(REPOSITORY / "weights")
    (tmp_path / "in.txt").write_bytes(TEXT.encode())
    return tmp_path


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"weights", "stdin", "cache"}


def frame(text: str) -> list[str]:
    """The ends of a text's lines and what stands before their first letter."""
    return re.findall(r"^[^\w\u2603\r\n]*|\r\n|\r|\n", text, re.MULTILINE)


def test_a_file_is_rewritten_in_its_layout(call: Call, here: Path) -> None:
    (here / "out.txt").write_text("before")
    done = call(*DOCUMENT, "--force")
    assert (done.code, done.out) == (0, "")
    written = (here / "out.txt").read_bytes().decode()
    assert frame(written) == frame(TEXT)
    assert "- She has an apple.\r\n  \u2603 She has gone.\r\n" in written
    assert "> I think that this is\n> a good idea.  She has an apple.\n" in written
    assert re.fullmatch(r"4 of 4 sentences changed; \d+\.\d s", done.err[-1])


def test_a_page_shows_what_changed(call: Call, here: Path) -> None:
    done = call(*DOCUMENT, "--diff", "html")
    assert done.err[-2] == "wrote out.txt and out.txt.diff.html"
    page = (here / "out.txt.diff.html").read_text()
    assert page.startswith("<!DOCTYPE html>") and "Changes in in.txt" in page and "<ins>" in page
    assert names(here) == {"in.txt", "out.txt", "out.txt.diff.html"}
    written = call("document", "in.txt", *PAGE, "page.html").out
    assert written.encode() == (here / "out.txt").read_bytes()
    assert (here / "page.html").read_text() == page


def test_a_model_that_must_be_surer_changes_less(call: Call) -> None:
    done = call("document", "in.txt", "--min-probability", "1")
    assert (done.code, done.out) == (0, TEXT)
    assert 'kept, "has" for "have" has a probability of 0.' in done.err[0]


REASON = "its output has an unknown character"


@pytest.fixture
def refused_13(here: Path) -> Path:
    """A file of 13 sentences whose outputs are refused, the last of them a long one."""
    much = "The old house of my father is red, and "
    path = here / "in.txt"
    path.write_text("He go home[^1].\n" * 12 + f"{much * 2}he say it[^1] and go home.\n")
    return path


def test_a_kept_piece_shows_what_it_would_have_become(call: Call, refused_13: Path) -> None:
    lines = call("document", "in.txt").err
    assert lines[0] == f"line 1 kept, {REASON}: He go home[^1]. -> He goes home[\ufffd1]."
    before, after = (
        f"...r is red, and he {say} and go home." for say in ("say it[^1]", "says it[\ufffd1]")
    )
    assert lines[12] == f"line 13 kept, {REASON}: {before} -> {after}.."
    assert len(lines) == 14 and "13 left as is" in lines[13]


def test_a_terminal_lists_ten_kept_pieces(
    call: Call, refused_13: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "is_terminal", lambda stream: True)
    shown = "\n".join(call(*DOCUMENT).err)
    assert shown.count(REASON) == 10 and "3 more kept; use --json to list all of them" in shown


def test_json_has_all_kept_pieces_and_the_text_if_that_is_not_written(
    call: Call, refused_13: Path
) -> None:
    done = call("document", "in.txt", "--json")
    (record,) = done.records
    assert record.pop("text") == refused_13.read_text()
    assert (record["pieces"], record["changed"], len(record["kept"])) == (13, 0, 13)
    refused = {"source": "He go home[^1].", "refused": "He goes home[\ufffd1]."}
    assert record["kept"][0] == {"line": 1, "reason": REASON} | refused
    assert len(done.err) == 1
    written = call(*DOCUMENT, "--force", "--json", "--diff", "terminal").records
    assert [each["kept"] for each in written] == [record["kept"]] and "text" not in written[0]


def test_text_goes_through_streams_pipes_and_devices(call: Call, here: Path) -> None:
    os.mkfifo(here / "pipe")
    with subprocess.Popen(["cat", "pipe"], cwd=here, stdout=subprocess.PIPE) as reader:
        assert call("document", "in.txt", "--output", "pipe").code == 0
        piped = reader.communicate()[0].decode()
    (here / "pipe").unlink()
    assert frame(piped) == frame(TEXT) and "She has" in piped
    for more in ((), ("--output", "-"), ("--output", "/dev/stdout", "--diff", "terminal")):
        done = call("document", "-", *more, stdin=TEXT.encode())
        assert (done.code, done.out) == (0, piped)
    assert any(line.startswith("    3 + ") for line in done.err) and names(here) == {"in.txt"}


def test_a_stopped_run_goes_on_where_it_was(call: Call, here: Path) -> None:
    lines = (f"{i}. He have {i} old books of them.\r\n" for i in range(MANY))
    (here / "in.txt").write_bytes("".join(lines).encode())
    assert call(*DOCUMENT).code == 0
    whole = (here / "out.txt").read_bytes()
    (here / "out.txt").unlink()
    partial, least = here / "out.txt.partial.jsonl", 2
    for number, more in ((signal.SIGKILL, ()), (signal.SIGTERM, ("--resume",))):
        process = start(here, *DOCUMENT, "--batch-size", "1", *more)
        until = time.monotonic() + 200
        while not partial.exists() or partial.read_bytes().count(b"\n") < least:
            assert time.monotonic() < until and process.poll() is None
            time.sleep(0.005)
        process.send_signal(number)
        process.communicate(timeout=60)
        left = partial.read_bytes()
        assert number == signal.SIGKILL or left.endswith(b"\n")
        left, least = left[: left.rindex(b"\n") + 1], left.count(b"\n") + 1
        assert least <= MANY + 1 and names(here) == {"in.txt", partial.name}
        assert json.loads(left.splitlines()[1]).keys() == {
            "file",
            "start",
            "end",
            "line",
            "output",
            "reason",
            "refused",
            "retried",
            "surest",
            "written",
        }
        partial.write_bytes(left + b'{"start": 3, "outp')
    done = call(*DOCUMENT, "--resume")
    assert done.code == 0, done.err
    assert (here / "out.txt").read_bytes() == whole and names(here) == {"in.txt", "out.txt"}


def test_what_another_run_left_is_refused(
    call: Call, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = PartialFile.append

    def stop(self: PartialFile, piece: object) -> None:
        append(self, piece)  # type: ignore[arg-type]
        raise OSError(28, "No space left on device", "out.txt")

    with monkeypatch.context() as patch:
        patch.setattr(PartialFile, "append", stop)
        done = call(*DOCUMENT)
    assert done.code == 1
    assert done.err[0] == "the work so far (1 piece) is kept; --resume continues from there"
    before = (here / "out.txt.partial.jsonl").read_bytes()
    for change, found in (
        (("--by", "paragraph"), "another set of options"),
        (("--prefix", "The "), "another set of options"),
        (("--draft-model", "lookup"), "another model"),
    ):
        done = call(*DOCUMENT, "--resume", *change)
        assert done.code == 2
        check_message(done.err[0].removeprefix("error: "), found)
        assert (here / "out.txt.partial.jsonl").read_bytes() == before
    (here / "in.txt").write_bytes(TEXT.replace("Top", "She have a pear.").encode())
    assert call(*DOCUMENT, "--resume").code == 0, "its pieces are not those of the other text"
    resumed = (here / "out.txt").read_bytes()
    assert call(*DOCUMENT, "--force").code == 0
    assert names(here) == {"in.txt", "out.txt"} and (here / "out.txt").read_bytes() == resumed


def stop_before_the_end(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the command until all pieces are kept and nothing is written."""
    append = PartialFile.append

    def stop(self: PartialFile, piece: dict[str, object]) -> None:
        if "done" in piece:
            raise OSError(28, "No space left on device", "out.txt")
        append(self, piece)

    with monkeypatch.context() as patch:
        patch.setattr(PartialFile, "append", stop)
        assert call(*DOCUMENT).code == 1


def test_a_resumed_run_knows_what_was_kept_and_why(
    call: Call, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "in.txt").write_text("He go home[^1].\nHe go home.\n")
    expected = call("document", "in.txt", "--json").records[0]["kept"]
    assert expected[0]["refused"] == "He goes home[\ufffd1]."
    stop_before_the_end(call, monkeypatch)
    (record,) = call(*DOCUMENT, "--resume", "--json").records
    assert record["kept"] == expected and record["stats"]["rounds"] == 0


def test_a_resumed_run_judges_by_the_whole_text(
    call: Call, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_before_the_end(call, monkeypatch)
    seen: list[float] = []

    def none_is_sure(least: float, errors: float, count: int) -> float:
        seen.append(errors / count)
        return 1.0

    monkeypatch.setattr(rewriting, "least_in_text", none_is_sure)
    assert call(*DOCUMENT, "--resume").code == 0
    assert (here / "out.txt").read_bytes() == TEXT.encode()
    assert len(seen) == 4 and all(0.5 < each < 1 for each in seen)


def test_attributes_of_pages_are_read_on_request(call: Call, here: Path) -> None:
    page = "<img alt=\"She have a apple.\" title='She have gone.'><p>I am here.</p>"
    (here / "in.html").write_text(page)
    right = page.replace("have a", "has an").replace("have", "has")
    assert call("document", "in.html").out == page
    assert call("document", "in.html", "--attributes").out == right
    (here / "folder").mkdir()
    for name, text in {"a.html": page, "a.txt": "I am here."}.items():
        (here / "folder" / name).write_text(text)
    assert call("document", "folder", "--attributes", "--in-place").code == 0
    assert (here / "folder" / "a.html").read_text() == right


BAD: list[tuple[tuple[str, ...], str]] = [
    (("absent.txt",), "absent.txt"),
    (("",), "the input must be the name of a file, or -, got ''"),
    (("in.txt", "--output", ""), "the output must be the name of a file, got ''"),
    (("in.txt", *PAGE, ""), "must be the name of a file, got ''"),
    (("latin.txt",), "latin.txt is not UTF-8: byte 0xe9 at offset 3"),
    ((".",), "cannot go to standard output"),
    (("folder", "--check"), "folder is a folder without documents"),
    (("in.txt", "latin.txt"), "2 files cannot go to standard output"),
    (("in.txt", "empty.txt", "in.txt", "--check"), "in.txt would be written twice"),
    (("in.txt", "folder/../in.txt", "-o", "new"), "new/in.txt would be written twice"),
    (("in.txt", "-o", "x", "--in-place"), "--output and --in-place"),
    (("in.txt", "--backup"), "--backup"),
    (("in.txt", "--in-place", "--backup"), "in.txt.bak exists"),
    (("-", "--in-place"), "standard input has no place"),
    (("in.txt", "--check", "--review"), "leave out --review"),
    (("in.txt", "--review"), "--review asks on a terminal"),
    (("in.txt", "--check", "--resume"), "--resume"),
    (("in.txt", "--check", "--diff", "html"), "--check writes nothing"),
    (("in.txt", "latin.txt", "-o", "new", *PAGE, "page"), "--diff-output names one page"),
    (("not.docx",), "not.docx is not a document of Word"),
    (("in.txt", "--output", "in.txt"), "is the input itself"),
    (("in.txt", "--output", "link", "--force"), "is the input itself"),
    (("in.txt", "--output", "latin.txt"), "latin.txt exists"),
    (("in.txt", "--output", "nowhere/out.txt"), "nowhere"),
    (("in.txt", "--output", "."), "in.txt is the input itself"),
    (("in.txt", "--output", "folder"), "folder/in.txt is a folder"),
    (("in.txt", "--output", "out.txt", *PAGE, "in.txt"), "itself"),
    (("in.txt", "--output", "o", *PAGE, "to_o"), "output itself"),
    (("in.txt", "--force", "--output", "latin.txt", *PAGE, "latin"), "output itself"),
    (("in.txt", *PAGE, "/dev/stdout"), "output itself"),
    (("in.txt", "--output", "/dev/null", "--diff", "html"), "--diff html"),
    (("in.txt", "--output", "/dev/null", "--resume", "--model", "none"), "/dev/null is not"),
    (("in.txt", "--diff", "html"), "--diff html"),
    (("in.txt", "--diff", "pdf"), "'pdf'"),
    (("in.txt", "--diff-output", "x"), "--diff-output"),
    (("in.txt", "--min-similarity", "2"), "2"),
    (("in.txt", "--resume"), "--resume"),
    (("in.txt", "--attributes"), "--attributes is for html, and in.txt is read as txt"),
    (("in.txt", "--truncate"), "--truncate"),
]


def test_bad_input_is_one_line(call: Call, here: Path) -> None:
    (here / "empty.txt").touch()
    (here / "folder" / "in.txt").mkdir(parents=True)
    (here / "in.txt.bak").touch()
    (here / "not.docx").write_bytes(b"PK")
    (here / "latin.txt").write_bytes(b"caf\xe9")
    os.link(here / "in.txt", here / "link")
    os.link(here / "latin.txt", here / "latin")
    (here / "to_o").symlink_to("o")
    before = names(here)
    for arguments, found in BAD:
        done = call("document", *arguments)
        assert (done.code, done.out) == (2, ""), arguments
        (line,) = done.err
        assert found in line
        check_message(line.removeprefix("error: "))
        assert names(here) == before and (here / "in.txt").read_bytes() == TEXT.encode()


def test_a_full_disk_leaves_nothing_half_written(here: Path) -> None:
    """A limit on file sizes stands in for it: the partial file fits, the output does not."""
    (here / "in.txt").write_text("She have a apple.\n" + f"# {'heading' * 1000}\n" * 20)
    # Without the guard, as what tells languages apart writes a file that is removed at once.
    done = in_a_shell(here, f"ulimit -f 64; $P {' '.join(DOCUMENT)} --no-guard")
    assert done.returncode == 1
    kept, error = done.stderr.decode().splitlines()
    assert "kept; --resume" in kept and error.startswith("error: out.txt: File too large; ")
    assert names(here) == {"in.txt", "out.txt.partial.jsonl"}


def test_a_terminal_shows_the_differences(
    call: Call, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = call(*DOCUMENT, "--diff", "terminal")
    text = (here / "out.txt").read_bytes().decode()
    pairs = zip(re.split("\r?\n", TEXT), re.split("\r?\n", text), strict=True)
    expected = [
        f"{number:5} {sign} {line}"
        for number, pair in enumerate(pairs, 1)
        for sign, line in zip("-+", pair, strict=True)
        if pair[0] != pair[1]
    ]
    assert done.out.splitlines() == expected
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    shown = call(*DOCUMENT, "--force", "--diff", "terminal").out
    assert "\x1b[1;31m" in shown and "\x1b[1;32m" in shown


def test_a_check_shows_what_would_change(call: Call, here: Path) -> None:
    done = call("document", "in.txt", "--check")
    assert done.code == 1
    assert re.fullmatch(r"4 of 4 sentences would change; \d+\.\d s", done.err[-1])
    shown = done.out.splitlines()
    assert all(" - " in line or " + " in line for line in shown) and "an apple" in done.out
    assert call("document", "in.txt", "--check", "--diff", "terminal").out == done.out
    assert names(here) == {"in.txt"}
    (record,) = call("document", "in.txt", "--check", "--json").records
    assert record["changed"] == 4


@pytest.mark.parametrize("name", ["a", "a" * 70, "\N{SNOWMAN}" * 80, "x/" * 60 + "y"])
def test_the_last_line_fits_a_terminal(name: str) -> None:
    pieces = [Piece(1, "a.", "b.", retried="by beams"), Piece(1, "a.", "a.", reason="odd")]
    result = Rewritten(
        "a.", "b.", tuple(pieces) * 500_000, Stats((1,), (1,), (1,), seconds=90_000.0)
    )
    for would in (True, False):
        last = summary(result, "paragraph", would=would)
        said = named(f"{name}.txt", last)
        assert len(said) <= 80 and said.endswith(f": {last}")
        assert not re.search("token|round|accept|piece", said)
