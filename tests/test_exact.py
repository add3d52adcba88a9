"""Proof by enumeration: two rounds of either rule emit the target's own distribution.

Everything random is enumerated in float64: each draft that can be sampled, each combination of
passing and failing places, each next token. The rules, the counting, the residual and the filters
are the functions that decoding runs. Their inputs are random distributions, or those of tiny models
in real sessions. Planted bugs must leave a gap.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from speculative_t5.decoding.drafters import Draft
from speculative_t5.decoding.sampling import Sampler
from speculative_t5.decoding.verify import Acceptance, block_acceptance, residual, token_acceptance

import mlx.core as mx
import numpy as np
import pytest
from conftest import VARIED
from scripted import distribution_of_accepted, trees

pytestmark = pytest.mark.cpu  # float64

Tree = list[np.ndarray]  # at depth d, (V ** d, V): a distribution after each sequence of d tokens
Residual = Callable[[Draft, mx.array, mx.array, mx.array], mx.array]
AcceptanceOf = Callable[[Draft, mx.array], Acceptance]

EXACT = 1e-12
KINDS = ("random", "adversarial", "one-hot", "same", "partial", "mixed")
MODELS = tuple(VARIED)  # target and draft of such a kind
RULES: dict[str, AcceptanceOf] = {"token": token_acceptance, "block": block_acceptance}


@dataclass(frozen=True)
class Case:
    """A target p and a draft's q: the one it samples from, and the one it claims.

    A zero row of `sampled` drafts nothing.
    """

    size: int
    num_draft: int
    p: Tree
    sampled: Tree
    claimed: Tree


def make_case(
    size: int, num_draft: int, kind: str, seed: int, sampler: Sampler | None = None
) -> Case:
    """Make models over `size` tokens whose distributions depend on all tokens before."""
    if kind in MODELS:
        p, q = trees(kind, size, num_draft, seed)
    else:
        rng = np.random.default_rng([size, num_draft, KINDS.index(kind), seed])
        p = [sparse(rng, size**d, size) for d in range(2 * num_draft + 2)]
        q = [draft_rows(rng, kind, rows) for rows in p]
        for rows in q if kind == "partial" else ():
            # Drafting may end early; the rows after the first zero row are ignored.
            rows[rng.random(len(rows)) < 0.35] = 0
    if sampler:
        p, q = filtered(sampler, p), filtered(sampler, q)
    return Case(size, num_draft, p, q, q)


def sparse(rng: np.random.Generator, count: int, size: int) -> np.ndarray:
    """Return distributions (count, size), about a quarter of the entries zero."""
    weights = rng.exponential(size=(count, size)) * (rng.random((count, size)) < 0.75)
    weights[np.arange(count), rng.integers(size, size=count)] += 0.05
    return weights / weights.sum(axis=1, keepdims=True)


def draft_rows(rng: np.random.Generator, kind: str, p: np.ndarray) -> np.ndarray:
    if kind == "same":
        return p.copy()
    if kind == "one-hot":
        return np.eye(p.shape[1])[rng.integers(p.shape[1], size=len(p))]
    if kind == "adversarial":  # likes what the target dislikes, impossible tokens most of all
        weights = (1 / (p + 0.02)) ** 2
        return weights / weights.sum(axis=1, keepdims=True)
    if kind == "mixed":
        rows = [draft_rows(rng, kind, p) for kind in KINDS[:4]]
        return np.stack(rows)[rng.integers(4, size=len(p)), np.arange(len(p))]
    return sparse(rng, *p.shape)


double = partial(mx.array, dtype=mx.float64)


def filtered(sampler: Sampler, tree: Tree) -> Tree:
    return [np.array(sampler.filter(double(rows)), np.float64) for rows in tree]


def one_round(
    case: Case, acceptance_of: AcceptanceOf, residual_of: Residual, depth: int
) -> tuple[list[np.ndarray], np.ndarray]:
    """Enumerate what a round can emit after each of the V ** depth sequences of `depth` tokens.

    Returns:
        For n = 0 to K the probability (V ** depth, V ** (n + 1)) of emitting those n + 1 tokens,
        and the expected number of accepted tokens, (V ** depth,).
    """
    size, k = case.size, case.num_draft
    contexts, drafts = np.meshgrid(
        np.arange(size**depth), np.arange(size**k), indexing="ij"
    )  # a draft is a number of K digits
    contexts, drafts = contexts.ravel(), drafts.ravel()
    prefix = [drafts // size ** (k - n) for n in range(k + 1)]
    node = [contexts * size**n + prefix[n] for n in range(k + 1)]
    tokens = np.stack([prefix[n + 1] % size for n in range(k)], axis=1)
    sampled, claimed = (
        stop_at_zero(np.stack([tree[depth + n][node[n]] for n in range(k)], axis=1))
        for tree in (case.sampled, case.claimed)
    )
    # Where nothing is drafted the token is arbitrary: let it be 0.
    nothing = ~sampled.any(axis=2)
    chance_x = np.take_along_axis(sampled, tokens[..., None], axis=2)[..., 0]
    chance = np.where(nothing, tokens == 0, chance_x).prod(axis=1)
    p = np.stack([case.p[depth + n][node[n]] for n in range(k + 1)], axis=1)

    possible = chance > 0
    contexts, chance = contexts[possible], chance[possible]
    prefix = [numbers[possible] for numbers in prefix]
    sampled_tokens = mx.array(tokens[possible].astype(np.int32))
    draft = Draft(sampled_tokens, [k] * len(sampled_tokens), double(claimed[possible]))
    target = double(p[possible])
    acceptance = acceptance_of(draft, target)
    chance_of_n = distribution_of_accepted(acceptance)

    emitted = []
    for n in range(k + 1):
        weights = np.array(
            residual_of(draft, target, acceptance.ratios, mx.full(len(chance), n, dtype=mx.int32))
        )
        chances = (
            weights / weights.sum(axis=1, keepdims=True) * (chance * chance_of_n[:, n])[:, None]
        )
        outcome = (contexts * size**n + prefix[n])[:, None] * size + np.arange(size)
        mass = np.bincount(outcome.ravel(), chances.ravel(), minlength=size ** (depth + n + 1))
        emitted.append(mass.reshape(size**depth, -1))
    accepted = np.bincount(contexts, chance * (chance_of_n @ np.arange(k + 1)), size**depth)
    return emitted, accepted


def stop_at_zero(probs: np.ndarray) -> np.ndarray:
    """Zero all rows after the first zero row of each draft (rows, K, V)."""
    return probs * np.cumprod(probs.any(axis=2), axis=1)[..., None]


def two_rounds(
    case: Case, acceptance_of: AcceptanceOf, residual_of: Residual = residual
) -> tuple[np.ndarray, np.ndarray]:
    """Return distributions of 2 (K + 1) tokens: two rounds and then the target; the target."""
    horizon = 2 * (case.num_draft + 1)
    ended = [np.zeros(case.size**d) for d in range(horizon + 1)]
    for n, first in enumerate(one_round(case, acceptance_of, residual_of, 0)[0]):
        second, _ = one_round(case, acceptance_of, residual_of, n + 1)
        for m, mass in enumerate(second):
            ended[n + m + 2] += (first.ravel()[:, None] * mass).ravel()
    mass, target = ended[0], np.ones(1)
    for d in range(horizon):
        mass = (mass[:, None] * case.p[d]).ravel() + ended[d + 1]
        target = (target[:, None] * case.p[d]).ravel()
    return mass, target


def gap(case: Case, acceptance_of: AcceptanceOf, residual_of: Residual = residual) -> float:
    return float(np.abs(np.subtract(*two_rounds(case, acceptance_of, residual_of))).max())


SMALL = [(2, 1), (3, 1), (3, 2), (2, 3), (4, 2)]
LARGE = [(3, 3), (2, 4)]
OF_MODELS = list(itertools.product([(3, 1), (3, 2)], MODELS))


def name(value: str | tuple[int, int]) -> str:
    return value if isinstance(value, str) else "V{}K{}".format(*value)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("shape", "kind"), [*itertools.product(SMALL + LARGE, KINDS), *OF_MODELS], ids=name
)
def test_two_rounds_follow_the_targets_distribution(
    shape: tuple[int, int], kind: str, rule: str
) -> None:
    for seed in range(2 if shape in SMALL else 1):
        mass, target = two_rounds(make_case(*shape, kind, seed), RULES[rule])
        np.testing.assert_allclose([mass.sum(), *mass], [1, *target], rtol=0, atol=EXACT)


FILTERS = [Sampler(1.0, top_k=2), Sampler(1.0, top_p=0.6), Sampler(1.0, top_k=3, top_p=0.8)]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("sampler", FILTERS, ids=["top-k", "top-p", "both"])
@pytest.mark.parametrize(
    ("kind", "num_draft", "seeds"), [("random", 2, 2), *((kind, 1, 1) for kind in MODELS)], ids=str
)
def test_filters_keep_rules_exact(
    kind: str, num_draft: int, seeds: int, sampler: Sampler, rule: str
) -> None:
    for seed in range(seeds):
        case = make_case(4, num_draft, kind, seed, sampler)
        assert gap(case, RULES[rule]) < EXACT
        # An unfiltered draft is exact, too, if it claims the unfiltered q.
        plain = make_case(4, num_draft, kind, seed)
        assert gap(replace(case, sampled=plain.sampled, claimed=plain.claimed), RULES[rule]) < EXACT


@pytest.mark.parametrize(
    ("shape", "kind"), [*itertools.product([(3, 1), (3, 2), (2, 4)], KINDS), *OF_MODELS], ids=name
)
def test_block_verification_accepts_at_least_as_many(shape: tuple[int, int], kind: str) -> None:
    """In expectation after every context, and more after some if there are two places."""
    gains = []
    for seed, depth in itertools.product(range(4), range(2)):
        case = make_case(*shape, kind, seed)
        token, block = (one_round(case, rule, residual, depth)[1] for rule in RULES.values())
        gains += (block - token).tolist()
    assert min(gains) > -EXACT
    if shape[1] > 1 and kind in ("random", "adversarial", "mixed", *MODELS):
        assert max(gains) > 0.001


@pytest.mark.parametrize("kind", [*KINDS, *MODELS])
def test_delta_accepts_more_and_one_accepts_everything(kind: str) -> None:
    num_draft = 2 if kind in MODELS else 3
    case = make_case(3, num_draft, kind, 0)
    *rates, beyond = (
        one_round(case, partial(token_acceptance, delta=delta), residual, 1)[1]
        for delta in (0.0, 0.1, 0.4, 0.8, 1.0, 2.0)
    )
    least = 0.0001 if kind in MODELS else 0.01  # models draft fewer tokens, and are similar
    for less, more in itertools.pairwise(rates):
        assert (more >= less - EXACT).all()
        assert kind == "same" or more.sum() > less.sum() + least
    np.testing.assert_allclose(rates[-1], beyond, rtol=0, atol=EXACT)
    if kind != "partial":
        np.testing.assert_allclose(rates[-1], num_draft, rtol=0, atol=EXACT)
    if kind == "same":
        np.testing.assert_allclose(rates[0], num_draft, rtol=0, atol=EXACT)


# Planted bugs: each must leave a gap that no rounding explains.


def without_residual(
    draft: Draft, p: mx.array, ratios: mx.array, num_accepted: mx.array
) -> mx.array:
    return mx.take_along_axis(p, num_accepted[:, None, None], axis=1)[:, 0]


def without_ratio(draft: Draft, p: mx.array, ratios: mx.array, num_accepted: mx.array) -> mx.array:
    return residual(draft, p, mx.ones_like(ratios), num_accepted)


def of_the_next_place(
    draft: Draft, p: mx.array, ratios: mx.array, num_accepted: mx.array
) -> mx.array:
    return residual(draft, p, ratios, mx.minimum(num_accepted + 1, p.shape[1] - 1))


def with_early_break(draft: Draft, p: mx.array) -> Acceptance:
    return replace(block_acceptance(draft, p), in_order=True)


def without_break(draft: Draft, p: mx.array) -> Acceptance:
    return replace(token_acceptance(draft, p), in_order=False)


def with_unclipped_ratio(draft: Draft, p: mx.array) -> Acceptance:
    """The last place passes by the plain ratio of the whole block."""
    acceptance = block_acceptance(draft, p)
    tokens = draft.tokens[..., None]
    p_x = mx.take_along_axis(p[:, :-1], tokens, axis=-1)[..., 0]
    q_x = mx.take_along_axis(draft.dense(p.shape[-1]), tokens, axis=-1)[..., 0]
    whole = mx.prod(mx.where(q_x > 0, p_x / mx.where(q_x > 0, q_x, 1), 0), axis=1, keepdims=True)
    chance = mx.concatenate([acceptance.chance[:, :-1], whole], axis=1)
    return replace(acceptance, chance=chance)


@pytest.mark.parametrize("kind", ["random", *MODELS])
@pytest.mark.parametrize(
    ("acceptance_of", "residual_of"),
    [
        (token_acceptance, without_residual),
        (block_acceptance, without_residual),
        (token_acceptance, of_the_next_place),
        (block_acceptance, without_ratio),
        (with_early_break, residual),
        (without_break, residual),
        (with_unclipped_ratio, residual),
        (partial(token_acceptance, delta=0.1), residual),
    ],
)
def test_planted_bugs_leave_a_gap(
    acceptance_of: AcceptanceOf, residual_of: Residual, kind: str
) -> None:
    seeds = range(6 if kind in MODELS else 4)
    assert max(gap(make_case(3, 2, kind, s), acceptance_of, residual_of) for s in seeds) > 1e-3


@pytest.mark.parametrize("rule", RULES)
def test_planted_bug_of_one_filter_leaves_a_gap(rule: str) -> None:
    """Tokens are sampled from one q, and the rule is given the other."""
    sampler = Sampler(1.0, top_k=2)
    for seed in range(4):
        plain, case = (make_case(4, 2, "random", seed, s) for s in (None, sampler))
        assert gap(replace(case, sampled=plain.sampled), RULES[rule]) > 1e-3
        assert gap(replace(case, claimed=plain.claimed), RULES[rule]) > 1e-3
