"""Formats that names of files say, or `--format`; files with nothing in them."""

from pathlib import Path

from speculative_t5.documents import (
    DOCUMENT_FORMATS,
    DOCUMENT_SUFFIXES,
    NOT_READ,
    format_of,
    read_file,
)

import pytest
from commands import Call
from conftest import REPOSITORY
from docx import Document as Word
from messages import check_message

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("loaded_once")]
WRONG, RIGHT = "She have a apple.", "She has an apple."
CUE = "1\n00:00:01,000 --> 00:00:02,000\n"
TEXTS = {
    "txt": WRONG,
    "md": f"# Top\n\n{WRONG}\n",
    "srt": f"{CUE}<i>{WRONG}</i>\n",
    "vtt": f"WEBVTT\n\n00:01.000 --> 00:02.000\n{WRONG}\n",
    "ass": f"[Events]\nDialogue: 0,0:00:01.00,0:00:02.00,Default,,0,0,0,,{WRONG}\n",
    "lrc": f"[ar:X]\n[00:12.50]{WRONG}\n",
    "html": f"<p>{WRONG}</p>",
}


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "weights").symlink_to(REPOSITORY / "weights")
    return tmp_path


@pytest.mark.parametrize("form", TEXTS)
def test_standard_input_has_the_format_that_is_given(call: Call, here: Path, form: str) -> None:
    done = call("document", "-", "--format", form, stdin=TEXTS[form])
    assert (done.code, done.out) == (0, TEXTS[form].replace(WRONG, RIGHT))
    (here / "in.log").write_text(TEXTS[form])
    done = call("document", "in.log", "--format", form, "--in-place")
    assert done.code == 0 and (here / "in.log").read_text() == TEXTS[form].replace(WRONG, RIGHT)


def test_a_document_of_word_may_come_from_standard_input(call: Call, here: Path) -> None:
    document = Word()
    document.add_paragraph(WRONG)
    document.save(str(here / "in.docx"))
    data = (here / "in.docx").read_bytes()
    done = call("document", "-", "--format", "docx", "-o", "out.docx", stdin=data)
    assert done.code == 0 and Word(str(here / "out.docx")).paragraphs[0].text == RIGHT


def test_formats_are_named_by_options_and_suffixes() -> None:
    found = {format_of(f"A{suffix.upper()}") for suffix in DOCUMENT_SUFFIXES}
    assert found | {format_of("strings.xml")} == {*DOCUMENT_FORMATS}
    assert format_of("-") == format_of("a.log") == format_of("docx") == "txt"
    assert format_of("a.docx", "srt") == "srt"


BAD_FORMATS = [
    (
        ("in.md", "--format", "pdf"),
        "--format must be one of txt, md, srt, vtt, ass, lrc, html, docx",
    ),
    (("folder", "--format", "md", "--check"), "folder is a folder, whose files have the formats"),
]
NAMES = {  # names of outputs that fit a format, and that do not
    "md": (("o.md", "o.txt", "o.markdown", "o.log", "o"), ("o.docx", "o.html", "o.srt", "o.pdf")),
    "srt": (("o.srt", "o.SRT", "o"), ("o.vtt", "o.txt", "o.docx", "o.doc")),
    "html": (("o.html", "o.htm", "o.php"), ("o.md", "o.docx", "o.odt", "o.vtt")),
    "docx": (("o.docx",), ("o.txt", "o", "o.doc", "o.html", "o.pdf")),
}


def test_bad_formats_are_refused(call: Call, here: Path) -> None:
    (here / "in.md").write_text(WRONG)
    (here / "folder").mkdir()
    (here / "folder" / "a.md").write_text(WRONG)
    for arguments, found in BAD_FORMATS:
        call("document", *arguments).check_error(found)


@pytest.mark.parametrize("suffix", NOT_READ)
def test_formats_that_are_not_read_are_refused_by_name(call: Call, here: Path, suffix: str) -> None:
    (here / f"in{suffix.upper()}").write_text(WRONG)
    name = f"in{suffix.upper()}"
    call("document", name).check_error(f"{name} is a {suffix} file, which is not read")
    done = call("document", name, "--format", "txt")
    assert (done.code, done.out) == (0, RIGHT), "but what is said to be text is read"


def test_files_of_a_folder_that_are_no_documents_are_named(call: Call, here: Path) -> None:
    folder = here / "folder"
    folder.mkdir()
    for name in ("a.md", "b.odt", "c.PNG", "Makefile"):
        (folder / name).write_text(RIGHT)
    done = call("document", "folder", "--check")
    assert done.code == 0
    assert done.err[0] == "3 files left alone, as they are no documents (.odt, .png, no suffix)"
    (folder / "a.md").unlink()
    call("document", "folder", "--check").check_error("folder is a folder without documents")


@pytest.mark.parametrize("form", NAMES)
def test_an_output_has_the_format_that_its_name_says(call: Call, here: Path, form: str) -> None:
    source = here / f"in.{form}"
    if form == "docx":
        Word().save(str(source))
    else:
        source.write_text(TEXTS[form])
    good, bad = NAMES[form]
    for name in bad:
        done = call("document", source.name, "-o", name)
        done.check_error(f"{name} would be in the format of in.{form}, which is {form}")
        assert not (here / name).exists()
    for name in good:
        assert call("document", source.name, "-o", name).code == 0
    data = source.read_bytes()
    (line,) = call("document", "-", "--format", form, "-o", bad[0], stdin=data).err
    check_message(line.removeprefix("error: "), f"the format of standard input, which is {form}")


@pytest.mark.parametrize("content", ["", "\n", " \r\n\t"])
def test_a_file_with_nothing_in_it_is_copied(call: Call, here: Path, content: str) -> None:
    suffixes = [suffix for suffix in DOCUMENT_SUFFIXES if suffix != ".docx" or not content]
    for suffix in suffixes:
        (here / f"in{suffix}").write_bytes(content.encode())
        done = call("document", f"in{suffix}", "-o", f"out{suffix}")
        assert done.code == 0, done.err
        assert (here / f"out{suffix}").read_bytes() == content.encode()
        assert call("document", f"in{suffix}", "--in-place", "--backup").code == 0
    assert call("document", "-", stdin=content).out == content
    assert len([*here.glob("in*")]) == len(suffixes), "and there is nothing to keep a backup of"


@pytest.mark.parametrize(
    "content",
    ["WEBVTT\n", "1$\n00:00:01.000 -> 00:00:03.000\nShe have a apple.\n", f"{WRONG}\n", "\0"],
)
def test_subtitles_without_cues_say_what_a_cue_is(call: Call, here: Path, content: str) -> None:
    for name in ("in.srt", "in.vtt"):
        (here / name).write_text(content)
        done = call("document", name, "--check")
        done.check_error(f"no cues found in {name}")
        assert "00:00:01,000 --> 00:00:02,500" in done.err[0]


def test_cues_without_words_are_copied() -> None:
    for text in (CUE, f"{CUE}\n{CUE}", f"WEBVTT\n\n{CUE}\n"):
        form = read_file(text.encode(), "a.srt")
        assert form.rewritten(form.text).decode() == text
