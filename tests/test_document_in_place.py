"""`document --in-place`: nothing that a person, or another program, has written is lost."""

import os
import stat
import tempfile
from pathlib import Path
from typing import Any

from speculative_t5 import exchange
from speculative_t5.cli import document as command
from speculative_t5.cli.pieces import PartialFile

import pytest
from commands import Call
from conftest import REPOSITORY
from edited_in_place import FAULTS, run_trial
from messages import check_message

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("loaded_once")]
WRONG, RIGHT, SAVED = "She have a apple.\n", "She has an apple.\n", "My own words.\n"


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder with the shipped models and a document."""
    (tmp_path / "weights").symlink_to(REPOSITORY / "weights")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.md").write_text(WRONG)
    return tmp_path


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(folder.iterdir())}


def save_before(name: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let another program save a file just before a function is called for the first time."""
    place: Any = command if hasattr(command, name) else exchange
    original, left = getattr(place, name), [SAVED]

    def late(*arguments: Any, **options: Any) -> Any:
        if left:
            path.write_text(left.pop())
        return original(*arguments, **options)

    monkeypatch.setattr(place, name, late)


@pytest.mark.parametrize("moment", ["report", "replace_unchanged", "_file_beside", "exchange"])
@pytest.mark.parametrize("more", [(), ("--backup",), ("--backup", "--force")])
@pytest.mark.parametrize("source", ["in/a.md", "in"])
def test_what_was_saved_meanwhile_stays(
    call: Call,
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    moment: str,
    source: str,
    more: tuple[str, ...],
) -> None:
    with monkeypatch.context() as patch:
        save_before(moment, here / "in" / "a.md", patch)
        done = call("document", source, "--in-place", *more)
    kept = ".partial.jsonl" if source == "in" else "a.md.partial.jsonl"
    if moment == "report":  # it was replaced before
        assert done.code == 0 and (here / "in" / "a.md").read_text() == SAVED
        return
    assert done.code == 1 and {*contents(here / "in")} == {"a.md", kept}
    assert (here / "in" / "a.md").read_text() == SAVED
    assert "the work so far (1 piece) is kept; --resume continues from there" in done.err
    said = "in/a.md stays as it is, as another program has written to it since it was read"
    (line,) = [line for line in done.err if said in line]
    check_message(line.partition(": ")[2], said)
    (here / "in" / "a.md").write_text(WRONG)
    done = call("document", source, "--in-place", "--resume", *more)
    assert done.code == 0 and done.err[-1].endswith("1 of 1 sentence changed"), "from the pieces"
    backup = {"a.md.bak": WRONG} if more else {}
    assert contents(here / "in") == {"a.md": RIGHT} | backup


@pytest.mark.parametrize("backup", [False, True])
@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("moment", ["begin", "_move", "exchange", "settle_exchange", "end"])
def test_an_exchange_that_was_cut_short_is_finished(
    call: Call, here: Path, monkeypatch: pytest.MonkeyPatch, moment: str, saved: bool, backup: bool
) -> None:
    """The run ends just after a step, with a text that was saved before that step or not."""
    path = here / "in" / "a.md"
    place: Any = PartialFile if hasattr(PartialFile, moment) else exchange
    original = getattr(place, moment)
    is_saved = saved and moment in ("_move", "exchange")

    def last(*arguments: Any, **options: Any) -> Any:
        if is_saved:
            path.write_text(SAVED)
        if moment != "end":
            original(*arguments, **options)
        raise KeyboardInterrupt

    more = ("--backup",) if backup else ()
    with monkeypatch.context() as patch:
        patch.setattr(place, moment, last)
        assert call("document", "in/a.md", "--in-place", *more).code == 130
    done = call("document", "in/a.md", "--in-place", "--resume", *more)
    assert done.code == 0, done.err
    expected = {"a.md": SAVED if is_saved else RIGHT}
    expected |= {"a.md.bak": WRONG} if backup and not is_saved else {}
    assert contents(here / "in") == expected


