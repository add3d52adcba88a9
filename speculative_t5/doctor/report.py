"""The findings of `doctor` as Markdown that a person pastes into an issue."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..measure import PASS_LENGTHS
from .checks import DRAFTED_TOKENS, Finding
from .speed import as_ms, usual

TABLE_NOTES = (
    "Passes and steps: the shortest of several, interleaved. Speeds: medians of whole outputs, "
    f'encoding\nincluded; with K = {DRAFTED_TOKENS} tokens drafted a round, and as "auto" chooses, '
    "which is said by the\nmost frequent first."
)


def as_markdown(pair: str, findings: Sequence[Finding], seconds: float) -> str:
    """Return a block of Markdown with what the checks found, of a pair that is named."""
    details: dict[str, Any] = {}
    for finding in findings:
        if finding.name in ("versions", "device"):  # the latter's chip is the one computed on
            details |= finding.details
    parts = [
        f"### `doctor --report`: {details.get('chip', 'a machine')}",
        _report_table(("machine", ""), _machine_rows(details, pair, seconds)),
        "#### Checks",
        _report_table(
            ("check", "result", "reason"), ((f.name, f.status, f.reason) for f in findings)
        ),
    ]
    for timed in (each.details for each in findings if "pass_seconds" in each.details):
        head = ("tokens in a pass of the target", "", *PASS_LENGTHS)
        parts += ["#### Passes", _report_table(head, _curves(pair, timed)), "#### Speed"]
        parts += [_speeds(pair, timed), TABLE_NOTES]
    return "\n\n".join(parts)


def _machine_rows(details: Mapping[str, Any], pair: str, seconds: float) -> list[tuple[str, str]]:
    """Return what is known of the machine; a check that did not run leaves something out."""
    size = f"{details['memory'] / 2**30:.3g} GB" if "memory" in details else None
    info, parts = details.get("info", {}), details.get("parts", {})
    default = f"{details.get('default_dtype')}: {details.get('default_reason')}"
    found = {
        "chip": details.get("chip"),
        "device": details.get("device"),
        "architecture": info.get("architecture"),
        "CPU cores": details.get("cores"),
        "memory": size,
        "system": details.get("system"),
        "Python": details.get("python"),
        "MLX": details.get("mlx"),
        "speculative_t5": details.get("speculative_t5"),
        "C parts": ", ".join(f"{part} {state}" for part, state in parts.items()),
        "default type": default if "default_dtype" in details else None,
        "models": pair,
        "this report": f"{seconds:.0f} s",
    }
    return [(name, str(value)) for name, value in found.items() if value]


def _curves(pair: str, timed: Mapping[str, Any]) -> Iterable[Sequence[object]]:
    passes = [timed["pass_seconds"][str(length)] for length in PASS_LENGTHS]
    yield pair, "ms", *map(as_ms, passes)
    yield "", "times one token", *(f"{each / passes[0]:.2f}" for each in passes)


def _speeds(pair: str, timed: Mapping[str, Any]) -> str:
    auto = timed["auto"]
    cells = [
        ("target and draft", pair),
        ("type", timed["dtype"]),
        ("draft's step, ms", as_ms(timed["draft_step_seconds"])),
        ("accepted", f"{timed['acceptance']:.2f}"),
        ("plain, tokens/s", f"{timed['plain_tokens_per_second']:.1f}"),
        (f"K = {DRAFTED_TOKENS}, tokens/s", f"{timed['tokens_per_second']:.1f}"),
        ("times plain", f"{timed['measured_speedup']:.2f}"),
        ("auto, tokens/s", f"{auto['tokens_per_second']:.1f}"),
        ("times plain", f"{auto['speedup']:.2f}"),
        ("auto drafts", usual(auto, 3)),
    ]
    return _report_table([head for head, _ in cells], [[cell for _, cell in cells]])


def _report_table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    lines = (
        [" ".join(str(cell).split()).replace("|", "\\|") for cell in line]
        for line in (head, ["---"] * len(head), *rows)
    )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
