"""Plant known bugs, one at a time, and see whether the test that each names then fails.

    python scripts/checks/planted_bugs.py                    # all of them
    python scripts/checks/planted_bugs.py decoding scripts   # those of decoding.toml, scripts.toml
    python scripts/checks/planted_bugs.py --name residual    # those whose name contains this

Each entry of tests/planted_bugs/*.toml replaces a text that occurs once in a file. The files are
changed in copies of the checkout, never in place. Every test must first pass without a bug, then
fail with it. Exits with status 1 if a bug is not seen.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Annotated

import typer

REPOSITORY = Path(__file__).parents[2]
COLLECTION = Path("tests", "planted_bugs")
FIELDS = {"name", "file", "find", "replace", "test"}
NATIVE = Path("speculative_t5", "kernels", "native")  # C parts; a bug in them is compiled
COPIED = ("speculative_t5", "docs", "scripts", "tests", "weights")  # folders; others are linked
LARGEST_COPIED = 2**20  # bytes; larger files are linked
PROCESSES = 2  # tests that run at a time
TIMEOUT = 600  # seconds of a test


@dataclass(frozen=True)
class Bug:
    """A bug of tests/planted_bugs/ROOM.toml, whose `find` occurs exactly once in its file."""

    room: str
    name: str
    file: str
    find: str
    replace: str
    test: str

    def planted(self, text: str) -> str:
        """Return the file's text with the bug."""
        if (count := text.count(self.find)) != 1:
            raise ValueError(f"{self.name}: the text to find occurs {count} times in {self.file}")
        return text.replace(self.find, self.replace)


def read_bugs(repository: Path, rooms: Sequence[str] = ()) -> list[Bug]:
    """Read the collection, or only the files of some rooms."""
    found = {path.stem: path for path in sorted((repository / COLLECTION).glob("*.toml"))}
    if unknown := [room for room in rooms if room not in found]:
        raise ValueError(f"no {COLLECTION / unknown[0]}.toml, expected one of: {', '.join(found)}")
    bugs = []
    for room, path in found.items():
        if rooms and room not in rooms:
            continue
        for entry in tomllib.loads(path.read_text(encoding="utf-8")).get("bug", []):
            if entry.keys() != FIELDS:
                raise ValueError(f"{path.name}: an entry has the fields {', '.join(entry)}")
            bugs.append(Bug(room, **entry))
    return bugs


def pytest_arguments(test: str) -> list[str]:
    """Return pytest's arguments for the test of an entry: an id, perhaps -k and an expression."""
    name, _, keyword = test.partition(" -k ")
    return [name, *(["-k", keyword] if keyword else [])]


def copy_checkout(repository: Path, folder: Path) -> None:
    """Copy a checkout: the files and folders to plant bugs in, and links to the others."""
    for path in repository.iterdir():
        if path.name in COPIED:
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(path, folder / path.name, ignore=ignored, copy_function=copy_or_link)
        elif path.is_file():
            shutil.copy(path, folder)
        elif not path.name.startswith("."):
            (folder / path.name).symlink_to(path)


def copy_or_link(source: str, target: str) -> None:
    if os.path.getsize(source) > LARGEST_COPIED:
        os.symlink(source, target)
    else:
        shutil.copy2(source, target)


def build_products(checkout: Path) -> str:
    """Compile a checkout's products and layers in place of those that it has; return why not."""
    built = next(checkout.glob("speculative_t5/kernels/_products*.so"), None)
    if built is None:
        return ""  # its test is skipped, as nothing was built
    sources = [checkout / NATIVE / name for name in ("products.c", "layers.c")]
    built.unlink()
    command = ["cc", "-O1", "-std=gnu11", "-shared", "-fPIC", "-o", built, *sources, "-lm"]
    done = subprocess.run([*command, "-lpthread"], capture_output=True, text=True, check=False)
    return f"it cannot be compiled: {done.stderr.strip()[-200:]}" if done.returncode else ""


def run(test: str, repository: Path, bug: Bug | None = None) -> str:
    """Run a test in a copy: "passed", "failed", "skipped", or why it did not run."""
    with tempfile.TemporaryDirectory() as folder:
        copy_checkout(repository, Path(folder))
        if bug:
            path = Path(folder, bug.file)
            path.write_text(bug.planted(path.read_text(encoding="utf-8")), encoding="utf-8")
            if Path(bug.file).parent == NATIVE and (fault := build_products(Path(folder))):
                return fault
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        environment = os.environ | {
            "PYTHONPATH": folder,
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # none is needed, and it is faster
            "OMP_NUM_THREADS": "1",
        }
        try:
            done = subprocess.run(
                [*command, *pytest_arguments(test)],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=TIMEOUT,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"did not end within {TIMEOUT} s"
    if done.returncode == 0:
        return "passed" if re.search(r"\d+ passed", done.stdout) else "skipped"
    if done.returncode == 1:
        missing = re.search(r"^E +(NameError: .*)", done.stdout, re.MULTILINE)
        return missing[1] if missing and bug else "failed"
    (*_, last) = (done.stdout + done.stderr).strip().splitlines() or ["no output"]
    return f"pytest ended with status {done.returncode}: {last}"


def check(
    bugs: Sequence[Bug], repository: Path = REPOSITORY, report: Callable[[str], None] = print
) -> dict[str, str]:
    """Plant each bug and report whether it is seen: "seen", "skipped", or "NOT SEEN" and why."""
    without = cache(partial(run, repository=repository))
    width = max(len(bug.name) for bug in bugs)

    def verdict(bug: Bug) -> str:
        before = without(bug.test)
        if before != "passed":
            return "skipped" if before == "skipped" else f"NOT SEEN (without the bug: {before})"
        after = run(bug.test, repository, bug)
        return "seen" if after == "failed" else f"NOT SEEN ({after})"

    with ThreadPoolExecutor(PROCESSES) as pool:
        verdicts = {}
        for bug, found in zip(bugs, pool.map(verdict, bugs), strict=True):
            report(f"{bug.name:{width}}  {bug.test}  {found}")
            verdicts[bug.name] = found
    return verdicts


def main(
    rooms: Annotated[
        list[str] | None, typer.Argument(help="Files of tests/planted_bugs, without .toml.")
    ] = None,
    name: Annotated[str, typer.Option(help="Only bugs whose name contains this.")] = "",
) -> None:
    try:
        bugs = [bug for bug in read_bugs(REPOSITORY, rooms or ()) if name in bug.name]
        if not bugs:
            raise ValueError(f"no bug has {name!r} in its name")
        verdicts = check(bugs, report=partial(print, flush=True))
    except ValueError as error:
        sys.exit(f"error: {error}")
    found = [*verdicts.values()]
    print(f"{len(bugs)} bugs: {found.count('seen')} seen, {found.count('skipped')} skipped")
    if unseen := [bug for bug, found in verdicts.items() if found.startswith("NOT SEEN")]:
        sys.exit(f"error: not seen: {', '.join(unseen)}")


if __name__ == "__main__":
    app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(help=__doc__)(main)
    app()
