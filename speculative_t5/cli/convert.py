"""The command `convert`, which convert.py runs as well: a model folder of a checkpoint."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from tqdm import tqdm

from .. import checkpoints
from ..errors import escaped
from ..options import option
from .options import with_options
from .terminal import note


@dataclass(frozen=True)
class ConvertOptions:
    """The keywords of `convert`."""

    model: str | None = option(None, "The same, as an option.")
    dtype: str | None = option(
        None,
        f"Type to store: {', '.join(checkpoints.DTYPES)}.",
        shown="the checkpoint's; bfloat16 for float32 matrices that --quantize leaves out",
    )
    quantize: int | None = option(None, "Quantize matrices to 4 or 8 bits.")
    group_size: int = option(64, "Weights that share a scale when quantized: 32, 64 or 128.")
    keep_wo: bool | None = option(
        None, "Leave the feed-forward's second matrix unquantized.", shown="in gated models"
    )
    dequantize: bool = option(
        False, "Write what the bits of a quantized model stand for, in its scales' type."
    )
    encoder_only: bool = option(
        False, "Leave the decoder out: what is written makes vectors of texts, see Encoder."
    )
    format: str | None = option(
        None,
        "npz, this package's own, or safetensors, with Hugging Face's names, for other programs.",
        shown="npz; safetensors with --upload-repo",
    )
    upload_repo: str | None = option(
        None, "Repository on the Hub to upload the folder to, such as me/t5-small-8bit."
    )
    adapter: str | None = option(
        None,
        "LoRA adapter of PEFT to merge first: a folder or a name; alone, into the model it names.",
    )
    output: Path | None = option(
        None,
        "Folder to write.",
        shown="weights/<name> in a checkout, else in the user's data folder",
    )
    revision: str | None = option(None, "Branch, tag or commit on the Hub.")
    force: bool = option(False, "Replace an existing model folder.")
    allow_nonfinite: bool = option(False, "Convert even if some weights are NaN or infinite.")


@with_options
def convert(
    checkpoint: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="Checkpoint folder, converted or not, or a name on the Hugging Face Hub.",
        ),
    ] = None,
    *,
    options: Annotated[dict[str, Any], ConvertOptions],
    only_inspect: bool = option(
        False, "Show what the checkpoint is, and which models here can draft for it; write nothing."
    ),
) -> None:
    """Convert a Hugging Face T5 checkpoint to a model folder."""
    given = [name for name in (checkpoint, options.pop("model")) if name is not None]
    if not given and options["adapter"]:
        given = [options["adapter"]]
    if len(given) != 1:
        raise ValueError(
            f"convert takes one checkpoint, got {len(given)}: give the path of its folder, or a "
            "name such as google/flan-t5-small"
        )
    (model,) = given
    if only_inspect:
        inspected = checkpoints.inspect(
            model, adapter=options["adapter"], revision=options["revision"]
        )
        print("\n".join(map(escaped, checkpoints.as_listing(inspected))))
        return
    # Not before the first bytes: a refusal stays one line.
    with tqdm(
        desc="converting", unit="B", unit_scale=True, disable=None, delay=1e-3, mininterval=0
    ) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        folder = checkpoints.convert(model, **options, note=note, progress=show)
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{escaped(str(folder))} ({size / 1e6:.1f} MB)")
