"""The plot of a benchmark; it needs matplotlib."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .benchmark import PLAIN, Report


def draw(reports: Sequence[Report], path: Path) -> None:
    """Plot speed-up, in time and in forward passes, and theory against drafted tokens."""
    fixed = [(int(r.name.removeprefix("K = ")), r) for r in reports if r.name.startswith("K = ")]
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    ks = [k for k, _ in fixed]
    axes.plot(ks, [r.forwards for _, r in fixed], "o:", color="C3", label="in forward passes")
    axes.plot(ks, [r.theory for _, r in fixed], "o--", color="0.55", label="theory, in time")
    axes.plot(ks, [r.speedup for _, r in fixed], "o-", color="C0", label="measured, in time")
    axes.axhline(1, color="0.3", linestyle=":", linewidth=1, label=PLAIN)
    for name, color in (("auto", "C1"), ("lookup", "C2")):
        for report in (r for r in reports if r.name == name):
            axes.axhline(report.speedup, color=color, linewidth=1, label=name)
    axes.set(xlabel="drafted tokens a round, K", ylabel=f"speed-up over {PLAIN} decoding",
             xticks=ks, ylim=(0, None))  # fmt: skip
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def pyplot() -> Any:
    """Return `matplotlib.pyplot` for plots to files; refuse them if it is missing."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError(
            "--plot needs matplotlib, which is not installed: run pip install matplotlib"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def check_plot(path: Path) -> None:
    """Refuse, before a run, a path that `draw` could not write to."""
    kinds = pyplot().FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in kinds or path.is_dir():
        raise ValueError(f"the plot cannot be written to {path}: give a name that ends in .png")
    if not path.parent.is_dir():
        raise ValueError(f"the plot cannot be written to {path}: create the folder {path.parent}")
