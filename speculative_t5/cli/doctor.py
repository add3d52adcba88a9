"""The command `doctor`: a report on what the package promises, proved on this machine."""

import json
import re
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer
from tqdm import tqdm

from ..checkpoints import as_dtype, find_cached, find_folder, or_nearest
from ..doctor import ALL_CHECKS, Check, Finding, Subject, as_markdown, chosen, run_check
from ..errors import count
from ..options import option
from .options import decoder_option, draft_of, output_option, with_options
from .terminal import EXIT_FAILED, columns, visible

REPORT_WIDTH = 80  # columns, whatever the terminal has
NOTE_INDENT = " " * 10  # of the lines below a finding


@with_options
def doctor(
    model: str = decoder_option("model"),
    draft_model: str | None = decoder_option("draft_model"),
    dtype: str | None = decoder_option("dtype"),
    only: list[str] | None = option(None, "Run only this check; may be repeated."),
    report: bool = output_option(
        False,
        "Measure random models of published shapes, too, and print one block of Markdown to paste "
        "into an issue; takes a few minutes.",
    ),
    as_json: bool = output_option(
        False, "Print one JSON object with the numbers of --report, and all others."
    ),
    list_checks: bool = output_option(False, "List the checks; run none."),
) -> None:
    """Check on this machine that outputs are right, and measure how many tokens to draft.

    Each check runs in a process of its own and needs no network. The exit code is 1 if any of them
    failed. The report can be published: your home folder is written as ~.
    """
    if report and (as_json or list_checks):
        raise ValueError("--report prints a block of its own: leave out --json and --list")
    checks = chosen(only or ())
    if list_checks:
        print("\n".join(columns([(check.name, check.proves) for check in checks], right=())))
        return
    as_dtype(dtype)  # which refuses other types
    draft = _draft_of(model, draft_model)
    subject = Subject(_folder(model), _folder(draft) if draft else None, dtype)
    if any(check.loads for check in checks):
        subject.check()
    # What was given: the folder of a model from the Hub is named after a commit.
    named = draft_model or Path(draft).name if draft else None
    pair = without_home(f"{model}, drafts by {named or 'lookup'}")
    is_quiet, began = as_json or report, time.perf_counter()
    if not is_quiet:
        print(f"speculative_t5 doctor: {pair}\n", flush=True)
    findings = _run_all(checks, subject, quiet=is_quiet)
    seconds = time.perf_counter() - began
    failed = [each.name for each in findings if each.status == "failed"]
    if as_json:
        result = {
            "model": model,
            "draft": named,
            "dtype": dtype,
            "checks": [*map(asdict, findings)],
            "failed": failed,
            "seconds": round(seconds, 1),
        }
        print(json.dumps(_without_home(result)))
    elif report:
        print(as_markdown(pair, findings, seconds))
    else:
        print(_summary(failed, len(checks), seconds))
    if failed:
        raise typer.Exit(EXIT_FAILED)


def _draft_of(model: str, draft_model: str | None) -> str | None:
    """Return the draft that is meant; None for a lookup, which needs no model."""
    draft = draft_of(model, draft_model)
    return None if draft == "lookup" else draft


def _run_all(checks: Sequence[Check], subject: Subject, *, quiet: bool) -> list[Finding]:
    """Run checks one after the other; unless `quiet`, print what each has found at once."""
    findings = []
    for number, check in enumerate(checks, start=1):
        now = f"{check.name} ({number} of {len(checks)}) ..."
        with tqdm(desc=now, bar_format="{desc}", leave=False, disable=None):
            finding = run_check(check, subject)
        finding = Finding(**_without_home(asdict(finding)))
        findings.append(finding)
        if not quiet:
            print("\n".join(lines_about(finding)), flush=True)
    return findings


def _summary(failed: Sequence[str], number: int, seconds: float) -> str:
    """Return the last line of a report, of so many checks."""
    if failed:
        return (
            f"\n{len(failed)} of {count(number, 'check')} failed in {seconds:.0f} s: "
            f"{', '.join(failed)}; please open an issue with this text"
        )
    return f"\n{count(number, 'check')} in {seconds:.0f} s: nothing failed"


def lines_about(finding: Finding) -> Iterator[str]:
    """Yield the lines of a report about one check, of at most REPORT_WIDTH columns."""
    width = max(len(check.name) for check in ALL_CHECKS)
    head = f"{finding.name.ljust(width)}  {finding.status.ljust(7)}  "
    parts = [(head, " " * len(head), finding.reason)]
    parts += [(NOTE_INDENT, NOTE_INDENT, note) for note in finding.notes]
    for first, others, text in parts:
        yield from textwrap.wrap(
            visible(text),
            REPORT_WIDTH,
            initial_indent=first,
            subsequent_indent=others,
            break_on_hyphens=False,
        )


def without_home(text: str) -> str:
    """Replace the user's home folder in a text by ~, also where links in its path are resolved."""
    try:
        home = Path.home()
    except RuntimeError:  # a user without one, as in some containers
        return text
    for spelling in sorted({str(home), str(home.resolve())}, key=len, reverse=True):
        if len(spelling) > 1:  # the root of all files is the home of some users
            text = re.sub(rf"{re.escape(spelling)}(?![\w.-])", "~", text)
    return text


def _without_home(value: Any) -> Any:
    """Apply `without_home` to every text in a value of JSON."""
    return json.loads(without_home(json.dumps(value, ensure_ascii=False)))


def _folder(model: str) -> str:
    folder = find_folder(model) or find_cached(model)
    if folder is None:
        advice = or_nearest(model) + "give the path of a folder, or load the model once"
        raise ValueError(
            f"no model on this machine is named {model!r}, and doctor downloads none: {advice}"
        )
    return str(folder)
