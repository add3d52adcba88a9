"""Several documents at a time, their formats, and suggestions that a person decides on."""

import io
import os
import pty
import re
import signal
import sys
import time
from pathlib import Path
from unittest.mock import Mock

from speculative_t5.cli.pieces import PartialFile
from speculative_t5.cli.review import edited, review
from speculative_t5.documents import Document, Piece, RewriteOptions, read_file

import pytest
from commands import Call, start
from conftest import REPOSITORY
from docx import Document as Word
from docx.shared import Pt
from messages import check_message
from pieces import Scripted

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("loaded_once")]
WRONG, RIGHT = "She have a apple.", "She has an apple."


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder with the shipped models and some documents."""
    (tmp_path / "weights").symlink_to(REPOSITORY / "weights")
    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / "in" / "a.md").write_text(f"# Top\n\n{WRONG}\n")
    (tmp_path / "in" / "deep" / "b.txt").write_text(f"{WRONG}\nHe is here.\n")
    (tmp_path / "in" / "c.txt").write_text("He is here.\n")
    (tmp_path / "in" / "picture.png").write_bytes(b"\x89PNG")
    return tmp_path


def files(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def test_a_folder_is_written_into_another_or_in_place(call: Call, here: Path) -> None:
    done = call("document", "in", "-o", "out", "--diff", "html")
    assert done.code == 0, done.err
    written = files(here / "out")
    assert set(written) == {
        f"{name}{end}" for name in ("a.md", "deep/b.txt", "c.txt") for end in ("", ".diff.html")
    }
    assert written["a.md"].decode() == f"# Top\n\n{RIGHT}\n"
    summary = [line for line in done.err if re.match(r"in/\S+: \d of \d sentence", line)]
    assert len(summary) == 3 and summary[0].startswith("in/a.md: 1 of 1 sentence changed")
    assert not (here / "out.partial.jsonl").exists()
    (again,) = call("document", "in", "-o", "out").err
    assert "out/a.md exists" in again
    before = files(here / "in")
    done = call("document", "in", "--in-place", "--backup")
    assert done.code == 0, done.err
    after = files(here / "in")
    assert {name: after[name] for name in before} == before | {
        "a.md": written["a.md"],
        "deep/b.txt": written["deep/b.txt"],
    }
    assert {name: after[name] for name in after if name not in before} == {
        "a.md.bak": before["a.md"],
        "deep/b.txt.bak": before["deep/b.txt"],
    }


def test_only_force_replaces_a_backup_that_is_not_of_this_run(call: Call, here: Path) -> None:
    source, backup = here / "in" / "a.md", here / "in" / "a.md.bak"
    original = source.read_bytes()
    in_place = ("document", "in/a.md", "--in-place", "--backup")
    assert call(*in_place, "--resume").code == 0 and backup.read_bytes() == original
    source.write_text("He go home.\n")
    done = call(*in_place, "--resume")
    assert done.code == 2 and "a.md.bak exists" in done.err[-1]
    assert backup.read_bytes() == original and source.read_text() == "He go home.\n"
    backup.write_text("He go home.\n")  # as a run that was killed before it wrote the text
    assert call(*in_place, "--resume").code == 0 and source.read_text() == "He goes home.\n"


def test_hidden_files_are_left_alone(call: Call, here: Path) -> None:
    (here / "in" / ".venv").mkdir()
    (here / "in" / ".venv" / "a.txt").write_text(WRONG)
    (here / "in" / "deep" / ".b.txt").write_text(WRONG)
    records = call("document", "in", "--check", "--json").records
    assert [each["file"] for each in records] == ["in/a.md", "in/c.txt", "in/deep/b.txt"]


def test_a_check_writes_nothing_and_says_by_its_exit_code_what_it_found(
    call: Call, here: Path
) -> None:
    before = files(here / "in")
    done = call("document", "in", "--check", "--diff", "terminal")
    assert done.code == 1 and any(
        line.startswith("in/a.md:    3 - She have") for line in done.out.splitlines()
    )
    assert all(line.startswith("in/") for line in done.out.splitlines()), "not the text"
    assert files(here / "in") == before and {path.name for path in here.iterdir()} <= {
        "in",
        "weights",
        "cache",
        "stdin",
    }
    assert call("document", "in/c.txt", "--check").code == 0
    records = call("document", "in", "--check", "--json").records
    assert [(each["file"], each["changed"]) for each in records] == [
        ("in/a.md", 1),
        ("in/c.txt", 0),
        ("in/deep/b.txt", 1),
    ]
    assert all("text" not in each for each in records)


def test_several_files_that_were_killed_go_on_where_they_were(call: Call, here: Path) -> None:
    for i in range(4):
        text = "".join(f"{i}{j}. He have {j} old books of them.\n" for j in range(12))
        (here / "in" / f"{i}.md").write_text(text)
    assert call("document", "in", "-o", "whole").code == 0
    whole, sources = files(here / "whole"), files(here / "in")
    for place, partial in (
        (("-o", "out"), "out.partial.jsonl"),
        (("--in-place",), "in/.partial.jsonl"),
    ):
        least = 8
        for more in ((), ("--resume",), ("--resume",)):
            process = start(here, "document", "in", *place, "--batch-size", "1", *more)
            until = time.monotonic() + 200
            path = here / partial
            while not path.exists() or path.read_bytes().count(b"\n") < least:
                assert time.monotonic() < until and process.poll() is None, process.communicate()
                time.sleep(0.005)
            process.send_signal(signal.SIGKILL)
            process.communicate(timeout=60)
            least = path.read_bytes().count(b"\n") + 8
            folder = files(here / ("out" if place[0] == "-o" else "in"))
            for name, data in folder.items():
                if name in whole:
                    assert data in (whole[name], sources[name]), name
        (refused,) = call("document", "in", *place).err
        check_message(refused.removeprefix("error: "), partial)
        done = call("document", "in", *place, "--resume")
        assert done.code == 0, done.err
        assert any(line.endswith("done in an earlier run") for line in done.err)
        folder = files(here / ("out" if place[0] == "-o" else "in"))
        assert {name: folder[name] for name in whole} == whole and not path.exists()


def test_another_file_is_not_replaced_by_a_run_that_goes_on(
    call: Call, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = PartialFile.append

    def stop(self: PartialFile, piece: dict[str, object]) -> None:
        append(self, piece)
        if "done" in piece:
            raise OSError(28, "No space left on device", "a.md")

    with monkeypatch.context() as patch:
        patch.setattr(PartialFile, "append", stop)
        assert call("document", "in", "-o", "out").code == 1
    assert files(here / "out") == {}
    (here / "out" / "c.txt").write_text("mine")
    done = call("document", "in", "-o", "out", "--resume")
    assert done.code == 1 and "not done: out/c.txt exists" in done.err[-1]
    assert (here / "out" / "c.txt").read_text() == "mine"
    assert call("document", "in", "-o", "out", "--resume", "--force").code == 0
    assert (here / "out" / "c.txt").read_text() == "He is here.\n"


def answered(here: Path, answers: str, *arguments: str) -> tuple[int, str]:
    """Run `document --review` on a terminal, typing answers as it asks; return what it shows."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(here)
        os.environ |= {"TERM": "dumb", "PYTHONPATH": str(REPOSITORY), "COLUMNS": "200"}
        os.execv(sys.executable, [sys.executable, "-m", "speculative_t5", "document", *arguments])
    shown, left = "", answers.splitlines()
    until = time.monotonic() + 200
    while time.monotonic() < until:
        try:
            shown += os.read(terminal, 4096).decode(errors="replace")
        except OSError:  # the end of a terminal on Linux
            break
        asked = shown.count("]? ") + shown.count("Edit: ")
        if left and asked > len(answers.splitlines()) - len(left):
            os.write(terminal, f"{left.pop(0)}\n".encode())
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    return os.waitstatus_to_exitcode(status), shown.replace("\r\n", "\n")


