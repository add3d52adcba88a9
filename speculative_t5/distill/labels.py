from dataclasses import dataclass


@dataclass(frozen=True)
class Label:
    line: int
    prompt: list[int]
    tokens: list[int]
