"""Edit files while `document --in-place` corrects them, kill it again and again, and count losses.

    python scripts/checks/edited_in_place.py                      # 20 files, 10 kills, both ways
    python scripts/checks/edited_in_place.py --files 40 --kills 30 --seed 5

Another process saves the files at random moments and, as soon as it sees that one is replaced,
that one; it writes them in their place, or renames new ones. Half of the kills (SIGKILL) wait for
such a moment, too. The moment is made longer, by up to 20 ms on either side of an exchange, or
hardly any save or kill would hit it. After each kill the command goes on with --resume. At the end
each file has to hold what was saved last, or its correction, with its mode and owner; a backup has
to hold what was corrected; and nothing else may be there. Ends with status 1 if anything is lost or
left over.
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

ROOT = Path(__file__).parents[2]
MODES = (0o600, 0o640, 0o644, 0o664)
LINES = 4  # sentences of a file
PAUSE = 0.5  # seconds between saves, on average
SLOWED = """
import random, time
from speculative_t5 import exchange
from speculative_t5.cli import main

swap = exchange.exchange

def slow(one, other):
    time.sleep(random.random() * 0.02)
    done = swap(one, other)
    time.sleep(random.random() * 0.02)
    return done

exchange.exchange = slow
main()
"""
SOON = 0.1  # how often a file is saved as soon as its replacement is being made
ROWS = (
    "files",
    "runs",
    "kills",
    "kills while a file was replaced",
    "saves",
    "saves while a file was replaced",
    "of these, in the moment of the exchange",
    "files left to the other program, by a line",
    "files corrected at the end",
    "files with a backup that stay as they were saved",
    "earlier texts kept beside a file",
    "lost",
    "wrong mode or owner",
    "wrong backup",
    "left over",
)
FAULTS = ROWS[-4:]


def text_of(name: str, number: int) -> str:
    """Return version `number` of a file: its sentences are wrong, and its heading says which."""
    lines = (f"{i + 1}. He have {i + 2} old books of them.\n" for i in range(LINES))
    return f"# {name} {number}\n\n{''.join(lines)}"


def replaced_now(folder: Path) -> list[str]:
    """Return the files that are being replaced: only then there are certain names beside them."""
    pattern = re.compile(r"\.partial-\d+-(.*)|\.(.*)\.replaced")
    found = map(pattern.fullmatch, os.listdir(folder))
    return [match[1] or match[2] for match in found if match]


class Editor:
    """Saves files at random, and when it sees that one is being replaced.

    A file that it has saved in the very moment of an exchange it mostly leaves alone from then on,
    so that nothing hides what becomes of that text.
    """

    def __init__(self, folder: Path, log: Path, seed: int) -> None:
        self.folder, self.log, self.chance, self.number = folder, log, random.Random(seed), 0
        self.names = sorted(path.name for path in folder.glob("*.md"))
        self.backups: set[str] = set()  # that were there before
        self.left_alone: set[str] = set()

    def watch(self, seconds: float) -> tuple[str, str]:
        """Wait, until a file is being replaced; return its name, if one is, and how far it is."""
        until, seen = time.monotonic() + seconds, set[str]()
        while time.monotonic() < until:
            new, soon = [], []
            for name in os.listdir(self.folder):
                if name.endswith(".bak") and name not in self.backups:
                    self.backups.add(name)
                    new.append(name.removesuffix(".bak"))
                elif name.endswith(".replaced"):
                    new.append(name.removesuffix(".replaced").removeprefix("."))
                elif name.startswith(".partial-") and name.endswith(".md") and name not in seen:
                    seen.add(name)
                    soon += [name.split("-", 2)[2]] * (self.chance.random() < SOON)
            for step, found in (("now", new), ("soon", soon)):
                for name in found:
                    if name not in self.left_alone:
                        return name, step
            time.sleep(0.0005)
        return "", ""

    def run(self, stop: list[bool]) -> None:
        """Save files until told to stop; write to the log what was saved, a line for each."""
        with self.log.open("a") as saved:
            while not stop:
                name, step = self.watch(self.chance.random() * 2 * PAUSE)
                free = [each for each in self.names if each not in self.left_alone]
                if not name and not free:
                    continue
                name = name or self.chance.choice(free)
                self.number += 1
                text = text_of(name, self.number)
                save(self.folder / name, text, renames=self.chance.random() < 0.5)
                saved.write(json.dumps([name, text, step]) + "\n")
                saved.flush()
                if step == "now" and self.chance.random() < 0.8:
                    self.left_alone.add(name)


def edit(folder: Path, log: Path, seed: int) -> None:
    """Save files until the process is ended."""
    stop: list[bool] = []
    signal.signal(signal.SIGTERM, lambda *_: stop.append(True))
    Editor(folder, log, seed).run(stop)


def save(path: Path, text: str, *, renames: bool) -> None:
    """Save a file as editors do."""
    if not renames:
        path.write_text(text)
        return
    found, new = path.stat(), path.with_name(f".editor-{path.name}")
    new.write_text(text)
    os.chown(new, found.st_uid, found.st_gid)
    new.chmod(found.st_mode & 0o7777)
    new.rename(path)


@dataclass
class Trial:
    """One run of the check; the counts are the rows of its table."""

    folder: Path
    seed: int
    backup: bool
    count: Counter[str] = field(default_factory=Counter)
    refused: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.texts, self.log = self.folder / "texts", self.folder / "log"
        self.began: dict[str, tuple[int, int, int]] = {}  # mode, owner and group of each file

    def make(self, files: int) -> None:
        """Make the files, each with a mode, and by root with an owner, of its own."""
        self.texts.mkdir()
        for i in range(files):
            path = self.texts / f"f{i:02}.md"
            path.write_text(text_of(path.name, 0))
            if os.geteuid() == 0:
                os.chown(path, 1000 + i, 2000 + i)
            path.chmod(self.chance.choice(MODES))
            self.began[path.name] = owner_of(path)
        self.count["files"] = files

    def start(self) -> subprocess.Popen[str]:
        self.count["runs"] += 1
        command = [sys.executable, "-c", SLOWED, "document", "texts", "--in-place"]
        command += ["--resume", "--batch-size", "1", *(["--backup"] if self.backup else [])]
        return subprocess.Popen(
            command,
            cwd=self.folder,
            text=True,
            stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )

    def kill(self) -> None:
        """Start a run, and kill it at some moment of its work."""
        process, waits = self.start(), self.chance.random() < 0.5
        partial = self.texts / ".partial.jsonl"
        done = self.chance.randint(1, 2 * LINES)
        before = size_of(partial)
        while process.poll() is None and size_of(partial) - before < done:
            time.sleep(0.002)
        until = time.monotonic() + 5
        while process.poll() is None and waits and time.monotonic() < until:
            if replaced_now(self.texts):
                break
        self.count["kills while a file was replaced"] += bool(replaced_now(self.texts))
        process.kill()
        said = process.communicate()[1]
        self.count["kills"] += process.returncode == -signal.SIGKILL
        self.note(said)

    def end(self) -> None:
        """Run to the end, until nothing is left that another run would do."""
        for _ in range(5):
            process = self.start()
            said = process.communicate()[1]
            self.note(said)
            again = "stays as it is" in said
            for path in self.texts.glob(".*.replaced"):  # which a line says, too
                again |= f"{path.name} holds an earlier text" in said
                self.count["earlier texts kept beside a file"] += 1
                path.unlink()
            if not again:
                backups = (path.name for path in self.texts.glob("*.bak"))
                self.refused = {
                    name.removesuffix(".bak") for name in backups if f"{name} exists" in said
                }
                return

    def note(self, said: str) -> None:
        self.count["files left to the other program, by a line"] += said.count("stays as it is")

    def judge(self) -> None:
        """Compare what is there with what was saved."""
        saved = {name: [text_of(name, 0)] for name in self.began}
        for line in self.log.read_text().splitlines():
            name, text, step = json.loads(line)
            saved[name].append(text)
            self.count["saves"] += 1
            self.count["saves while a file was replaced"] += bool(step)
            self.count["of these, in the moment of the exchange"] += step == "now"
        corrected = self.corrected({name: texts[-1] for name, texts in saved.items()})
        expected = {*self.began}
        for name, texts in saved.items():
            path, backup = self.texts / name, self.texts / f"{name}.bak"
            found = path.read_text() if path.exists() else None
            is_corrected = found == corrected[name]
            self.count["files corrected at the end"] += is_corrected
            self.count["files with a backup that stay as they were saved"] += (
                found == texts[-1] and name in self.refused
            )
            kept_on_purpose = found == texts[-1] and name in self.refused
            self.count["lost"] += not (is_corrected or kept_on_purpose)
            self.count["wrong mode or owner"] += owner_of(path) != self.began[name]
            if self.backup:
                expected.add(backup.name)
                old = backup.read_text() if backup.exists() else None
                good = old == texts[-1] if is_corrected else old in texts[:-1]
                good = good and owner_of(backup) == self.began[name]
                self.count["wrong backup"] += not good
        self.count["left over"] = len({path.name for path in self.texts.iterdir()} - expected)

    def corrected(self, texts: dict[str, str]) -> dict[str, str]:
        """Return what the command makes of texts that nobody edits."""
        for folder in ("last", "right"):
            (self.folder / folder).mkdir()
        for name, text in texts.items():
            (self.folder / "last" / name).write_text(text)
        command = [sys.executable, "-m", "speculative_t5", "document", "last", "-o", "right"]
        subprocess.run(
            command,
            cwd=self.folder,
            check=True,
            capture_output=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        return {name: (self.folder / "right" / name).read_text() for name in texts}


def owner_of(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_mode, found.st_uid, found.st_gid


def size_of(partial: Path) -> int:
    """Return how many records there are."""
    try:
        return partial.read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def run_trial(folder: Path, files: int, kills: int, seed: int, *, backup: bool) -> Counter[str]:
    """Do one run of the check in an empty folder; return the counts, by `ROWS`."""
    trial = Trial(folder, seed, backup)
    (folder / "weights").symlink_to(ROOT / "weights")
    trial.make(files)
    trial.log.touch()
    editor = subprocess.Popen(
        [sys.executable, __file__, "--edit", str(trial.texts), str(trial.log), str(seed)]
    )
    try:
        for _ in range(kills):
            trial.kill()
        said = trial.start().communicate()[1]  # one run that is only edited
        trial.note(said)
    finally:
        editor.terminate()
        editor.wait()
    trial.end()
    trial.judge()
    return trial.count


def table(counts: dict[str, Counter[str]]) -> Iterator[str]:
    """Yield the lines of a table in Markdown, with a column for each way to run."""
    yield f"| | {' | '.join(counts)} |"
    yield f"|---|{'---|' * len(counts)}"
    for row in ROWS:
        yield f"| {row} | {' | '.join(str(each[row]) for each in counts.values())} |"


def main(
    files: Annotated[int, typer.Option(min=1)] = 20,
    kills: Annotated[int, typer.Option(min=0)] = 10,
    seed: int = 0,
) -> None:
    """Run the check with and without --backup, and print a table."""
    counts = {}
    for name, backup in (("--in-place", False), ("--in-place --backup", True)):
        with tempfile.TemporaryDirectory() as folder:
            counts[name] = run_trial(Path(folder), files, kills, seed, backup=backup)
    print("\n".join(table(counts)))
    raise typer.Exit(any(count[fault] for count in counts.values() for fault in FAULTS))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--edit"]:
        edit(Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
    else:
        typer.run(main)
