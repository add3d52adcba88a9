"""Folders: which files are read, in place or into another folder, and what one bad file spoils."""

import os
from pathlib import Path

from speculative_t5.cli.document import FilesRun

import pytest
from commands import Call
from conftest import REPOSITORY
from messages import check_message

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("loaded_once")]
WRONG, RIGHT = "She have a apple.\n", "She has an apple.\n"


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder with the shipped models and some documents."""
    (tmp_path / "weights").symlink_to(REPOSITORY / "weights")
    (tmp_path / "in").mkdir()
    for name in ("a.md", "m.txt", "z.md"):
        (tmp_path / "in" / name).write_text(WRONG)
    return tmp_path


def texts(folder: Path) -> dict[str, str]:
    return {p.name: p.read_text() for p in sorted(folder.iterdir()) if p.suffix in (".md", ".txt")}


def test_bad_files_of_a_folder_are_listed_and_the_others_done(call: Call, here: Path) -> None:
    bad = {
        "b.md": b"caf\xe9",
        "c.docx": b"PK",
        "n.txt": b"\xff\xfeS\0",
        "y.srt": b"1\n0:1 -> 0:2\n",
    }
    for name, data in bad.items():
        (here / "in" / name).write_bytes(data)
    for arguments, place in ((("-o", "out"), "out"), (("--in-place",), "in")):
        done = call("document", "in", *arguments)
        listed = [line for line in done.err if line.startswith("not done: ")]
        assert done.code == 1 and done.err[-len(bad) :] == listed
        for line, name in zip(listed, bad, strict=True):
            check_message(line.removeprefix("not done: "), f"in/{name}")
        for name in ("a.md", "m.txt", "z.md"):
            assert (here / place / name).read_text() == RIGHT
        assert not [*here.rglob("*partial*")]
    assert {name: (here / "in" / name).read_bytes() for name in bad} == bad
    done = call("document", "in", "--check", "--json")
    assert done.code == 1 and {each["file"] for each in done.records if "error" in each} == {
        f"in/{name}" for name in bad
    }


def test_files_of_word_s_locks_are_no_documents(call: Call, here: Path) -> None:
    (here / "in" / "~$x.docx").write_bytes(b"\x05owner" + b"\0" * 156)
    (here / "in" / "~$a.md").write_bytes(b"\xff")
    done = call("document", "in", "--in-place")
    assert done.code == 0 and not any("~$" in line for line in done.err)
    assert (here / "in" / "a.md").read_text() == RIGHT


def test_each_file_is_read_when_its_turn_comes(
    call: Call, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewrite = FilesRun.rewrite

    def saving(self: FilesRun, target: object, *arguments: object) -> None:
        rewrite(self, target, *arguments)  # type: ignore[arg-type]
        (here / "in" / "z.md").write_text("He go home.\n")

    monkeypatch.setattr(FilesRun, "rewrite", saving)
    (here / "in" / "z.md").write_text("He was here.\n")
    done = call("document", "in/a.md", "in/z.md", "--in-place")
    assert done.code == 0 and (here / "in" / "z.md").read_text() == "He go home.\n"
    lines = [line for line in done.err if line.startswith("in/z.md: 1 of 1 sentence changed")]
    assert len(lines) == 1, "it was read with what was saved meanwhile"


def test_links_in_a_folder_are_not_written_through(call: Call, here: Path) -> None:
    (here / "outside.md").write_text(WRONG)
    (here / "in" / "link.md").symlink_to(here / "outside.md")
    (here / "in" / "same.md").symlink_to("a.md")
    (here / "in" / "deep").symlink_to(here, target_is_directory=True)
    for arguments in (("--check",), ("--in-place", "--backup")):
        done = call("document", "in", *arguments)
        notes = [line for line in done.err if "a link, which is left alone" in line]
        assert [line.partition(":")[0] for line in notes] == ["in/link.md", "in/same.md"]
    assert done.code == 0 and (here / "outside.md").read_text() == WRONG
    assert (here / "in" / "a.md").read_text() == RIGHT
    assert (here / "in" / "same.md").is_symlink() and not (here / "in" / "link.md.bak").exists()
    assert call("document", "in", "-o", "out").code == 0, "reading them harms nothing"
    assert (here / "out" / "link.md").read_text() == RIGHT
    assert call("document", "in/link.md", "--in-place").code == 0, "it was given by name"
    assert (here / "in" / "link.md").is_symlink() and (here / "outside.md").read_text() == RIGHT


def test_a_folder_within_that_cannot_be_listed_is_named(
    call: Call, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "in" / "deep").mkdir()
    scandir, listdir = os.scandir, os.listdir

    def refuse(path: str = ".") -> None:
        if str(path).endswith("deep"):
            raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", lambda path=".": (refuse(path), scandir(path))[1])
    monkeypatch.setattr(os, "listdir", lambda path=".": (refuse(path), listdir(path))[1])
    done = call("document", "in", "--in-place")
    assert done.code == 1 and (here / "in" / "z.md").read_text() == RIGHT
    assert done.err[-1] == (
        "not done: in/deep: Permission denied; choose another path, or change its permissions"
    )


@pytest.mark.parametrize("name", ["a\x1b[31mred.md", "a\nb.md", "a\u202eb.md", "a\x9bb.md"])
def test_names_are_shown_without_what_a_terminal_obeys(call: Call, here: Path, name: str) -> None:
    (here / "in" / name).write_text(WRONG)
    (here / "in" / f"x{name}").write_bytes(b"\xff")
    done = call("document", "in", "--check", "--diff", "terminal")
    shown = "\n".join([done.out, *done.err])
    assert done.code == 1 and ascii(name)[1:-1] in shown
    assert all(c.isprintable() or c == "\n" for c in shown)
    assert not [line for line in shown.splitlines() if line.startswith("b.md")]


def test_names_that_are_not_utf_8_are_shown(call: Call, here: Path) -> None:
    name = os.fsdecode(b"caf\xe9.md")
    try:
        (here / "in" / name).write_text(WRONG)
    except OSError:
        pytest.skip("this disk has only names in UTF-8")
    done = call("document", "in", "--check", "--diff", "terminal")
    assert done.code == 1 and "in/caf\\udce9.md:    1 - She have" in done.out


def test_what_a_disk_that_is_full_leaves_is_the_end_of_the_run(
    call: Call, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from speculative_t5 import exchange

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(exchange, "_dress", full)
    done = call("document", "in", "--in-place")
    assert done.code == 1 and len(done.err) == 2
    assert (
        done.err[-1].startswith("error: ") and "No space left on device; free some" in done.err[-1]
    )
    assert texts(here / "in") == dict.fromkeys(("a.md", "m.txt", "z.md"), WRONG)
