"""Drafters: lookups, a model that follows the context, and both combined."""

from __future__ import annotations

from speculative_t5 import SpeculativeDecoder
from speculative_t5.decoding.draft import Draft
from speculative_t5.decoding.drafters import CombinedDrafter, LookupDrafter, ModelDrafter
from speculative_t5.decoding.lookup import Lookup
from speculative_t5.decoding.sampling import Sampler

import mlx.core as mx
import pytest
from conftest import tiny_draft, tiny_model

EOS = 1


def found(source: str, output: str, num_draft: int = 9, sizes: tuple[int, int] = (1, 8)) -> str:
    """Return the proposal, with words as tokens; "." is the end of the source."""
    words = sorted(set(f"{source} {output}".split()))
    ids = {word: i for i, word in enumerate(words)}
    first, second = ([ids[word] for word in text.split()] for text in (source, output))
    return " ".join(words[i] for i in Lookup(first, *sizes).propose(second, num_draft))


def test_tokens_that_followed_in_the_source_are_drafted() -> None:
    assert found("I has a red car .", "I") == "has a red car ."
    assert found("I has a red car .", "I", num_draft=2) == "has a"
    assert found("I has a red car .", "I have a red") == "car ."


def test_a_new_token_replaces_one_of_the_source() -> None:
    assert found("I has a red car .", "I have") == "a red car ."
    assert found("I has a red car .", "I do have") == ""
    assert found("I has", "I have") == ""


def test_the_longest_match_comes_first() -> None:
    assert found("a b x b y .", "a b") == "x b y ."
    assert found("a b x b y .", "x b") == "y ."
    assert found("k a b 1 a b 2 .", "k a b") == "1 a b 2 ."
    # Cut at two tokens both match equally, and the place decides.
    assert found("k a b 1 a b 2 .", "k k k k a b", sizes=(1, 2)) == "2 ."


def test_equal_matches_go_to_the_nearest_place_in_the_source() -> None:
    source = "a 1 a 2 a 3 a 4 ."
    assert found(source, "a") == "1 a 2 a 3 a 4 ."
    assert found(source, "x x x x a") == "3 a 4 ."


def test_the_output_so_far_is_looked_up_too() -> None:
    assert found(".", "a b c a") == "b c a"
    assert found(".", "a 1 a 2 a") == "2 a"
    assert found("a 9 .", "a 1 a 2 a") == "9 ."
    assert found("a 9 .", "k a 1 k a") == "1 k a", "a longer match beats the source's"


def test_matches_shorter_than_min_ngram_are_ignored() -> None:
    assert found("x a y .", "a", sizes=(2, 8)) == ""
    assert found("x a y .", "x a", sizes=(2, 8)) == "y ."
    assert found("x a y z .", "x a q", sizes=(2, 8)) == "z ."


def test_an_empty_text_has_no_matches() -> None:
    assert Lookup([], 1, 8).propose([0], 5) == []
    assert Lookup([5, 1], 1, 8).propose([0], 5) == []


def lookup(special: tuple[int, ...] = (0, EOS, 7)) -> LookupDrafter:
    return LookupDrafter(frozenset({EOS}), frozenset(special))


def test_no_special_token_is_drafted_except_eos() -> None:
    drafter = lookup()
    drafter.start([[3, 4, 5, EOS], [3, 4, 7, 5, EOS], [3, 0, 4, EOS]])
    assert drafter.find([[0, 3]] * 3, 5) == [[4, 5, EOS], [4], []]


def test_ragged_rows_are_padded_with_zero_rows_of_q() -> None:
    drafter = lookup()
    drafter.start([[3, 4, 5, EOS], [8, 9, 3, EOS], [4, EOS]])
    draft = drafter.propose([[0, 3]] * 3, 5, None)
    assert draft.tokens.tolist() == [[4, 5, EOS], [EOS, 0, 0], [0, 0, 0]]
    assert draft.lengths == [3, 1, 0]
    probs = draft.dense(10)
    assert probs[0].tolist() == [[i == t for i in range(10)] for t in (4, 5, EOS)]
    assert mx.sum(probs[1]).item() == 1
    drafter.select([2, 0])
    assert drafter.find([[0, 3]] * 2, 5) == [[], [4, 5, EOS]]
    assert lookup_of_nothing().tokens.shape == (1, 0)


