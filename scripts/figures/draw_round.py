"""Draw two rounds of the shipped pair: one with a rejection, and a next one that accepts all.

    python scripts/figures/draw_round.py

The picture shows real rounds: the prompt is decoded, and each draft and the target's answers are
recorded. Needs `pip install ".[plot]"`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated

from speculative_t5 import SpeculativeDecoder
from speculative_t5.decoding.draft import Draft
from speculative_t5.decoding.keys import Keys
from speculative_t5.decoding.loop import decode
from speculative_t5.decoding.sampling import Groups
from speculative_t5.decoding.verify import Verifier
from speculative_t5.generation import GenerationOptions

import mlx.core as mx
import typer
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Patch

PROMPT = (
    "correct: my sister have never been too paris. Its very expensive and she dont has many money."
)
PICTURE = Path(__file__).parents[2] / "docs" / "images" / "round.png"
NUM_DRAFT = 5

# Face, edge and text of a box.
COLORS = {
    "accepted": ("#c8e6c9", "#2e7d32", "#1b5e20"),
    "recovered": ("#ffe0b2", "#ef6c00", "#a84300"),
    "bonus": ("#bbdefb", "#1565c0", "#0d47a1"),
    "rejected": ("#f5f5f5", "#757575", "#616161"),
    "unused": ("#f5f5f5", "#bdbdbd", "#8a8a8a"),
}
INK, QUIET = "#212121", "#616161"
WIDTH, HEIGHT = 0.92, 0.5  # of boxes; columns are 1 wide
DRAFT_Y, TARGET_Y = 0.0, -0.95


@dataclass(frozen=True)
class Judged:
    """One round: the ids before it, K drafted ids, and the target's K + 1 answers to them."""

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

    def choices(self, draft: Draft, logits: mx.array, groups: Groups, keys: Keys) -> mx.array:
        answers = super().choices(draft, logits, groups, keys)
        self.heard.append((draft.tokens[0].tolist(), answers[0].tolist()))
        return answers


def judged_rounds(decoder: SpeculativeDecoder, prompt: str) -> list[Judged]:
    """Return all rounds of the greedy output for a prompt."""
    listening = Listening()
    plan = replace(decoder.engine.plan(), verifier=listening)
    options = GenerationOptions(logit_bias={0: 0.0})  # the argmax alone would not do
    requests = decoder.engine.requests([(0, decoder.encode(prompt))], options)
    found: list[Judged] = []
    before: list[int] = []
    for done in decode(decoder.model, requests, plan, batch_size=1):
        drafted, answers = listening.heard[-1]
        found.append(Judged(len(found) + 1, [*before], drafted, answers, done.num_accepted))
        before += done.tokens
    return found


def to_draw(rounds: Sequence[Judged], eos: int) -> tuple[Judged, Judged]:
    """Return two successive rounds, one with a rejection, one without, and neither with EOS."""
    for one, other in pairwise(rounds):
        rejects = one.num_accepted < len(one.drafted)
        accepts = other.num_accepted == len(other.drafted)
        if rejects and accepts and eos not in one.emitted + other.emitted:
            return one, other
    raise ValueError("no round with a rejection comes before one that accepts all: change PROMPT")


