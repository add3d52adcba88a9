"""Digests that tell models apart, without reading whole files."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

WEIGHTS = (".safetensors", ".npz", ".bin")
OTHERS = (
    "config.json", "generation_config.json", "spiece.model", "spm.model", "tokenizer.json",
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt",
)  # fmt: skip
BLOCK, BLOCKS = 2**16, 64  # bytes, and how many of each file are read


def digest_of(folder: Path) -> str:
    """Return a short hexadecimal digest of a model folder: of samples of each file of weights.

    The configuration and the tokenizer are in it, too. Any other weights have another one, as
    training moves nearly all numbers; to change a few bytes of a file by hand may go unseen.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.is_file() and (path.suffix in WEIGHTS or path.name in OTHERS):
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                digest.update(f"{path.name} {size}\n".encode())
                last = max(0, size - BLOCK)
                for i in range(BLOCKS if last else 1):
                    file.seek(last * i // (BLOCKS - 1))
                    digest.update(file.read(BLOCK))
    return digest.hexdigest()[:16]
