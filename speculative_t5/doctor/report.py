"""The findings of `doctor` as Markdown that a person pastes into an issue."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .checks import NUM_DRAFT, Finding
from .speed import LENGTHS, PUBLISHED, RATE, as_ms, usual

NOTES = f"""\
Passes and steps: the shortest of several, interleaved. Speeds: medians of whole outputs, encoding
included; with K = {NUM_DRAFT} tokens drafted a round, and as "auto" chooses (most frequent first).
Random pairs: a drafted token is accepted with a chance of {RATE}."""


def as_markdown(pair: str, findings: Sequence[Finding], seconds: float) -> str:
    """Return a block of Markdown with what the checks found, of a pair that is named."""
    names = {"speed": pair} | {check: ":".join(shapes) for check, shapes in PUBLISHED.items()}
    named = [(names[each.name], each) for each in findings if each.name in names]
    speeds = {name: each.details for name, each in named if "pass_seconds" in each.details}
    left_out = [
        f"Left out: {name}: {each.reason}."
        for name, each in named
        if "pass_seconds" not in each.details
    ]
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
    if speeds:
        head = ("tokens in a pass of the target", "", *LENGTHS)
        parts += ["#### Passes", _table(head, _curves(speeds)), "#### Speed", _speeds(speeds)]
    return "\n\n".join([*parts, *left_out, *([NOTES] if speeds else [])])


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


def _curves(speeds: Mapping[str, Mapping[str, Any]]) -> Iterable[Sequence[object]]:
    for name, details in speeds.items():
        passes = [details["pass_seconds"][str(length)] for length in LENGTHS]
        yield name, "ms", *map(as_ms, passes)
        yield "", "times one token", *(f"{each / passes[0]:.2f}" for each in passes)


def _speeds(speeds: Mapping[str, Mapping[str, Any]]) -> str:
    head = (
        "target and draft", "type", "draft's step, ms", "accepted", "plain, tokens/s",
        f"K = {NUM_DRAFT}, tokens/s", "times plain", "auto, tokens/s", "times plain", "auto drafts",
    )  # fmt: skip
    rows = (
        (
            name, found["dtype"], as_ms(found["draft_step_seconds"]),
            f"{found['acceptance']:.2f}", f"{found['plain_tokens_per_second']:.1f}",
            f"{found['tokens_per_second']:.1f}", f"{found['measured_speedup']:.2f}",
            f"{found['auto']['tokens_per_second']:.1f}", f"{found['auto']['speedup']:.2f}",
            usual(found["auto"], 3),
        )
        for name, found in speeds.items()
    )  # fmt: skip
    return _table(head, rows)


def _table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    lines = (
        [" ".join(str(cell).split()).replace("|", "\\|") for cell in line]
        for line in (head, ["---"] * len(head), *rows)
    )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
