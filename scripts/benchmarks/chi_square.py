"""Pearson's chi-square test of counts against a distribution."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

MIN_EXPECTED = 5.0  # expected count of a cell; rarer ones are pooled


@dataclass(frozen=True)
class Fit:
    statistic: float
    freedom: int
    p_value: float


def fit(counts: np.ndarray, probabilities: np.ndarray) -> Fit:
    """Test whether counts (N,) are a sample of probabilities (N,).

    Cells that expect less than `MIN_EXPECTED` are pooled, with the next larger ones if that is
    not enough.
    """
    order = np.argsort(probabilities)
    expected = probabilities[order] * counts.sum()
    rare = int(np.searchsorted(expected, MIN_EXPECTED))
    while 0 < rare < len(expected) and expected[:rare].sum() < MIN_EXPECTED:
        rare += 1
    starts = np.array([0, *range(max(rare, 1), len(expected))])
    expected = np.add.reduceat(expected, starts)
    seen = np.add.reduceat(counts[order], starts)
    statistic = float(((seen - expected) ** 2 / expected).sum())
    return Fit(statistic, len(starts) - 1, chi_square_tail(statistic, len(starts) - 1))


def chi_square_tail(statistic: float, freedom: int) -> float:
    """Return the probability that chi-square with `freedom` degrees of freedom is larger.

    Q(a + 1, y) = Q(a, y) + y^a e^-y / Gamma(a + 1), starting at a = 1 or 1/2.
    """
    if freedom < 1:
        return 1.0
    y, a = statistic / 2, (2 - freedom % 2) / 2
    tail = math.exp(-y) if a == 1 else math.erfc(math.sqrt(y))
    while a < freedom / 2:
        tail += math.exp(a * math.log(y) - y - math.lgamma(a + 1)) if y else 0.0
        a += 1
    return min(tail, 1.0)
