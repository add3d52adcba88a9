"""Draw two rounds of the shipped pair: one with a rejection, and a next one that accepts all.

    python scripts/figures/draw_round.py

The picture shows real rounds: the prompt is decoded, and each draft and the target's answers are
recorded. Needs `pip install ".[plot]"`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from speculative_t5 import SpeculativeDecoder
from speculative_t5.decoding.draft import Draft
from speculative_t5.decoding.loop import decode
from speculative_t5.decoding.protocols import Session
from speculative_t5.decoding.verify import Verifier
from speculative_t5.generation import GenerationOptions

import mlx.core as mx
import typer

PROMPT = (
    "correct: my sister have never been too paris. Its very expensive and she dont has many money."
)
PICTURE = Path(__file__).parents[2] / "docs" / "images" / "round.png"
MAX_DRAFT = 8  # more columns would be too narrow to read

# Face, edge and text of a box.
COLORS = {
    "accepted": ("#c8e6c9", "#2e7d32", "#1b5e20"),
    "recovered": ("#ffe0b2", "#ef6c00", "#a84300"),
    "bonus": ("#bbdefb", "#1565c0", "#0d47a1"),
    "rejected": ("#f5f5f5", "#757575", "#616161"),
    "unused": ("#f5f5f5", "#bdbdbd", "#8a8a8a"),
}
INK, QUIET = "#212121", "#616161"
PITCH, WIDTH, HEIGHT = 1.0, 0.92, 0.5  # of columns and of boxes, in units of the axes
DRAFT_Y, TARGET_Y = 0.0, -0.95


@dataclass(frozen=True)
class Judged:
    """One round: the tokens before it, the drafted ids, and the target's answer at each place.

    Attributes:
        number: From 1.
        before: Ids emitted before.
        drafted: K ids.
        answers: K + 1 ids: the target's own choice after the first 0 to K drafted tokens.
        num_accepted: Number of drafted tokens accepted.
    """

    number: int
    before: list[int]
    drafted: list[int]
    answers: list[int]
    num_accepted: int

    @property
    def emitted(self) -> list[int]:
        return self.answers[: self.num_accepted + 1]


@dataclass(frozen=True)
class Listening(Verifier):
    """Verifies, and records each draft with the target's answers."""

    heard: list[tuple[list[int], list[int]]] = field(default_factory=list)

    def choices(self, draft: Draft, session: Session, tokens: mx.array) -> mx.array:
        answers = super().choices(draft, session, tokens)
        self.heard.append((draft.tokens[0].tolist(), answers[0].tolist()))
        return answers


def judged_rounds(decoder: SpeculativeDecoder, prompt: str) -> list[Judged]:
    """Return all rounds of the greedy output for a prompt."""
    plan = decoder.plan(GenerationOptions())
    listening = Listening(plan.verifier.sampler)
    plan = replace(plan, verifier=listening)
    found: list[Judged] = []
    before: list[int] = []
    for done in decode(decoder.model, [(0, decoder.encode(prompt))], plan, batch_size=1):
        drafted, answers = listening.heard[-1]
        found.append(Judged(len(found) + 1, [*before], drafted, answers, done.num_accepted))
        before += done.tokens
    return found


def to_draw(rounds: Sequence[Judged], eos: int) -> tuple[Judged, Judged]:
    """Return two successive rounds, one with a rejection, one without, and neither with EOS.

    Raises:
        ValueError: If there are no such rounds.
    """
    for one, other in pairwise(rounds):
        rejects = one.num_accepted < len(one.drafted)
        accepts = other.num_accepted == len(other.drafted)
        if rejects and accepts and eos not in one.emitted + other.emitted:
            return one, other
    raise ValueError(
        "this prompt has no round with a rejection before one that accepts all: choose another"
    )


