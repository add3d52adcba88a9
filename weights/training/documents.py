"""The plain text that decoder-only pairs are trained on."""

import lzma
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
OWN_TEXT = (
    "README.md",
    "docs/*.md",
    "speculative_t5/**/*.py",
    "scripts/**/*.py",
    "weights/training/**/*.py",
)
MAX_READ = 4_000_000  # characters of a file: a minute of training does not get through more
HELD_OUT = 0.05  # of the characters
HELD_OUT_FILE = "held-out.txt"


def own_text() -> list[Path]:
    """Return the text files of this project."""
    return [path for pattern in OWN_TEXT for path in sorted(REPOSITORY.glob(pattern))]


def read_documents(paths: Sequence[Path], max_read: int = MAX_READ) -> list[str]:
    """Read each file, a large one only up to `max_read` characters."""
    documents = []
    for path in paths:
        opener = lzma.open if path.suffix == ".xz" else open
        try:
            with opener(path, "rt", encoding="utf-8") as file:
                documents.append(file.read(max_read))
                if file.read(1):
                    print(f"{path}: only the first {max_read:,} characters are read")
        except (EOFError, UnicodeDecodeError, lzma.LZMAError) as error:
            raise ValueError(f"{path} cannot be read as text: {error}") from error
    return documents


def split(documents: Sequence[str], share: float = HELD_OUT) -> tuple[list[str], list[str]]:
    """Split off the last `share` of the characters, at the beginning of a line."""
    left = round(sum(map(len, documents)) * (1 - share))
    for i, document in enumerate(documents):
        if left <= len(document):
            cut = document.rfind("\n", 0, left) + 1 or left
            return [*documents[:i], document[:cut]], [document[cut:], *documents[i + 1 :]]
        left -= len(document)
    return [*documents], []
