"""Turn the results of gpu.py into the tables of docs/gpu.md.

The page has a section for each machine between two markers. A section is replaced when its machine
is measured again, and what could not be measured is named with its reason.
"""

import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from speculative_t5.cli.doctor import without_home

REPOSITORY = Path(__file__).parents[2]
BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"
MOST_LINES = 40  # of failed tests
TITLES = {
    "doctor": "What `doctor` says",
    "tests": "The test suite",
    "pair": "The shipped pair",
    "pair-float16": "The shipped pair in float16",
    "pair-float32": "The shipped pair in float32",
}
BENCH_HEAD = (
    "acceptance asked for||tokens/s|ms a round|drafting|verifying|accepted|speed-up|same output"
).split("|")
COMPARE_HEAD = (
    "acceptance asked for||device|type|tokens/s|least to most|over ours plain|same output"
).split("|")

Rows = Iterator[Sequence[str]]


@dataclass(frozen=True)
class Step:
    """A command to run, and where its result is."""

    name: str
    command: tuple[str, ...]  # "python" stands for the interpreter that runs it
    limit: int  # seconds after which it is stopped
    environment: Mapping[str, str] = field(default_factory=dict)
    results: Sequence[int] = (0,)  # exit codes with which its output is a result

    def line(self) -> str:
        """Return the command as it is given to a shell."""
        set_before = [f"{name}={value} " for name, value in self.environment.items()]
        return "".join(set_before) + shlex.join(self.command)

    def record_path(self, folder: Path) -> Path:
        return folder / f"{self.name}.json"

    def record(self, folder: Path) -> dict[str, Any] | None:
        """Return how this very command ended, or None if it did not."""
        path = self.record_path(folder)
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        return found if found.get("command") == list(self.command) else None

    def is_done(self, folder: Path) -> bool:
        found = self.record(folder)
        return bool(found and found["exit_code"] in self.results and self.text(folder))

    def text(self, folder: Path, kind: str = "out") -> str:
        """Return its output, or its errors, without the paths of this machine."""
        text = (folder / f"{self.name}.{kind}").read_text(encoding="utf-8", errors="replace")
        return without_home(text.replace(str(REPOSITORY), ".")).strip()

    def lines(self, folder: Path, kind: str = "out") -> list[str]:
        return self.text(folder, kind).splitlines()


def outcome(step: Step, folder: Path) -> str:
    """Say in one line how a step ended."""
    found = step.record(folder)
    if found is None:
        return "not run"
    code, seconds = found["exit_code"], found["seconds"]
    if code == 0:
        return f"done in {seconds:.0f} s"
    how = f"stopped after {seconds:.0f} s" if code is None else f"failed with exit code {code}"
    *_, last = [*step.lines(folder), *step.lines(folder, "err")] or [""]
    return f"{how}: {last}" if last else how


def machine(step: Step, folder: Path) -> dict[str, Any]:
    """Return what the first step printed, and its date; exit if it failed."""
    if not step.is_done(folder):
        sys.exit(f"error: what MLX computes on is unknown, {outcome(step, folder)} (see {folder})")
    found: dict[str, Any] = json.loads(step.text(folder))
    return found | {"date": (step.record(folder) or {})["date"][:10]}


def section(steps: Sequence[Step], folder: Path) -> str:
    """Return the Markdown of one machine's section; the first step is about the machine."""
    about = machine(steps[0], folder)
    parts = [
        f"## {about['device']}",
        f"Measured on {about['date']} with MLX {about['mlx']} ({about['backend']}), speculative_t5 "
        f"{about['speculative_t5']}, Python {about['python']}, {about['system']}.",
    ]
    tables: dict[str, list[Step]] = {}
    for step in steps[1:]:
        tables.setdefault(re.sub(r"-0\.\d$", "", step.name), []).append(step)
    for name, group in tables.items():
        kind, _, shape = name.partition("-")
        random = {"bench": "plain, drafting and steady", "compare": "beside other programs"}
        parts.append(f"### {TITLES.get(name) or f'Random weights of {shape}: {random[kind]}'}")
        parts += BODIES[kind](group, folder)
        parts.append("```text\n" + "\n".join(step.line() for step in group) + "\n```")
    return "\n\n".join(parts) + "\n"


def unmeasured(group: Sequence[Step], folder: Path) -> Iterator[str]:
    """Yield the paragraph that names the steps without a result."""
    lacking = [step for step in group if not step.is_done(folder)]
    if lacking:
        yield "\n".join(f"- **{step.name}**: {outcome(step, folder)}" for step in lacking)