def test_a_review_asks_for_each_suggestion(here: Path) -> None:
    text = f"{WRONG}\nHe go home.\nHe go home[^1].\nI has it.\nThey is late.\nHe have gone.\n"
    (here / "in.txt").write_text(text)
    command = ("in.txt", "-o", "out.txt", "--force", "--review", "--min-similarity", "0.5")
    code, shown = answered(here, "y\nn\nn\ne\n now\nq\n", *command)
    assert code == 0, shown
    lines = (here / "out.txt").read_text().splitlines()
    assert lines[:3] == [RIGHT, "He go home.", "He go home[^1]."]
    assert lines[3] == "I have it. now" and lines[4:] == text.splitlines()[4:]
    assert "line 3: held back, its output has an unknown character" in shown
    assert "- He go home." in shown and "+ He goes home." in shown
    code, shown = answered(here, "?\nn\ny\na\n", *command, "--min-probability", "0.999")
    assert code == 0 and "a - make this change and all others" in shown
    assert "probability of 0." in shown


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ("ynynn", "1 b 3 d e"), ("a", "1 b 3 d 5"), ("ya", "1 2 3 d 5"), ("q", "a b c d e"),
        ("yyyyy", "1 2 3 4 5"), ("xyyq", "1 2 c d e"), ("yny", "1 b 3 d e"),
    ],
)  # fmt: skip
def test_all_makes_no_changes_that_were_held_back(
    monkeypatch: pytest.MonkeyPatch, answers: str, expected: str
) -> None:
    pieces = [
        Piece(
            1,
            old,
            old if held else new,
            "unsure" if held else None,
            new if held else None,
            start=2 * i,
        )
        for i, (old, new, held) in enumerate(zip("abcde", "12345", (0, 1, 0, 1, 0), strict=True))
    ]
    left = iter(answers)

    def answer(_: str) -> str:
        try:
            return next(left)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", answer)
    chosen, quits = review(reversed(pieces), lambda line: f"line {line}")
    assert " ".join(piece.output for piece in chosen) == expected
    assert quits == ("q" in answers or answers == "yny")


