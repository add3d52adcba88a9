"""Draw what `bench` measured: speed-up and forward passes against drafted tokens.

    python -m speculative_t5 bench --turns 9 --json | python scripts/figures/draw_sweep.py sweep.png

Needs `pip install ".[plot]"`.
"""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from matplotlib.figure import Figure

REGULAR = "regular"  # as plain decoding is called in JSON


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    fixed = {int(r["name"].removeprefix("K = ")): r for r in rows if r["name"].startswith("K = ")}
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for key, style, color, label in (
        ("forwards", "o:", "C3", "in forward passes"),
        ("speedup", "o-", "C0", "measured, in time"),
    ):
        axes.plot([*fixed], [row[key] for row in fixed.values()], style, color=color, label=label)
    axes.axhline(1, color="0.3", linestyle=":", linewidth=1, label="plain")
    for row in rows:
        if row["name"] in ("auto", "lookup"):
            color = "C1" if row["name"] == "auto" else "C2"
            axes.axhline(row["speedup"], color=color, linewidth=1, label=row["name"])
    axes.set(xlabel="drafted tokens a round, K", ylabel="speed-up over plain decoding")
    axes.set(xticks=[*fixed], ylim=(0, None))
    axes.legend()
    figure.savefig(path, dpi=150)


def main(output: Annotated[Path, typer.Argument(help="File of the picture.")]) -> None:
    """Draw the JSON object on standard input."""
    draw(json.load(sys.stdin)["rows"], output)


if __name__ == "__main__":
    typer.run(main)