def draw(rounds: Sequence[Judged], decoder: SpeculativeDecoder, path: Path) -> None:
    """Draw rounds below one another."""
    figure = Figure(figsize=(8, 4.7), dpi=150, facecolor="white")
    axes = figure.add_axes((0.005, 0.005, 0.99, 0.99))
    axes.set_axis_off()
    axes.set_xlim(-1.62, NUM_DRAFT + 0.55)
    axes.set_ylim(-2.75 * (len(rounds) - 1) - 2.35, 1.05)
    for place, one in enumerate(rounds):
        draw_round(axes, one, decoder, -2.75 * place)
    legend = {kind: kind for kind in COLORS if kind != "unused"}
    legend["rejected"] = "rejected, or after a rejection"
    handles = [
        Patch(
            facecolor=COLORS[kind][0],
            edgecolor=COLORS[kind][1],
            label=label,
            linestyle=line_style(kind),
        )
        for kind, label in legend.items()
    ]
    axes.legend(handles=handles, loc="lower left", ncols=4, fontsize=11, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Description": in_words(rounds, decoder)})


def in_words(rounds: Sequence[Judged], decoder: SpeculativeDecoder) -> str:
    """Return what the picture shows of each round as text, which it holds as its description."""
    assert decoder.tokenizer is not None
    return "\n".join(
        f"round {one.number}, after {decoder.tokenizer.decode(one.before)}: drafted "
        f"{decoder.tokenizer.decode(one.drafted)}, emitted {decoder.tokenizer.decode(one.emitted)}"
        for one in rounds
    )


def line_style(kind: str) -> str:
    return "--" if kind in ("rejected", "unused") else "-"


def draw_round(axes: Axes, one: Judged, decoder: SpeculativeDecoder, y: float) -> None:
    """Draw a title, the draft, the target's answers below it, and the tokens emitted."""
    assert decoder.tokenizer is not None
    decode_ids = decoder.tokenizer.decode
    left = -1.58
    write = partial(axes.text, va="center")
    write(left, y + 0.68, f"Round {one.number}", fontsize=13, weight="bold", color=INK)
    write(left + 1.13, y + 0.68, f"after  {decode_ids(one.before)}", fontsize=12, color=QUIET)
    for name, row in (("draft", DRAFT_Y), ("target", TARGET_Y)):
        write(left, y + row, name, fontsize=12, color=INK)
    n = one.num_accepted
    for i, answer in enumerate(one.answers):
        if i < len(one.drafted):
            kind = "accepted" if i < n else "rejected" if i == n else "unused"
            box(axes, i, y + DRAFT_Y, decode_ids([one.drafted[i]]), kind)
            mark, color = ("=", COLORS["accepted"][1]) if i < n else ("\u2260", "#c62828")
            if i <= n:
                between = y + (DRAFT_Y + TARGET_Y) / 2
                write(i, between, mark, fontsize=13, weight="bold", color=color, ha="center")
        last = "bonus" if n == len(one.drafted) else "recovered"
        kind = "accepted" if i < n else last if i == n else "unused"
        box(axes, i, y + TARGET_Y, decode_ids([answer]), kind)
    gained = decode_ids(one.before + one.emitted)[len(decode_ids(one.before)) :].strip()
    count = f"{n + 1} token{'s' if n else ''}"
    said = f"one pass of the target gives {count}:  {gained}"
    write(left, y - 1.5, said, fontsize=12, color=QUIET)


def box(axes: Axes, x: float, y: float, text: str, kind: str) -> None:
    """Draw a box with a text; ids without text are named."""
    text = text or "(end)"
    face, edge, ink = COLORS[kind]
    axes.add_patch(
        FancyBboxPatch(
            (x - WIDTH / 2 + 0.06, y - HEIGHT / 2 + 0.06),
            WIDTH - 0.12,
            HEIGHT - 0.12,
            boxstyle="round,pad=0.06,rounding_size=0.09",
            facecolor=face,
            edgecolor=edge,
            linewidth=1.4,
            linestyle=line_style(kind),
        )
    )
    size = min(12, 650 / ((NUM_DRAFT + 1) * len(text)))  # no wider than the box
    axes.text(x, y, text, fontsize=size, color=ink, ha="center", va="center")


def main(
    output: Annotated[Path, typer.Option(help="The picture to write, .png or .svg.")] = PICTURE,
) -> None:
    decoder = SpeculativeDecoder.from_pretrained(
        "correct-base", "correct-small", num_draft=NUM_DRAFT, dtype=mx.float32
    )
    chosen = to_draw(judged_rounds(decoder, PROMPT), decoder.model.info.eos_token_id)
    draw(chosen, decoder, output)
    print(f"wrote {output}")


if __name__ == "__main__":
    typer.run(main)
