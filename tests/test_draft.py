"""Drafters: lookups, a model that follows the context, and both combined."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import Mock

from speculative_t5 import SpeculativeDecoder
from speculative_t5.decoding.drafters import CombinedDrafter, Draft, LookupDrafter, ModelDrafter
from speculative_t5.decoding.lookup import Lookup

import mlx.core as mx
import pytest
from conftest import GREEDY, tiny_draft, tiny_model

EOS = 1


def found(source: str, output: str, sizes: tuple[int, int] = (1, 8)) -> str:
    """Return the proposal, with words as tokens; "." is the end of the source."""
    words = sorted(set(f"{source} {output}".split()))
    ids = {word: i for i, word in enumerate(words)}
    first, second = ([ids[word] for word in text.split()] for text in (source, output))
    return " ".join(words[i] for i in Lookup(first, *sizes).propose(second, 9))


TWICE = "k a b 1 a b 2 ."


@pytest.mark.parametrize(
    ("source", "output", "expected", "options"),
    [
        # Tokens that followed in the source, and after a token that replaces one of the source.
        ("I has a red car .", "I", "has a red car .", {}),
        ("I has a red car .", "I have", "a red car .", {}),
        ("I has a red car .", "I do have", "", {}),
        # The longest match comes first; cut at two tokens both are as long, and the place decides.
        (TWICE, "k a b", "1 a b 2 .", {}),
        (TWICE, "k k k k a b", "2 .", {"sizes": (1, 2)}),
        # The output so far is looked up, too: a longer match beats the source's.
        ("a 9 .", "a 1 a 2 a", "9 .", {}),
        ("a 9 .", "k a 1 k a", "1 k a", {}),
        # Shorter matches than min_ngram are ignored.
        ("x a y .", "a", "", {"sizes": (2, 8)}),
        ("x a y .", "x a", "y .", {"sizes": (2, 8)}),
    ],
)
def test_lookups(source: str, output: str, expected: str, options: Any) -> None:
    assert found(source, output, **options) == expected


def lookup() -> LookupDrafter:
    special = frozenset({0, EOS, 7})
    return LookupDrafter(replace(tiny_model().info, special_tokens=special))


def test_ragged_rows_are_padded_with_zero_rows_of_q() -> None:
    drafter = lookup()
    drafter.start([[3, 4, 5, EOS], [8, 9, 3, EOS], [4, EOS]])
    draft = drafter.propose([[0, 3]] * 3, 5, GREEDY, None)
    assert draft.tokens.tolist() == [[4, 5, EOS], [EOS, 0, 0], [0, 0, 0]]
    assert draft.lengths == [3, 1, 0]
    probs = draft.dense(10)
    assert probs[0].tolist() == [[i == t for i in range(10)] for t in (4, 5, EOS)]
    assert mx.sum(probs[1]).item() == 1
    drafter.select([2, 0])
    assert drafter.find([[0, 3]] * 2, 5, [[], []]) == [[], [4, 5, EOS]]
    drafter.start([[3, 4, 7, 5, EOS], [3, 0, 4, EOS]])
    assert drafter.find([[0, 3]] * 2, 5, [[], []]) == [[4], []], "no special token but EOS"
    drafter.start([[EOS]])
    assert drafter.propose([[0, 3]], 5, GREEDY, None).tokens.shape == (1, 0)


@pytest.mark.parametrize("lengths", [[5, 0], [3, 0, 0, 2], [1, 4, 0]])
def test_a_draft_does_not_depend_on_rejected_tokens(lengths: list[int]) -> None:
    """Some rounds draft nothing, and rows accept different numbers of tokens."""
    target = tiny_model(vocab_size=20, layers=2, seed=3)
    drafter, fresh = (ModelDrafter(tiny_draft(target), 20) for _ in range(2))
    prompts = [[5, 6, 7, 8, 9, EOS], [5, 9, EOS], [12, 13, EOS]]
    outputs = [SpeculativeDecoder(target).generate(p, max_tokens=60).tokens for p in prompts]
    contexts = [[0] for _ in prompts]
    drafter.start(prompts)
    accepted = set()
    for round_ in range(10):
        num_draft = lengths[round_ % len(lengths)]
        draft = drafter.propose(contexts, num_draft, GREEDY, None).tokens.tolist()
        fresh.start(prompts)
        assert draft == fresh.propose(contexts, num_draft, GREEDY, None).tokens.tolist()
        for context, tokens, output in zip(contexts, draft, outputs, strict=True):
            rest = output[len(context) - 1 :]
            n = next((i for i, t in enumerate(tokens) if t != rest[i]), num_draft)
            context += rest[: n + 1]
            accepted.add(n)
    assert len(accepted) > 1


def test_a_combined_draft_is_the_models_and_then_the_lookups() -> None:
    model = tiny_draft(tiny_model(vocab_size=20, layers=2, seed=3))
    alone, other = (ModelDrafter(model, 20) for _ in range(2))
    prompts = [[5, 6, 7, 8, 9, EOS], [5, 9, EOS]]
    alone.start(prompts)
    own = alone.propose([[0], [0]], 3, GREEDY, None).tokens.tolist()
    # Let the first row's source hold what the model drafts last, and something after it.
    prompts[0] = [5, own[0][-1], 12, 13, 14, 15, EOS]
    alone.start(prompts)
    own = alone.propose([[0], [0]], 3, GREEDY, None).tokens.tolist()
    both = CombinedDrafter(other, lookup())
    both.start(prompts)
    draft = both.propose([[0], [0]], 3, GREEDY, None)
    assert [row[:3] for row in draft.tokens.tolist()] == own
    look = lookup()
    look.start(prompts)
    after = look.find([[0], [0]], 3, own)
    assert max(map(len, after)) > 0
    assert draft.lengths == [
        3 + (0 if EOS in row else len(more)) for row, more in zip(own, after, strict=True)
    ]
    assert both.propose([[0], [0]], 0, GREEDY, None).tokens.shape == (2, 0)


def test_nothing_is_looked_up_after_a_drafted_eos() -> None:
    ending = Mock()
    ending.propose.return_value = Draft(mx.array([[3, EOS], [3, 4]]), [2, 2])
    drafter = CombinedDrafter(ending, lookup())
    drafter.start([[EOS, 8, 8, EOS], [4, 8, EOS]])
    draft = drafter.propose([[0], [0]], 2, GREEDY, None)
    assert draft.lengths == [2, 4]
    assert draft.tokens[1].tolist() == [3, 4, 8, EOS]
    drafter.start([[EOS, 8, 8, EOS], [EOS]])
    assert drafter.propose([[0], [0]], 2, GREEDY, None).tokens.shape == (2, 2), "nothing to pad for"
