"""What agreement says about decoding, against the rounds of the loop itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from speculative_t5.decoding import (
    FixedSchedule,
    ModelInfo,
    Plan,
    Request,
    Round,
    RowOptions,
    Verifier,
    decode,
)
from speculative_t5.decoding.drafters import Draft
from speculative_t5.distill import Agreement, training

import mlx.core as mx
import numpy as np
import pytest
from conftest import EOS

START, WRONG, FIRST = 0, 2, 3
Row = tuple[bool, ...]


class OneOutput:
    """A target with one output, and what takes the place of its session."""

    ends = frozenset([EOS])
    info = ModelInfo(WRONG + 1, EOS, ends, ends, is_decoder_only=False, max_source_length=512)

    def __init__(self, output: Sequence[int]) -> None:
        self._output = [*output, *[EOS] * 20]  # a draft may go on after the end
        self._length = 0

    def start(self, prompts: Any, *, width: int | None = None) -> tuple[Any, list[list[int]]]:
        return self, [[START]]

    def truncate(self, lengths: Sequence[int]) -> None:
        (self._length,) = lengths

    def step_argmax(self, tokens: mx.array, vocab_size: int | None = None) -> mx.array:
        """Answer with the tokens of the output, whatever was drafted."""
        first, self._length = self._length, self._length + tokens.shape[1]
        return mx.array([self._output[first : self._length]], dtype=mx.int32)


class OftenRight:
    """A drafter that drafts an output's tokens, wrong ones where a row says so."""

    def __init__(self, output: Sequence[int], row: Row) -> None:
        drafted = [token if right else WRONG for token, right in zip(output, row, strict=True)]
        self._drafted = [*drafted, *[WRONG] * 20]

    def start(self, prompts: Any) -> None:
        pass

    def propose(self, contexts: list[list[int]], num_draft: int, *_: Any) -> Draft:
        done = len(contexts[0]) - 1
        tokens = mx.array([self._drafted[done : done + num_draft]], dtype=mx.int32)
        return Draft(tokens.reshape(1, num_draft), [num_draft])

    def replace(self, rows: Any, prompts: Any) -> None:
        pass

    select: Any = replace


def rounds_of(row: Row, num_draft: int, *, to_limit: bool = False) -> Iterator[Round]:
    """Decode an output of as many tokens as a row, to its EOS or to a limit of tokens."""
    output = list(range(FIRST, FIRST + len(row)))
    if not to_limit:
        output[-1] = EOS
    plan = Plan(OftenRight(output, row), FixedSchedule(num_draft), Verifier())
    options = RowOptions(max_tokens=len(row) if to_limit else 40)
    target: Any = OneOutput(output)
    done = list(decode(target, [Request(0, [FIRST, EOS], options)], plan, batch_size=1))
    assert done[-1].output == (output if to_limit else output[:-1])
    yield from done


def some_rows(count: int) -> list[Row]:
    rng = np.random.default_rng(5)
    return [
        tuple((rng.random(rng.integers(1, 30)) < rate).tolist())
        for rate in rng.choice([0.0, 0.5, 0.8, 0.95, 1.0], count)
    ]


SHORT = [row for length in (1, 2, 3, 4) for row in product([False, True], repeat=length)]


@pytest.mark.parametrize("to_limit", [False, True])
def test_the_loop_takes_as_many_passes(to_limit: bool) -> None:
    cases = [(row, k) for row in SHORT for k in range(1, 9)]
    cases += [(row, 1 + i % 8) for i, row in enumerate(some_rows(60))]
    for row, num_draft in cases:
        rounds = list(rounds_of(row, num_draft, to_limit=to_limit))
        expected = len(row) / len(rounds)
        assert Agreement([row]).tokens_per_pass(num_draft) == expected, (row, num_draft)


@pytest.mark.parametrize("num_draft", [1, 3, 8])
def test_the_loop_accepts_as_often_at_each_place(num_draft: int) -> None:
    rows = some_rows(40)
    reached, passed = np.zeros(num_draft), np.zeros(num_draft)
    for row in rows:
        left = len(row)
        for done in rounds_of(row, num_draft):
            emitted = done.stats.emitted - (len(row) - left)
            places = np.arange(num_draft)
            reached += (places <= done.num_accepted) & (places < left)
            passed += places < done.num_accepted
            left -= emitted
    np.testing.assert_array_equal(Agreement(rows).by_place(num_draft), passed / reached)


def test_figures_of_a_row_worked_by_hand() -> None:
    found = Agreement([[True, True, False, True, False, False]])
    assert found.rate == 3 / 6 and found.num_tokens == 6
    assert [found.tokens_per_pass(k) for k in (1, 2, 8)] == [6 / 4, 6 / 3, 6 / 3]
    # Rounds of 3, 2 and 1 tokens: right right wrong, right wrong, wrong.
    assert found.by_place(3) == [2 / 3, 1 / 2, 0.0]


def test_places_that_no_draft_came_to_are_left_out() -> None:
    assert Agreement([[False, False]]).by_place(4) == [0.0]
    assert Agreement([[True, True]]).by_place(4) == [1.0, 1.0]


@pytest.mark.parametrize("rows", [[], [[]]])
def test_without_tokens_all_figures_are_0(rows: list[list[bool]]) -> None:
    found = Agreement(rows)
    assert (found.rate, found.tokens_per_pass(5), found.by_place(5)) == (0.0, 0.0, [])


@pytest.mark.parametrize("bug", ["next token right", "one more"])
def test_planted_bugs_show(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = training._runs
    if bug == "one more":
        monkeypatch.setattr(training, "_runs", lambda row: [run + 1 for run in runs(row)])
    else:  # the target's own token need not be one that the draft has right
        monkeypatch.setattr(
            training, "_runs", lambda row: [run or int(any(row)) for run in runs(row)]
        )
    with pytest.raises(AssertionError):
        test_the_loop_takes_as_many_passes(False)