def lookup_of_nothing() -> Draft:
    drafter = lookup()
    drafter.start([[EOS]])
    return drafter.propose([[0, 3]], 5, None)


@pytest.mark.parametrize("lengths", [[5, 0], [3, 0, 0, 2], [1, 4, 0]])
def test_a_draft_does_not_depend_on_rejected_tokens(lengths: list[int]) -> None:
    """Some rounds draft nothing, and rows accept different numbers of tokens."""
    target = tiny_model(vocab_size=20, layers=2, seed=3)
    drafter, fresh = (ModelDrafter(tiny_draft(target), Sampler(), 20) for _ in range(2))
    prompts = [[5, 6, 7, 8, 9, EOS], [5, 9, EOS], [12, 13, EOS]]
    outputs = [SpeculativeDecoder(target).generate(p, max_tokens=60).tokens for p in prompts]
    contexts = [[0] for _ in prompts]
    drafter.start(prompts)
    accepted = set()
    for round_ in range(10):
        num_draft = lengths[round_ % len(lengths)]
        draft = drafter.propose(contexts, num_draft, None).tokens.tolist()
        fresh.start(prompts)
        assert draft == fresh.propose(contexts, num_draft, None).tokens.tolist()
        for context, tokens, output in zip(contexts, draft, outputs, strict=True):
            rest = output[len(context) - 1 :]
            n = next((i for i, t in enumerate(tokens) if t != rest[i]), num_draft)
            context += rest[: n + 1]
            accepted.add(n)
    assert len(accepted) > 1


def test_a_combined_draft_is_the_models_and_then_the_lookups() -> None:
    target = tiny_model(vocab_size=20, layers=2, seed=3)
    model = tiny_draft(target)

    def drafter() -> ModelDrafter:
        return ModelDrafter(model, Sampler(), 20)

    alone = drafter()
    prompts = [[5, 6, 7, 8, 9, EOS], [5, 9, EOS]]
    alone.start(prompts)
    own = alone.propose([[0], [0]], 3, None).tokens.tolist()
    # Let the first row's source hold what the model drafts last, and something after it.
    prompts[0] = [5, own[0][-1], 12, 13, 14, 15, EOS]
    alone.start(prompts)
    own = alone.propose([[0], [0]], 3, None).tokens.tolist()
    both = CombinedDrafter(drafter(), lookup(), frozenset({EOS}))
    both.start(prompts)
    draft = both.propose([[0], [0]], 3, None)
    assert [row[:3] for row in draft.tokens.tolist()] == own
    look = lookup()
    look.start(prompts)
    after = look.find([[0, *row] for row in own], 3)
    assert max(map(len, after)) > 0
    assert draft.lengths == [
        3 + (0 if EOS in row else len(more)) for row, more in zip(own, after, strict=True)
    ]
    assert both.propose([[0], [0]], 0, None).tokens.shape == (2, 0)


def test_nothing_is_looked_up_after_a_drafted_eos() -> None:
    class Ending:
        def start(self, prompts: object) -> None:
            pass

        def propose(self, context: object, num_draft: int, key: object) -> Draft:
            tokens = mx.array([[3, EOS], [3, 4]])
            return Draft(tokens, [2, 2])

    drafter = CombinedDrafter(Ending(), lookup(), frozenset({EOS}))  # type: ignore[arg-type]
    drafter.start([[EOS, 8, 8, EOS], [4, 8, EOS]])
    draft = drafter.propose([[0], [0]], 2, None)
    assert draft.lengths == [2, 4]
    assert draft.tokens[1].tolist() == [3, 4, 8, EOS]
    drafter.start([[EOS, 8, 8, EOS], [EOS]])
    assert drafter.propose([[0], [0]], 2, None).tokens.shape == (2, 2), "nothing to pad for"


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 8), "min_ngram must be an integer from 1 to 16, got 0"),
        ((4, 3), "max_ngram must be an integer from 4 to 16, got 3"),
    ],
)
def test_ngram_sizes_out_of_range_are_refused(sizes: tuple[int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LookupDrafter(frozenset({EOS}), frozenset(), min_ngram=sizes[0], max_ngram=sizes[1])
