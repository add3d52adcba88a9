"""The check `sampling`: whether sampled outputs follow the target's own distribution."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from ..decoding import Sampler
from ..generation import SpeculativeDecoder
from ..models import T5
from . import tiny
from .findings import Finding, Subject

COUNT = 4000  # outputs of each kind
MAX_TOKENS, VOCAB_SIZE = 3, 5
LEAST_EXPECTED = 5.0  # outputs of a cell of the test; rarer ones are counted together
LEAST_P = 1e-6
PROMPT = [3, 4, 2, 3, 3, 2, 4, 1]  # it repeats itself, for a lookup to copy from
KINDS: dict[str, dict[str, Any]] = {
    "draft, token rule": {"draft_model": True, "verify": "token"},
    "draft, block rule": {"draft_model": True, "verify": "block"},
    "lookup, block rule": {"draft_model": False, "verify": "block"},
}


def sampling(subject: Subject) -> Finding:
    """Test sampled outputs of a tiny model against their distribution, which is enumerated.

    The seed is fixed: on the same machine the result is always the same.
    """
    target, draft = (
        tiny.t5(seed=seed, d_model=16, d_kv=8, d_ff=16, num_heads=2, vocab_size=VOCAB_SIZE)
        for seed in (1, 2)
    )
    expected = distribution(target)
    values = {
        kind: p_value(*chi_square(_sampled(target, draft, **options), expected))
        for kind, options in KINDS.items()
    }
    details = {"outputs": COUNT, "p_values": values, "least_p": LEAST_P}
    worst = min(values, key=lambda kind: values[kind])
    if values[worst] < LEAST_P:
        reason = (
            f"outputs are not distributed as the target's own ({worst}): chi-square of {COUNT} "
            f"outputs, p = {values[worst]:.0e}"
        )
        return Finding("sampling", "failed", reason, details=details)
    reason = (
        f"{COUNT} outputs each of {len(KINDS)} kinds follow the target's distribution "
        f"(chi-square, smallest p {values[worst]:.2f})"
    )
    return Finding("sampling", "ok", reason, details=details)


def _sampled(target: T5, draft: T5, *, draft_model: bool, verify: Any) -> Counter[tuple[int, ...]]:
    decoder = SpeculativeDecoder(
        target, draft if draft_model else "lookup", num_draft=2, verify=verify
    )
    outputs = decoder.generate_batch(
        [PROMPT] * COUNT, batch_size=COUNT, temperature=1.0, max_tokens=MAX_TOKENS
    )
    return Counter((*out.tokens, *[tiny.EOS] * (out.finish_reason == "eos")) for out in outputs)


def distribution(model: T5) -> dict[tuple[int, ...], float]:
    """Return the probability of every output of at most MAX_TOKENS tokens, EOS included."""
    masses: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(MAX_TOKENS):
        extended: dict[tuple[int, ...], float] = {}
        for prefix, mass in masses.items():
            if prefix[-1:] == (tiny.EOS,):
                extended[prefix] = mass
                continue
            logits = model(mx.array([PROMPT]), mx.array([[0, *prefix]]))[0, -1]
            probs = np.array(Sampler(1.0).probs(logits), np.float64)
            for token, p in enumerate(probs / probs.sum()):
                extended[*prefix, token] = mass * float(p)
        masses = extended
    return masses


def chi_square(
    seen: Mapping[tuple[int, ...], int], expected: Mapping[tuple[int, ...], float]
) -> tuple[float, int]:
    """Return Pearson's statistic and its degrees of freedom.

    Outputs that are expected less often than LEAST_EXPECTED times make one cell, which joins the
    smallest of the others if it is too small itself.
    """
    total = sum(seen.values())
    cells: list[list[float]] = []
    rare = [0.0, 0.0]
    for output in expected.keys() | seen.keys():
        mass, count = total * expected.get(output, 0.0), float(seen.get(output, 0))
        if mass < LEAST_EXPECTED:
            rare = [rare[0] + mass, rare[1] + count]
        else:
            cells.append([mass, count])
    if cells and rare[0] < LEAST_EXPECTED:
        smallest = min(cells)
        smallest[:] = smallest[0] + rare[0], smallest[1] + rare[1]
    elif rare[0]:
        cells.append(rare)
    return sum((count - mass) ** 2 / mass for mass, count in cells), len(cells) - 1


def p_value(statistic: float, freedom: int) -> float:
    """Return the chance of a chi-square of at least that much (Wilson and Hilferty, 1931)."""
    spread = 2 / (9 * freedom)
    z = ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
    return math.erfc(z / math.sqrt(2)) / 2
