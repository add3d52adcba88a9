"""Show what a corrector changes in documents, for a reader to judge.

    python scripts/checks/changes_made.py README.md manual.html --model correct-base

Documents are read and guarded as `correct` does it, and nothing is written. Each sentence that
would be changed is shown before and after it; then come the numbers of all, by documents, and the
reasons for which others are left as they are.
"""

from collections import Counter
from pathlib import Path
from typing import Annotated

from speculative_t5 import SpeculativeDecoder
from speculative_t5.documents import Document, Piece, RewriteOptions, read_file

import mlx.core as mx
import typer


def main(
    files: Annotated[list[Path], typer.Argument(help="Documents.")],
    model: Annotated[str, typer.Option(help="Model to try.")] = "correct-base",
    reasons: Annotated[int, typer.Option(help="Of the reasons, how many are shown.")] = 0,
) -> None:
    """Show what a corrector changes in documents."""
    decoder = SpeculativeDecoder.from_pretrained(model, None, dtype=mx.float32)
    found = {path: pieces_of(decoder, path) for path in files}
    for path, pieces in found.items():
        changed = [each for each in pieces if each.source != each.output]
        print(f"{path.name}: {len(changed)} of {len(pieces)} sentences change")
        for each in changed:
            before, after = (" ".join(text.split()) for text in (each.source, each.output))
            print(f"  {before}\n> {after}")
    pieces = [each for some in found.values() for each in some]
    total = sum(each.source != each.output for each in pieces)
    print(f"{total} of {len(pieces)} change, {1000 * total / max(1, len(pieces)):.1f} in 1,000")
    left = Counter(each.reason for each in pieces if each.reason)
    for reason, count in left.most_common(reasons):
        print(f"{count:4} {reason}")


def pieces_of(decoder: SpeculativeDecoder, path: Path) -> list[Piece]:
    """Return what is made of the sentences of a document."""
    form = read_file(path.read_bytes(), path.name)
    document = Document(decoder, form.text, RewriteOptions(), form.lines)
    return sorted(document.settled(document.rewrite()), key=lambda piece: piece.start)


if __name__ == "__main__":
    typer.run(main)