def draw(rounds: Sequence[Judged], decoder: SpeculativeDecoder, path: Path) -> None:
    """Draw rounds below one another."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as pyplot

    columns = max(len(r.answers) for r in rounds)
    step = 2.75
    figure, axes = pyplot.subplots(figsize=(8, 4.7), dpi=150, facecolor="white")
    axes.set_axis_off()
    axes.set_xlim(-1.62, (columns - 1) * PITCH + 0.55)
    axes.set_ylim(-step * (len(rounds) - 1) - 2.35, 1.05)
    figure.subplots_adjust(0.005, 0.005, 0.995, 0.995)
    for place, one in enumerate(rounds):
        draw_round(axes, one, decoder, -place * step)
    draw_legend(axes, -step * (len(rounds) - 1) - 2.05)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, facecolor="white")
    pyplot.close(figure)


def draw_round(axes: Any, one: Judged, decoder: SpeculativeDecoder, y: float) -> None:
    """Draw a title, the draft, the target's answers below it, and the tokens emitted."""
    assert decoder.tokenizer is not None
    decode_ids = decoder.tokenizer.decode
    left = -1.58
    axes.text(left, y + 0.68, f"Round {one.number}", fontsize=13, weight="bold", color=INK,
              va="center")  # fmt: skip
    axes.text(left + 1.13, y + 0.68, f"after  {shortened(decode_ids(one.before))}", fontsize=12,
              color=QUIET, va="center")  # fmt: skip
    for name, row in (("draft", DRAFT_Y), ("target", TARGET_Y)):
        axes.text(left, y + row, name, fontsize=12, color=INK, va="center")
    n, columns = one.num_accepted, len(one.answers)
    for i, answer in enumerate(one.answers):
        x = i * PITCH
        if i < len(one.drafted):
            kind = "accepted" if i < n else "rejected" if i == n else "unused"
            box(axes, x, y + DRAFT_Y, word(decode_ids, one.drafted[i]), kind, columns)
            mark, color = ("=", COLORS["accepted"][1]) if i < n else ("\u2260", "#c62828")
            if i <= n:
                axes.text(x, y + (DRAFT_Y + TARGET_Y) / 2, mark, fontsize=13, weight="bold",
                          color=color, ha="center", va="center")  # fmt: skip
        last = "bonus" if n == len(one.drafted) else "recovered"
        kind = "accepted" if i < n else last if i == n else "unused"
        box(axes, x, y + TARGET_Y, word(decode_ids, answer), kind, columns)
    gained = decode_ids(one.before + one.emitted)[len(decode_ids(one.before)) :].strip()
    count = f"{n + 1} token{'s' if n else ''}"
    axes.text(left, y - 1.5, f"one pass of the target gives {count}:  {gained}", fontsize=12,
              color=QUIET, va="center")  # fmt: skip


def box(axes: Any, x: float, y: float, text: str, kind: str, columns: int) -> None:
    from matplotlib.patches import FancyBboxPatch

    face, edge, ink = COLORS[kind]
    shape = FancyBboxPatch(
        (x - WIDTH / 2 + 0.06, y - HEIGHT / 2 + 0.06), WIDTH - 0.12, HEIGHT - 0.12,
        boxstyle="round,pad=0.06,rounding_size=0.09", facecolor=face, edgecolor=edge,
        linewidth=1.4, linestyle="--" if kind in ("rejected", "unused") else "-",
    )  # fmt: skip
    axes.add_patch(shape)
    size = min(12, 650 / (columns * max(len(text), 1)))  # no wider than the box
    axes.text(x, y, text, fontsize=size, color=ink, ha="center", va="center")


def draw_legend(axes: Any, y: float) -> None:
    entries = [
        ("accepted", "accepted"), ("recovered", "recovered"), ("bonus", "bonus"),
        ("rejected", "rejected, or after a rejection"),
    ]  # fmt: skip
    from matplotlib.patches import FancyBboxPatch

    x = -1.5
    for kind, text in entries:
        face, edge, _ = COLORS[kind]
        axes.add_patch(FancyBboxPatch(
            (x, y - 0.08), 0.16, 0.16, boxstyle="round,pad=0.03,rounding_size=0.05",
            facecolor=face, edgecolor=edge, linewidth=1.2,
            linestyle="--" if kind == "rejected" else "-",
        ))  # fmt: skip
        axes.text(x + 0.3, y, text, fontsize=11, color=INK, va="center")
        x += 0.62 + 0.105 * len(text)


def word(decode_ids: Any, token: int) -> str:
    """Return the text of an id for its box; ids without text get a name."""
    return decode_ids([token]) or "(end)"


def shortened(text: str, longest: int = 56) -> str:
    """Return the end of a text, starting at a word."""
    if len(text) <= longest:
        return text
    return "... " + text[-longest:].partition(" ")[2]


def main(
    prompt: Annotated[str, typer.Option(help="Prompt to decode.")] = PROMPT,
    num_draft: Annotated[
        int, typer.Option(min=1, max=MAX_DRAFT, help="Tokens to draft for each target pass.")
    ] = 5,
    output: Annotated[Path, typer.Option(help="The picture to write, .png or .svg.")] = PICTURE,
) -> None:
    decoder = SpeculativeDecoder.from_pretrained(
        "correct-base", "correct-small", num_draft=num_draft, dtype=mx.float32
    )
    try:
        chosen = to_draw(judged_rounds(decoder, prompt), decoder.model.eos_token_id)
    except ValueError as error:
        sys.exit(f"error: {error}")
    draw(chosen, decoder, output)
    print(f"wrote {output}, rounds {' and '.join(str(one.number) for one in chosen)}")


if __name__ == "__main__":
    app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(help=__doc__)(main)
    app()