def test_an_edit_has_a_word_for_each_line(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = Mock(side_effect=["Yes.", "  ", "Yes indeed."])
    monkeypatch.setattr("builtins.input", typed)
    assert edited("He goes\n> home.") == "Yes\n> indeed." and typed.call_count == 3


def test_a_review_that_quits_leaves_further_files_alone(here: Path) -> None:
    before = files(here / "in")
    code, shown = answered(here, "q\n", "in", "--in-place", "--review")
    assert code == 0 and files(here / "in") == before, shown
    code, _ = answered(here, "y\nn\n", "in", "--in-place", "--review")
    assert code == 0 and files(here / "in") == before | {"a.md": f"# Top\n\n{RIGHT}\n".encode()}


SRT = (
    "\ufeff1\r\n00:00:01,000 --> 00:00:02,500\r\n<i>She have a apple and</i>\r\n\r\n"
    "2\r\n00:00:03,000 --> 00:00:04,000 X1:40\r\nshe eat it.\r\n\r\n"
    "3\r\n00:00:05,000 --> 00:00:06,000\r\n- He have gone.\r\n- I has it.\r\n\r\n"
    "4\r\n00:00:07,000 --> 00:00:08,000\r\n{\\an8}All is\r\nwell.\r\n"
)
VTT = (
    "WEBVTT - Title\n\nNOTE She have a note.\n\nSTYLE\n::cue { color: red }\n\n"
    "intro\n00:01.000 --> 00:02.000 align:start\n<v Ann>She have a apple.</v>\n\n"
    "00:03.000 --> 00:04.000\n\n00:05.000 --> 00:06.000\nIt is here.\n"
)


def test_subtitles_keep_times_tags_and_speakers(call: Call, here: Path) -> None:
    for name, text in (("a.srt", SRT), ("b.vtt", VTT)):
        (here / name).write_bytes(text.encode())
        assert call("document", name, "-o", f"new-{name}").code == 0
    done = (here / "new-a.srt").read_bytes().decode()
    assert done == (
        SRT.replace("She have a apple and", "She has an apple and")
        .replace("she eat", "she eats")
        .replace("He have", "He has")
        .replace("I has", "I have")
    )
    assert (here / "new-b.vtt").read_text() == VTT.replace("<v Ann>She have a", "<v Ann>She has an")


def test_a_sentence_of_several_cues_is_read_as_one() -> None:
    form = read_file(SRT.encode(), "a.srt")
    decoder = Scripted(lambda each: each.replace("apple and she", "pear, and she also"), limit=40)
    done = Document(decoder, form.text, RewriteOptions(), form.lines)  # type: ignore[arg-type]
    result = done.result(done.rewrite())
    assert decoder.read[-1] == "She have a apple and she eat it." and len(result.pieces) == 4
    assert result.text.split("\n")[:2] == ["She have a pear, and", "she also eat it."]


def test_subtitles_have_no_marks_of_markdown_and_speakers_may_stand_in_tags() -> None:
    text = (
        "1\n00:00:01,000 --> 00:00:02,000\n2\n00:00:03,000 --> 00:00:04,000\n---\n\n"
        "3\n00:00:05,000 --> 00:00:06,000\n<i>- He have gone.</i>\n<i>- I has it.</i>\n\n"
        "4\n00:00:07,000 --> 00:00:08,000\n<v Ann>He go.\n<v Bob>I go.\n\n"
        "5\n00:00:09,000 --> 00:00:10,000\n---\n"
    )
    form = read_file(text.encode(), "a.srt")
    assert form.text.split("\n") == [
        "---",
        "",
        "He have gone.",
        "I has it.",
        "He go.",
        "I go.",
        "---",
    ]
    assert form.rewritten(form.text).decode() == text
    words = form.text.replace("have", "has").replace("I go.", "I went.")
    assert form.rewritten(words).decode() == text.replace("have", "has").replace("I go.", "I went.")
    decoder = Scripted(str.upper, limit=40)
    whole = Document(decoder, form.text, RewriteOptions(min_similarity=0), form.lines)  # type: ignore[arg-type]
    assert len(whole.result(whole.rewrite()).pieces) == 4


def test_a_cue_has_at_most_two_lines() -> None:
    form = read_file(SRT.encode(), "a.srt")
    assert form.text.split("\n") == [
        "She have a apple and",
        "she eat it.",
        "He have gone.",
        "I has it.",
        "All is well.",
    ]
    assert [form.number(line) for line in range(1, 6)] == [1, 2, 3, 3, 4]
    long = "word " * 12 + "end"
    shown = form.rewritten("\n".join([long, "short", "one", "two", "中文" * 20])).decode()
    cues = [cue.split("\r\n", 2)[2] for cue in shown.strip().split("\r\n\r\n")]
    assert cues[0] == f"<i>{'word ' * 6}".rstrip() + f"\r\n{'word ' * 6}end</i>"
    assert cues[1:] == ["short", "- one\r\n- two", "{\\an8}" + "中文" * 10 + "\r\n" + "中文" * 10]
    assert form.rewritten(form.text).decode() == SRT


@pytest.fixture
def word(here: Path) -> Path:
    document = Word()
    document.add_heading("My Report", 1)
    paragraph = document.add_paragraph("She ", style="List Bullet")
    paragraph.add_run("have").bold = True
    paragraph.add_run(" a apple.")
    paragraph.add_run().add_picture(io.BytesIO(png()), width=Pt(9))
    paragraph.add_run("He go home.").italic = True
    table = document.add_table(1, 2)
    table.cell(0, 0).text, table.cell(0, 1).text = WRONG, "x\ty"
    document.sections[0].header.paragraphs[0].text = WRONG
    document.save(str(here / "in.docx"))
    return here / "in.docx"


def png() -> bytes:
    import struct
    import zlib

    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0)
    pixels = chunk(b"IDAT", zlib.compress(b"\x00\xff"))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + pixels + chunk(b"IEND", b"")


