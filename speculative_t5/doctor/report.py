"""The findings of `doctor` as Markdown that a person pastes into an issue."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .checks import NUM_DRAFT, Finding
from .speed import LENGTHS, as_ms, usual

NOTES = f"""\
Passes and steps: the shortest of several, interleaved. Speeds: medians of whole outputs, encoding
included; with K = {NUM_DRAFT} tokens drafted a round, and as "auto" chooses, which is said by the
most frequent first."""


def as_markdown(pair: str, findings: Sequence[Finding], seconds: float) -> str:
    """Return a block of Markdown with what the checks found, of a pair that is named."""
    details: dict[str, Any] = {}
    for finding in findings:
        if finding.name in ("versions", "device"):  # the latter's chip is the one computed on
            details |= finding.details
    parts = [
        f"### `doctor --report`: {details.get('chip', 'a machine')}",
        _table(("machine", ""), _machine(details, pair, seconds)),
        "#### Checks",
        _table(("check", "result", "reason"), ((f.name, f.status, f.reason) for f in findings)),
    ]
    for timed in (each.details for each in findings if "pass_seconds" in each.details):
        head = ("tokens in a pass of the target", "", *LENGTHS)
        parts += ["#### Passes", _table(head, _curves(pair, timed)), "#### Speed"]
        parts += [_speeds(pair, timed), NOTES]
    return "\n\n".join(parts)


def _machine(details: Mapping[str, Any], pair: str, seconds: float) -> list[tuple[str, str]]:
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
    passes = [timed["pass_seconds"][str(length)] for length in LENGTHS]
    yield pair, "ms", *map(as_ms, passes)
    yield "", "times one token", *(f"{each / passes[0]:.2f}" for each in passes)


def _speeds(pair: str, timed: Mapping[str, Any]) -> str:
    head = (
        "target and draft", "type", "draft's step, ms", "accepted", "plain, tokens/s",
        f"K = {NUM_DRAFT}, tokens/s", "times plain", "auto, tokens/s", "times plain", "auto drafts",
    )  # fmt: skip
    row = (
        pair, timed["dtype"], as_ms(timed["draft_step_seconds"]), f"{timed['acceptance']:.2f}",
        f"{timed['plain_tokens_per_second']:.1f}", f"{timed['tokens_per_second']:.1f}",
        f"{timed['measured_speedup']:.2f}", f"{timed['auto']['tokens_per_second']:.1f}",
        f"{timed['auto']['speedup']:.2f}", usual(timed["auto"], 3),
    )  # fmt: skip
    return _table(head, [row])


def _table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    lines = (
        [" ".join(str(cell).split()).replace("|", "\\|") for cell in line]
        for line in (head, ["---"] * len(head), *rows)
    )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