def test_an_older_text_beside_a_file_is_not_removed(call: Call, here: Path) -> None:
    (here / "in" / ".a.md.replaced").write_text(SAVED)
    done = call("document", "in/a.md", "--in-place")
    done.check_error("in/.a.md.replaced holds an earlier text of in/a.md")
    assert contents(here / "in") == {".a.md.replaced": SAVED, "a.md": WRONG}


def test_files_that_cannot_be_replaced_are_refused_before_anything_is_done(
    call: Call, here: Path
) -> None:
    folder = here / "in"
    (folder / "locked.md").write_text(WRONG)
    (folder / "locked.md").chmod(0o444)
    (folder / "linked.md").write_text(WRONG)
    os.link(folder / "linked.md", here / "other.md")
    for name, found in (("locked.md", "is write-protected"), ("linked.md", "has 2 names")):
        call("document", f"in/{name}", "--in-place").check_error(f"in/{name} {found}")
    os.mkfifo(here / "pipe")
    call("document", "pipe", "--in-place").check_error("pipe is no plain file")
    done = call("document", "in", "--in-place", "--force")
    assert done.code == 1 and len([x for x in done.err if x.startswith("not done: ")]) == 2
    assert contents(folder) == {"a.md": RIGHT, "linked.md": WRONG, "locked.md": WRONG}
    assert (here / "other.md").stat().st_nlink == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_root_leaves_a_file_to_its_owner(call: Call, here: Path) -> None:
    path = here / "in" / "a.md"
    os.chown(path, 1234, 2345)
    path.chmod(0o4640)
    assert call("document", "in", "--in-place", "--backup").code == 0
    for found in (path.stat(), (here / "in" / "a.md.bak").stat()):
        assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (1234, 2345, 0o4640)


def test_a_refused_replacement_leaves_an_older_backup(
    call: Call, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "in" / "a.md.bak").write_text("older")
    more = ("--in-place", "--backup")
    call("document", "in/a.md", *more).check_error("in/a.md.bak exists")
    with monkeypatch.context() as patch:
        write = command.FilesRun._write_all

        def late(*arguments: Any) -> None:
            (here / "in" / "a.md").write_text(SAVED)
            write(*arguments)

        patch.setattr(command.FilesRun, "_write_all", late)
        assert call("document", "in/a.md", *more, "--force").code == 1
    found = contents(here / "in")
    assert (found["a.md"], found["a.md.bak"]) == (SAVED, "older")


@pytest.mark.linux
def test_files_that_are_edited_while_the_run_is_killed_lose_nothing(tmp_path: Path) -> None:
    """A small sample of scripts/checks/edited_in_place.py."""
    count = run_trial(tmp_path, 3, 1, 4, backup=True)
    assert {fault: count[fault] for fault in FAULTS} == dict.fromkeys(FAULTS, 0)
    assert count["saves"] and count["kills"] == 1


def test_a_backup_of_what_a_link_leads_to_is_written_on_another_disk(
    here: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Path("/dev/shm")
    if not memory.is_dir() or memory.stat().st_dev == here.stat().st_dev:
        pytest.skip("there is no other disk to write to")
    monkeypatch.chdir(here)
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        file = Path(folder) / "a.md"
        for saved in (None, "replace_unchanged"):
            file.write_text(WRONG)
            file.chmod(0o640)
            (here / "link.md").unlink(missing_ok=True)
            (here / "link.md.bak").unlink(missing_ok=True)
            (here / "link.md").symlink_to(file)
            with monkeypatch.context() as context:
                if saved:
                    save_before(saved, file, context)
                done = call("document", "link.md", "--in-place", "--backup", "--force")
            assert done.code == (1 if saved else 0)
            assert file.read_text() == (SAVED if saved else RIGHT)
            assert (here / "link.md.bak").exists() == (saved is None)
            if saved is None:
                assert (here / "link.md.bak").read_text() == WRONG
                assert stat.S_IMODE((here / "link.md.bak").stat().st_mode) == 0o640
