"""Draw folders with tokenizers as people save them, and compare ids and texts with transformers.

Six classes, saved by transformers or written by hand as its older versions did, with tokens added
in every way. Prints what differs, and how many folders are the same; exit code 1 if any differ.
"""

import sys
import tempfile
import warnings
from pathlib import Path
from typing import Annotated

import typer

REPOSITORY = Path(__file__).parents[2]


def main(
    count: Annotated[int, typer.Option(help="How many folders.", min=1)] = 2000,
    first: Annotated[int, typer.Option(help="The seed of the first.")] = 0,
) -> None:
    """Compare; about 20 folders a second."""
    sys.path[:0] = [str(REPOSITORY / "tests"), str(REPOSITORY / "scripts")]
    import transformers
    from tokenizer_folders import differences, draw_folder, draw_texts

    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    different = 0
    with tempfile.TemporaryDirectory() as root:
        for seed in range(first, first + count):
            drawn = draw_folder(seed, Path(root))
            if found := differences(drawn.folder, draw_texts(seed)):
                different += 1
                print(f"{seed} ({drawn.kind}, {drawn.form}): {found[0]}")
    print(f"{count - different:,} folders of {count:,} are the same")
    raise typer.Exit(bool(different))


if __name__ == "__main__":
    typer.run(main)
