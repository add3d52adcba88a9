"""Batches of labelled prompts, in an order that follows from the seed alone."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import mlx.core as mx

from .labels import Label

POOL = 2048  # examples that are sorted by length together


@dataclass(frozen=True)
class Batch:
    """Labelled prompts, padded.

    Attributes:
        sources: (B, S) int32.
        source_mask: (B, S) bool, True at real tokens.
        fed: What the decoder reads, the start token and then all labels but the last, (B, L) int32.
        places: Where `fed` is real, as indices of the flattened (B * L,) array, (P,) int32.
        labels: The token after each of these, (P,) int32.
    """

    sources: mx.array
    source_mask: mx.array
    fed: mx.array
    places: mx.array
    labels: mx.array


def make_batch(examples: Sequence[Label], start: int, pad: int) -> Batch:
    """Pad examples to one batch; `start` is the id that the decoder's input begins with."""
    sources = [example.prompt for example in examples]
    fed = [[start, *example.tokens[:-1]] for example in examples]
    width, length = max(map(len, sources)), max(map(len, fed))
    places = [row * length + place for row, ids in enumerate(fed) for place in range(len(ids))]
    return Batch(
        mx.array([ids + [pad] * (width - len(ids)) for ids in sources], dtype=mx.int32),
        mx.array([[True] * len(ids) + [False] * (width - len(ids)) for ids in sources]),
        mx.array([ids + [pad] * (length - len(ids)) for ids in fed], dtype=mx.int32),
        mx.array(places, dtype=mx.int32),
        mx.array([token for example in examples for token in example.tokens], dtype=mx.int32),
    )


def group(examples: Sequence[Label], batch_tokens: int) -> list[list[Label]]:
    """Group examples of similar length, at most `batch_tokens` tokens a group, padding included.

    An example that has more makes a group of its own.
    """
    ordered = sorted(examples, key=lambda each: (len(each.prompt), len(each.tokens), each.line))
    groups: list[list[Label]] = []
    width = length = 0
    for example in ordered:
        width, length = max(width, len(example.prompt)), max(length, len(example.tokens))
        if not groups or (len(groups[-1]) + 1) * (width + length) > batch_tokens:
            groups.append([])
            width, length = len(example.prompt), len(example.tokens)
        groups[-1].append(example)
    return groups


def batches(
    examples: Sequence[Label], batch_tokens: int, seed: int, first: int = 0
) -> Iterator[list[Label]]:
    """Yield groups of examples without end, epoch by epoch, from the group number `first` on.

    An epoch's order depends on its number and the seed only, so that a run can be resumed anywhere.
    """
    for epoch in count():
        rng = random.Random(f"{seed} {epoch}")
        shuffled = rng.sample(examples, len(examples))
        pools = (shuffled[start : start + POOL] for start in range(0, len(shuffled), POOL))
        groups = [each for pool in pools for each in group(pool, batch_tokens)]
        rng.shuffle(groups)
        yield from groups[first:]
        first = max(0, first - len(groups))
