"""Drafters: lookups in texts that grow, and a model that follows the context."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

from speculative_t5 import SpeculativeDecoder
from speculative_t5.decoding.draft import Draft
from speculative_t5.decoding.draft_length import FixedSchedule
from speculative_t5.decoding.drafters import CombinedDrafter, LookupDrafter
from speculative_t5.decoding.lookup import MAX_NGRAM, Lookup
from speculative_t5.decoding.model_drafter import ModelDrafter
from speculative_t5.decoding.protocols import ModelInfo

import mlx.core as mx
import pytest
from conftest import GREEDY, KINDS, VARIED, tiny, tiny_draft, tiny_model

INFO = ModelInfo(60, 1, frozenset({1}), frozenset({0, 1}), False, 512)
SIZES = [(low, high) for high in (1, 2, 3, 8, MAX_NGRAM) for low in range(1, high + 1)]


def look_up(
    source: list[int], output: list[int], num_draft: int, min_ngram: int, max_ngram: int
) -> list[int]:
    """Return the proposal of `Lookup` by a search of the whole text."""
    text = source + output
    at = _longest_match(text, len(source), min_ngram, max_ngram)
    if at is None and len(output) > 1:
        at = _longest_match(source + output[:-1], len(source), min_ngram, max_ngram)
        at = at + 1 if at is not None and at + 1 < len(source) else None
    if at is None:
        return []
    copied = source[at + 1 :] if at < len(source) else text[at + 1 :]
    return copied[:num_draft]


def _longest_match(text: list[int], num_source: int, min_ngram: int, max_ngram: int) -> int | None:
    """Return where the best earlier copy of the text's last tokens ends, if there is one."""
    ranks = []
    for at in range(len(text) - 1):
        size = 0
        while size < max_ngram and size <= at and text[at - size] == text[-1 - size]:
            size += 1
        inside = at < num_source
        nearness = -abs(at - (len(text) - num_source)) if inside else at
        ranks.append((size, inside, nearness, -at))
    size, *_, at = max(ranks, default=(0, 0))
    return -at if size >= min_ngram else None


def text(rng: random.Random, length: int, alphabet: int, before: Sequence[int] = ()) -> list[int]:
    """Return random tokens, some of them copied from `before` and from each other."""
    tokens: list[int] = []
    while len(tokens) < length:
        whole = [*before, *tokens]
        if whole and rng.random() < 0.3:
            at = rng.randrange(len(whole))
            tokens += whole[at : at + rng.randrange(1, 30)]
        else:
            tokens.append(rng.randrange(alphabet))
    return tokens[:length]


@pytest.mark.parametrize("alphabet", [1, 2, 3, 5, 30])
def test_proposals_equal_those_of_a_search_of_the_whole_text(alphabet: int) -> None:
    """With and without a source, and with assumed tokens after the output."""
    rng, found = random.Random(alphabet), 0
    for case in range(150):
        source = text(rng, rng.choice((0, 1, 2, 10, 40)), alphabet)
        output = text(rng, rng.choice((2, 10, 70)), alphabet, source)
        sizes = SIZES[case % len(SIZES)]
        lookup = Lookup(source, *sizes)
        length = 1
        while length < len(output):
            assumed = text(rng, rng.choice((0, 0, 1, 5)), alphabet, output[length - 5 : length])
            num_draft = rng.randrange(8)
            proposed = lookup.propose(output[:length], num_draft, assumed)
            plain = look_up(source, output[:length] + assumed, num_draft, *sizes)
            assert proposed == plain, (source, output[:length], assumed, num_draft, sizes)
            found += bool(plain)
            length += rng.choice((1, 1, 2, 3, 9))
        if len(output) > 9:  # a shorter output begins anew
            assert lookup.propose(output[:5], 5) == look_up(source, output[:5], 5, *sizes)
    assert found > 75


@pytest.mark.parametrize(
    ("change", "output", "proposed"),
    [
        ("replaced", [10, 11, 50], [13, 14, 15]),
        ("replaced, then copied", [10, 11, 50, 13], [14, 15]),
        ("dropped", [10, 11, 13], [14, 15]),
        ("added", [10, 11, 50, 12], [13, 14, 15]),
    ],
)
def test_a_lookup_finds_its_place_again(
    change: str, output: list[int], proposed: list[int]
) -> None:
    """A source of words that were each in it once, and an output that changed one of them."""
    assert Lookup([10, 11, 12, 13, 14, 15], 1, 8).propose(output, 63) == proposed, change


class Touched(int):
    """A token that counts how often any token is compared or hashed."""

    count = 0

    def __eq__(self, other: object) -> bool:
        Touched.count += 1
        return int(self) == other

    def __hash__(self) -> int:
        Touched.count += 1
        return int.__hash__(self)


@pytest.mark.parametrize("kind", ["lookup", "both"])
@pytest.mark.parametrize("alphabet", [1, 2, 50])
def test_a_round_reads_no_more_of_a_long_text(kind: str, alphabet: int) -> None:
    rng = random.Random(0)
    drafter: Any = LookupDrafter(INFO)
    if kind == "both":
        guess = Draft(mx.array([[2, 2, 3]]), [3])
        model: Any = Mock(**{"propose.return_value": guess})
        drafter = CombinedDrafter(model, drafter, FixedSchedule(4).split)
    source = [Touched(2 + rng.randrange(alphabet)) for _ in range(300)]
    drafter.start([source])
    context, costs = [0], []
    for _ in range(600):
        context += [Touched(2 + rng.randrange(alphabet)) for _ in range(2)]
        Touched.count = 0
        drafter.propose([context], 4, GREEDY, None)
        costs.append(Touched.count)
    assert max(costs[200:]) < 500


EOS = 1


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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [[5, 0], [3, 0, 0, 2], [1, 4, 0]])
def test_a_draft_does_not_depend_on_rejected_tokens(kind: str, lengths: list[int]) -> None:
    """Some rounds draft nothing, and rows accept different numbers of tokens."""
    target = tiny(kind, vocab_size=20, layers=2, seed=VARIED[kind])
    drafter, fresh = (ModelDrafter(tiny_draft(target), 20) for _ in range(2))
    prompts = [[5, 6, 7, 8, 9, EOS], [5, 9, EOS], [12, 13, EOS]]
    outputs = [SpeculativeDecoder(target).generate(p, max_tokens=60).tokens for p in prompts]
    contexts = target.start(prompts)[1]
    starts = [len(context) for context in contexts]
    drafter.start(prompts)
    accepted = set()
    for round_ in range(10):
        num_draft = lengths[round_ % len(lengths)]
        draft = drafter.propose(contexts, num_draft, GREEDY, None).tokens.tolist()
        fresh.start(prompts)
        assert draft == fresh.propose(contexts, num_draft, GREEDY, None).tokens.tolist()
        for context, start, tokens, output in zip(contexts, starts, draft, outputs, strict=True):
            rest = output[len(context) - start :]
            n = next((i for i, t in enumerate(tokens) if [t] != rest[i : i + 1]), num_draft)
            context += rest[: n + 1]
            accepted.add(n)
    assert len(accepted) > 1
