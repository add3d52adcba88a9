"""Words of random documents, each another one, so that every word can be found again."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

WORD = re.compile(r"[a-zäßéж]*\d+x")
# What of a file is to stay: a list of what is no text, and the marks of each word.
Skeleton = tuple[list[str], dict[str, str]]


@dataclass
class Words:
    """Words, each another one."""

    draw: random.Random
    count: int = 0

    def new(self) -> str:
        self.count += 1
        stem = "".join(self.draw.choices("abcdefgäßéж", k=self.draw.randint(1, 5)))
        return f"{stem}{self.count}x"