def doctor_body(group: Sequence[Step], folder: Path) -> Iterator[str]:
    for step in group:
        if step.is_done(folder):
            yield f"```text\n{step.text(folder)}\n```"
    yield from unmeasured(group, folder)


def tests_body(group: Sequence[Step], folder: Path) -> Iterator[str]:
    """Yield pytest's last line, and the tests that failed."""
    for step in group:
        if step.record(folder):
            *_, last = step.lines(folder) or ["no output"]
            failed = [line for line in step.lines(folder) if line.startswith(("FAILED", "ERROR"))]
            yield "```text\n" + "\n".join([*failed[:MOST_LINES], last]) + "\n```"
    yield from unmeasured(group, folder)


def bench_body(group: Sequence[Step], folder: Path) -> Iterator[str]:
    def rows() -> Rows:
        for result in results(group, folder):
            for row in result["rows"]:
                name = "plain" if row["name"] == "regular" else row["name"]
                yield (
                    f"{result.get('acceptance', '')}",
                    name,
                    f"{row['tokens_per_second']:.0f}",
                    f"{row['round_ms']:.2f}",
                    f"{row['draft_ms']:.2f}",
                    f"{row['verify_ms']:.2f}",
                    f"{row['acceptance']:.2f}" if row["acceptance"] else "",
                    f"{row['speedup']:.2f}",
                    f"{row['same']}/{row['outputs']}",
                )

    yield from as_table(BENCH_HEAD, rows())
    yield from unmeasured(group, folder)


def compare_body(group: Sequence[Step], folder: Path) -> Iterator[str]:
    def rows() -> Rows:
        for step, result in zip(done(group, folder), results(group, folder), strict=True):
            asked = step.command[step.command.index("--acceptance") + 1]
            plain = result["programs"]["ours plain"]["tokens_per_second"]
            for name, program in result["programs"].items():
                speed, speeds, about = (
                    program[key] for key in ("tokens_per_second", "speeds", "about")
                )
                yield (
                    asked,
                    name,
                    about["device"],
                    about["dtype"],
                    f"{speed:.1f}",
                    f"{min(speeds):.1f} to {max(speeds):.1f}",
                    f"{speed / plain:.2f}",
                    f"{program['agree']}/{program['outputs']}",
                )

    yield from as_table(COMPARE_HEAD, rows())
    reasons = [item for result in results(group, folder) for item in result["left_out"].items()]
    if reasons:
        yield "\n".join(f"- **{name}** is left out: {why}" for name, why in dict(reasons).items())
    yield from unmeasured(group, folder)


BODIES: dict[str, Callable[[Sequence[Step], Path], Iterator[str]]] = {
    "doctor": doctor_body,
    "tests": tests_body,
    "pair": bench_body,
    "bench": bench_body,
    "compare": compare_body,
}


def done(group: Sequence[Step], folder: Path) -> list[Step]:
    return [step for step in group if step.is_done(folder)]


def results(group: Sequence[Step], folder: Path) -> list[dict[str, Any]]:
    """Return the JSON of the steps that have a result: the last line of each."""
    return [json.loads(step.lines(folder)[-1]) for step in done(group, folder)]


def as_table(head: Sequence[str], rows: Rows) -> Iterator[str]:
    """Yield a Markdown table, without columns that are empty; nothing if there are no rows."""
    cells = list(rows)
    if not cells:
        return
    kept = [i for i, _ in enumerate(head) if any(row[i] for row in cells)]
    lines = [[line[i] for i in kept] for line in (head, ["---"] * len(head), *cells)]
    yield "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write(page: Path, new: str) -> None:
    """Put a machine's section between the markers of a page, which is made if it is missing."""
    text = page.read_text(encoding="utf-8") if page.exists() else f"{BEGIN}\n{END}\n"
    before, begun, rest = text.partition(BEGIN)
    between, ended, after = rest.partition(END)
    if not begun or not ended:
        sys.exit(f"error: {page} lacks the lines {BEGIN} and {END}: add them")
    heading = new.partition("\n")[0]
    kept = [
        part.strip() + "\n"
        for part in re.split(r"^(?=## )", between, flags=re.MULTILINE)[1:]
        if part.partition("\n")[0] != heading
    ]
    sections = "\n".join([*kept, new])
    page.write_text(f"{before}{BEGIN}\n\n{sections}\n{END}{after}", encoding="utf-8")
