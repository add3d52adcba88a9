"""The plot of a training run; needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..bench import pyplot, save_figure


def draw(history: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Plot the loss and the tokens per pass on held-out prompts against steps.

    Args:
        history: Records with a "step", its "loss" and "tokens_per_pass", which is 0.0 if there were
            no held-out outputs.
        path: The file to write, whose name says its kind.

    Raises:
        ValueError: If there are no records, matplotlib is missing, or the name has no known kind.
    """
    if not history:
        raise ValueError("there is nothing to plot: no step was recorded; train for more steps")
    plt = pyplot()
    figure, left = plt.subplots(figsize=(6, 4), layout="constrained")
    right = left.twinx()
    steps = [record["step"] for record in history]
    losses = [record["loss"] for record in history]
    checked = [record for record in history if record["tokens_per_pass"]]  # 0.0: no outputs
    dot = {"marker": "o", "markersize": 3}
    (loss,) = left.plot(steps, losses, color="C0", **dot)
    (tokens,) = right.plot(
        [record["step"] for record in checked],
        [record["tokens_per_pass"] for record in checked],
        color="C1", **dot,
    )  # fmt: skip
    left.set_xlabel("steps")
    for axes, line, name, least in (
        (left, loss, "loss per token", 0),
        (right, tokens, "tokens per pass, held-out prompts", 1),
    ):
        axes.set_ylabel(name, color=line.get_color())
        axes.tick_params(axis="y", labelcolor=line.get_color())
        axes.set_ylim(bottom=least)
        axes.spines["top"].set_visible(False)
    left.set_xlim(left=0)
    left.locator_params(axis="x", integer=True)
    left.grid(axis="x", color="0.9")
    right.set_visible(bool(checked))
    save_figure(figure, path)