def test_word_keeps_its_runs_and_styles(call: Call, here: Path, word: Path) -> None:
    assert call("document", "in.docx", "-o", "out.docx").code == 0
    before, after = Word(str(word)), Word(str(here / "out.docx"))
    assert [p.style.name for p in after.paragraphs] == [p.style.name for p in before.paragraphs]
    runs = after.paragraphs[1].runs
    assert [run.text for run in runs] == ["She ", "has", " an apple.", "", "He goes home."]
    assert [run.bold for run in runs] == [None, True, None, None, None] and runs[4].italic
    assert runs[3]._r.xpath(".//pic:pic")
    assert [cell.text for cell in after.tables[0].rows[0].cells] == [RIGHT, "x\ty"]
    assert after.sections[0].header.paragraphs[0].text == RIGHT
    done = call("document", "in.docx", "--check", "--json")
    (record,) = done.records
    assert (done.code, record["not_kept"]) == (1, [])


def test_a_document_of_word_without_text_is_left_alone(call: Call, here: Path) -> None:
    Word().save(str(here / "in" / "empty.docx"))
    before = (here / "in" / "empty.docx").read_bytes()
    assert call("document", "in", "-o", "out").code == 0
    assert (here / "out" / "empty.docx").read_bytes() == before


def test_what_word_may_lose_is_listed(word: Path) -> None:
    form = read_file(word.read_bytes(), "in.docx")
    lines = form.text.split("\n")
    assert lines == ["My Report", WRONG, "He go home.", WRONG, "x", "y", WRONG]
    assert [form.number(line) for line in range(1, 8)] == [1, 2, 2, 3, 4, 4, 5]
    lines[1] = "Sie hat heute einen Apfel."
    done = Word(io.BytesIO(form.rewritten("\n".join(lines))))
    assert "".join(run.text for run in done.paragraphs[1].runs) == lines[1] + lines[2]
    assert form.not_kept() == [
        "paragraph 2: the places of bold words, links and the like are estimates"
    ]
