"""The command line's `models`: what is under weights/."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from .inspection import Listed, list_models
from .options import OUTPUT
from .terminal import note, printable

if TYPE_CHECKING:
    from rich.table import Table


def models(
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print a JSON object a line instead.", rich_help_panel=OUTPUT),
    ] = False,
) -> None:
    """List the models under weights/: family, size, stored types, and the drafts that fit each."""
    found = list_models()
    if as_json:
        for model in found:
            print(json.dumps(dataclasses.asdict(model) | {"folder": str(model.folder)}))
    elif found:
        from .terminal_view import console  # rich takes time to import

        out = console()
        if not out.is_terminal:  # a row is a line there, however long
            out.width = 1000
        out.print(table(found))
    else:
        note("no models under weights/; to convert one: python convert.py --model NAME_OR_PATH")


def table(found: Sequence[Listed]) -> Table:
    """A row for each model."""
    from rich.table import Table

    shown = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for name in ("model", "family", "parameters", "stored as", "on disk", "drafts that fit"):
        right = name in ("parameters", "on disk")
        shown.add_column(name, justify="right" if right else "left")
    for model in found:
        name, size = printable(model.folder.name), f"{model.size / 1e6:,.1f} MB"
        if model.error:
            shown.add_row(name, "-", "-", "-", size, f"cannot be loaded: {printable(model.error)}")
            continue
        shown.add_row(
            name, model.family, f"{model.num_parameters / 1e6:,.1f} M", ", ".join(model.stored),
            size, ", ".join(map(printable, (*model.drafts, "lookup"))),
        )  # fmt: skip
    return shown
