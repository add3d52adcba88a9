"""`doctor`: the chances and the speeds that it works out."""

from __future__ import annotations

from speculative_t5.doctor import outputs, speed

import numpy as np
import pytest


@pytest.mark.parametrize(
    ("statistic", "freedom", "p"),
    [(18.307, 10, 0.05), (3.841, 1, 0.05), (149.449, 100, 0.001), (100, 124, 0.944)],
)
def test_p_values_are_those_of_tables(statistic: float, freedom: int, p: float) -> None:
    assert outputs.p_value(statistic, freedom) == pytest.approx(p, rel=0.1)


def costs(step: float, *passes: float) -> speed.Costs:
    longer = np.interp(range(1, 18), range(1, len(passes) + 1), passes)
    return speed.Costs(dict(enumerate(longer.tolist(), start=1)), step, 1.0)


def test_the_number_of_tokens_to_draft_follows_from_costs() -> None:
    free = costs(0.0, 1.0, 1.0)
    assert speed.tokens_per_round(0.5, 2) == 1.75
    assert free.speedup(0.5, 2) == 1.75
    assert free.best(0.5) == 5, "the fewest that are nearly as fast as 16"
    assert costs(0.2, 1.0, 1.0).speedup(0.5, 2) == pytest.approx(1.75 / 1.4)
    assert costs(0.9, 1.0, 2.0).best(0.6) == 1
    assert costs(0.9, 1.0, 2.0).speedup(0.6, 1) < 1
