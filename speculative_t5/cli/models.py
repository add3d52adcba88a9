"""The command `models`: which models can be used by name."""

import json
import shutil
import sys
from collections.abc import Iterator, Sequence

from ..checkpoints import Listed, dtype_name, how_to_convert, list_models
from ..errors import escaped
from .options import output_option, with_options
from .terminal import columns, is_terminal, note, one_line


@with_options
def models(
    as_json: bool = output_option(False, "Print one JSON object per line instead of the table."),
) -> None:
    """List the models on this machine: family, size, stored types, and the drafts that fit each."""
    found = list_models()
    if as_json:
        for model in found:
            record = vars(model) | {"folder": str(model.folder)}
            del record["vocabulary"]
            if model.default_type:
                dtype, reason = model.default_type
                record["default_type"] = {"dtype": dtype_name(dtype), "reason": reason}
            print(json.dumps(record))
    elif found:
        print("\n".join(map(escaped, as_lines(found))))
    else:
        note(f"there are no models on this machine; to convert one: {how_to_convert()}")


def as_list(names: Sequence[str], row: Sequence[str]) -> Iterator[str]:
    """Yield the lines of a row of a table that is too wide for the terminal."""
    yield row[0]
    for name, cell in zip(names[1:], row[1:], strict=True):
        if cell:
            yield f"  {name}: {cell}"


def as_lines(found: Sequence[Listed]) -> Iterator[str]:
    """Yield a line for each model that can be loaded, then one for each that cannot."""
    names = (
        "model",
        "family",
        "parameters",
        "stored as",
        "computes in",
        "on disk",
        "drafts that fit",
    )
    rows = [
        (
            one_line(model.folder.name),
            f"draft for {one_line(model.draft_for)}" if model.draft_for else model.family,
            f"{model.num_parameters / 1e6:,.1f} M",
            ", ".join(model.stored),
            dtype_name(model.default_type.dtype) if model.default_type else "the other's type",
            f"{model.size / 1e6:,.1f} MB",
            ", ".join(map(one_line, (*model.drafts, "lookup"))) if model.vocabulary else "",
        )
        for model in found
        if model.family
    ]
    table = columns([names, *rows], right=(2, 5))
    if is_terminal(sys.stdout) and max(map(len, table)) > shutil.get_terminal_size().columns:
        table = [line for row in rows for line in as_list(names, row)]
    yield from table
    for dtype, reason in dict.fromkeys(model.default_type for model in found if model.default_type):
        yield f"{dtype_name(dtype)}: {reason}"
    for model in found:
        if model.error:
            yield f"{one_line(model.folder.name)} cannot be loaded: {one_line(model.error)}"
