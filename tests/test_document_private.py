"""Who may read what commands write: no more than may read what it is made of."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from speculative_t5 import files
from speculative_t5.cli.pieces import PartialFile
from speculative_t5.distill.run import RunFolder
from speculative_t5.exchange import digest
from speculative_t5.files import clear_temporaries, json_line, private_mode, replacing

import pytest
from commands import Call
from conftest import REPOSITORY

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("loaded_once")]
WRONG, RIGHT = "She have a apple.\n", "She has an apple.\n"


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Path]:
    """A folder with the shipped models, and documents that only their owner may read."""
    (tmp_path / "weights").symlink_to(REPOSITORY / "weights")
    (tmp_path / "in").mkdir()
    for name in ("a.md", "b.txt"):
        (tmp_path / "in" / name).write_text(WRONG)
        (tmp_path / "in" / name).chmod(0o600)
    before = os.umask(0o022)
    yield tmp_path
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def created(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[int]]:
    """The modes of all files that are opened or renamed to, while they are made, by name."""
    seen: dict[str, set[int]] = {}
    opened, renamed = os.open, os.replace

    def look(path: Any) -> None:
        if isinstance(path, str | os.PathLike) and os.path.isfile(path):
            seen.setdefault(Path(path).name, set()).add(stat.S_IMODE(os.stat(path).st_mode))

    def watched(path: Any, *arguments: Any, **options: Any) -> int:
        file = opened(path, *arguments, **options)
        look(path)
        return file

    def replaced(one: Any, other: Any, **options: Any) -> None:
        look(one)
        renamed(one, other, **options)

    monkeypatch.setattr(os, "open", watched)
    monkeypatch.setattr(os, "replace", replaced)
    return seen


def test_what_is_made_of_a_private_file_is_private_from_its_first_byte(
    call: Call, here: Path, created: dict[str, set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = PartialFile.__exit__

    def keep(self: PartialFile, kind: Any, *_: object) -> None:
        ended(self, KeyboardInterrupt)

    monkeypatch.setattr(PartialFile, "__exit__", keep)
    for arguments, made in (
        (
            ("in/a.md", "-o", "out.md", "--diff", "html"),
            ("out.md", "out.md.diff.html", "out.md.partial.jsonl"),
        ),
        (
            ("in", "-o", "out", "--diff", "html"),
            ("out/a.md", "out/a.md.diff.html", "out/b.txt", "out.partial.jsonl"),
        ),
        (("in", "--in-place", "--backup"), ("in/a.md", "in/a.md.bak", "in/.partial.jsonl")),
    ):
        assert call("document", *arguments).code == 0
        assert {name: mode(here / name) for name in made} == dict.fromkeys(made, 0o600)
    texts = {name: modes for name, modes in created.items() if ".md" in name or "jsonl" in name}
    assert len(texts) > 6 and all(modes == {0o600} for modes in texts.values()), texts


def test_records_and_tables_of_private_prompts_are_private(
    call: Call, here: Path, created: dict[str, set[int]]
) -> None:
    for output in ("out.jsonl", "out.csv"):
        assert call("batch", "in/b.txt", "--output", output).code == 0
        assert mode(here / output) == 0o600
    assert created["out.csv.jsonl"] == {0o600}
    assert call("batch", "in/b.txt", "--output", "b.jsonl.1-of-1").code == 0
    assert call("batch", "in/b.txt", "--join", "--output", "b.jsonl").code == 0
    assert mode(here / "b.jsonl") == 0o600


def test_a_run_that_goes_on_makes_its_pieces_private(call: Call, here: Path) -> None:
    partial = here / "in" / "a.md.partial.jsonl"
    partial.touch()  # as an earlier version left it
    partial.chmod(0o644)
    seen = []
    append = PartialFile.append

    def look(self: PartialFile, piece: dict[str, object]) -> None:
        seen.append(mode(partial))
        append(self, piece)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PartialFile, "append", look)
        assert call("document", "in/a.md", "--in-place", "--resume").code == 0
    assert {*seen} == {0o600} and (here / "in" / "a.md").read_text() == RIGHT


@pytest.mark.parametrize("before", [0o640, 0o644, 0o666])
def test_a_file_that_is_there_keeps_its_mode(call: Call, here: Path, before: int) -> None:
    """Whoever made it has said who may read it."""
    (here / "out.md").touch()
    (here / "out.md").chmod(before)
    assert call("document", "in/a.md", "-o", "out.md", "--force").code == 0
    assert mode(here / "out.md") == before and (here / "out.md").read_text() == RIGHT


def test_a_group_reads_what_is_made_of_its_files_only_if_it_is_the_same_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    path.touch()
    (own,) = {tmp_path.stat().st_gid}
    monkeypatch.setattr(files, "group_of_new", lambda _: own)
    for given, group, expected in (
        (0o640, own, 0o640),
        (0o664, own, 0o664),
        (0o640, own + 1, 0o600),
        (0o444, own, 0o644),
        (0o644, own + 1, 0o644),
        (0o664, own + 1, 0o644),
        (0o755, own, 0o644),
        (0o600, own, 0o600),
    ):
        found = os.stat_result((stat.S_IFREG | given, 1, 1, 1, 0, group, 0, 0, 0, 0))
        assert private_mode(path, [found]) == expected
    secret = os.stat_result((stat.S_IFREG | 0o600, 1, 1, 1, 0, own, 0, 0, 0, 0))
    pipe = os.stat_result((stat.S_IFIFO | 0o600, 1, 1, 1, 0, own, 0, 0, 0, 0))
    assert private_mode(path, [pipe]) == 0o666
    assert private_mode(path, [pipe, secret, os.stat(path)]) == 0o600


def test_what_killed_processes_left_is_cleared(tmp_path: Path) -> None:
    for name in (
        ".partial-4194399-a",
        ".partial-4194399-c",
        ".partial-4194399-b",
        ".partial-x-a",
        ".partial-a",
    ):
        (tmp_path / name).touch()
    with replacing(tmp_path / "a") as new:
        clear_temporaries([tmp_path / "a", tmp_path / "c"])
        assert new.exists()
    assert {path.name for path in tmp_path.iterdir()} == {
        "a",
        ".partial-4194399-b",
        ".partial-x-a",
        ".partial-a",
    }


@pytest.mark.parametrize("aside", ["../secret.txt", "b.txt", "in/../../secret.txt", []])
def test_a_file_of_pieces_from_elsewhere_moves_no_other_file(
    here: Path, call: Call, monkeypatch: pytest.MonkeyPatch, aside: object
) -> None:
    monkeypatch.chdir(here)
    secret, folder = here / "secret.txt", here / "in"
    secret.write_text("secret")
    before = (folder / "a.md").read_bytes()
    begun = {"begins": "a.md", "file": "0", "done": digest(before), "aside": aside}
    (folder / ".partial.jsonl").write_bytes(json_line(begun) * 2)
    done = call("document", str(folder), "--in-place", "--force")
    assert done.code == (0 if aside == [] else 1)
    assert secret.read_text() == "secret"
    assert (folder / "a.md").read_text() == (RIGHT if aside == [] else WRONG)
    assert (folder / "b.txt").read_text() == RIGHT


def test_the_working_folder_of_distill_is_private(tmp_path: Path) -> None:
    """It holds outputs for prompts that may be private."""
    folder = RunFolder(tmp_path / "out")
    with folder.begun({}):
        assert mode(folder.path) == 0o700
