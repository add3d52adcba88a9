"""The command `models`: which models can be used by name."""

import dataclasses
import json
from collections.abc import Iterator, Sequence

from ..checkpoints import Listed, convert_command, list_models
from .options import in_output, with_options
from .terminal import columns, note, one_line


@with_options
def models(
    as_json: bool = in_output(False, "Print one JSON object per line instead of the table."),
) -> None:
    """List the models on this machine: family, size, stored types, and the drafts that fit each."""
    found = list_models()
    if as_json:
        for model in found:
            record = dataclasses.asdict(model) | {"folder": str(model.folder)}
            del record["vocabulary"]
            print(json.dumps(record))
    elif found:
        print("\n".join(as_lines(found)))
    else:
        note(f"there are no models on this machine; to convert one: {convert_command()}")


def as_lines(found: Sequence[Listed]) -> Iterator[str]:
    """Yield a line for each model that can be loaded, then one for each that cannot."""
    names = ("model", "family", "parameters", "stored as", "on disk", "drafts that fit")
    rows = [
        (
            one_line(model.folder.name),
            f"draft for {one_line(model.draft_for)}" if model.draft_for else model.family,
            f"{model.num_parameters / 1e6:,.1f} M",
            ", ".join(model.stored),
            f"{model.size / 1e6:,.1f} MB",
            "" if model.draft_for else ", ".join(map(one_line, (*model.drafts, "lookup"))),
        )
        for model in found
        if model.family
    ]
    yield from columns([names, *rows], right=(2, 4))
    for model in found:
        if model.error:
            yield f"{one_line(model.folder.name)} cannot be loaded: {one_line(model.error)}"
