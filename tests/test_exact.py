"""Proof by enumeration: two rounds of either rule emit the target's own distribution.

Everything random is enumerated in float64: each draft that can be sampled, each combination of
passing and failing places, each next token. The rules, the counting, the residual and the filters
are the functions that decoding runs; test_exact_loop.py has the distributions of models.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from speculative_t5.decoding.draft import Draft
from speculative_t5.decoding.rules import (
    Acceptance,
    block_acceptance,
    decide,
    residual,
    token_acceptance,
)
from speculative_t5.decoding.sampling import Groups, Sampler, one_hot
from speculative_t5.decoding.verify import Verifier, num_agreed

import mlx.core as mx
import numpy as np
import pytest
from scripted import distribution_of_accepted

pytestmark = pytest.mark.cpu  # float64

Tree = list[np.ndarray]  # at depth d, (V ** d, V): a distribution after each sequence of d tokens
AcceptanceOf = Callable[[Draft, mx.array], Acceptance]

EXACT = 1e-12
KINDS = ("random", "adversarial", "one-hot", "same", "partial", "mixed")
RULES: dict[str, AcceptanceOf] = {"token": token_acceptance, "block": block_acceptance}


@dataclass(frozen=True)
class Case:
    """A target p and a draft's q, a zero row of which drafts nothing."""

    size: int
    num_draft: int
    p: Tree
    q: Tree


def make_case(size: int, num_draft: int, kind: str, seed: int) -> Case:
    """Make models over `size` tokens whose distributions depend on all tokens before."""
    rng = np.random.default_rng([size, num_draft, KINDS.index(kind), seed])
    p = [sparse(rng, size**d, size) for d in range(2 * num_draft + 2)]
    q = [draft_rows(rng, kind, rows) for rows in p]
    for rows in q if kind == "partial" else ():
        # Drafting may end early; the rows after the first zero row are ignored.
        rows[rng.random(len(rows)) < 0.35] = 0
    return Case(size, num_draft, p, q)


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


def one_round(
    case: Case, acceptance_of: AcceptanceOf, depth: int
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
    q = np.stack([case.q[depth + n][node[n]] for n in range(k)], axis=1)
    q *= np.cumprod(q.any(axis=2), axis=1)[..., None]  # nothing after the first zero row
    # Where nothing is drafted the token is arbitrary: let it be 0.
    nothing = ~q.any(axis=2)
    chance_x = np.take_along_axis(q, tokens[..., None], axis=2)[..., 0]
    chance = np.where(nothing, tokens == 0, chance_x).prod(axis=1)
    p = np.stack([case.p[depth + n][node[n]] for n in range(k + 1)], axis=1)

    possible = chance > 0
    contexts, chance = contexts[possible], chance[possible]
    prefix = [numbers[possible] for numbers in prefix]
    sampled_tokens = mx.array(tokens[possible].astype(np.int32))
    draft = Draft(sampled_tokens, [k] * len(sampled_tokens), double(q[possible]))
    target = double(p[possible])
    acceptance = acceptance_of(draft, target)
    chance_of_n = distribution_of_accepted(acceptance)

    emitted = []
    for n in range(k + 1):
        weights = np.array(
            residual(draft, target, acceptance.ratios, mx.full(len(chance), n, dtype=mx.int32))
        )
        chances = (
            weights / weights.sum(axis=1, keepdims=True) * (chance * chance_of_n[:, n])[:, None]
        )
        outcome = (contexts * size**n + prefix[n])[:, None] * size + np.arange(size)
        mass = np.bincount(outcome.ravel(), chances.ravel(), minlength=size ** (depth + n + 1))
        emitted.append(mass.reshape(size**depth, -1))
    accepted = np.bincount(contexts, chance * (chance_of_n @ np.arange(k + 1)), size**depth)
    return emitted, accepted


def two_rounds(case: Case, acceptance_of: AcceptanceOf) -> tuple[np.ndarray, np.ndarray]:
    """Return distributions of 2 (K + 1) tokens: two rounds and then the target; the target."""
    horizon = 2 * (case.num_draft + 1)
    ended = [np.zeros(case.size**d) for d in range(horizon + 1)]
    for n, first in enumerate(one_round(case, acceptance_of, 0)[0]):
        second, _ = one_round(case, acceptance_of, n + 1)
        for m, mass in enumerate(second):
            ended[n + m + 2] += (first.ravel()[:, None] * mass).ravel()
    mass, target = ended[0], np.ones(1)
    for d in range(horizon):
        mass = (mass[:, None] * case.p[d]).ravel() + ended[d + 1]
        target = (target[:, None] * case.p[d]).ravel()
    return mass, target


def gap(case: Case, acceptance_of: AcceptanceOf) -> float:
    """Return the largest difference between the two distributions of `two_rounds`."""
    return float(np.abs(np.subtract(*two_rounds(case, acceptance_of))).max())


SMALL = [(2, 1), (3, 1), (3, 2), (2, 3), (4, 2)]
LARGE = [(3, 3), (2, 4)]


def name(value: str | tuple[int, int]) -> str:
    return value if isinstance(value, str) else "V{}K{}".format(*value)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("shape", "kind"), [*itertools.product(SMALL + LARGE, KINDS)], ids=name)
def test_two_rounds_follow_the_targets_distribution(
    shape: tuple[int, int], kind: str, rule: str
) -> None:
    for seed in range(2 if shape in SMALL else 1):
        mass, target = two_rounds(make_case(*shape, kind, seed), RULES[rule])
        np.testing.assert_allclose([mass.sum(), *mass], [1, *target], rtol=0, atol=EXACT)


FILTERS = [Sampler(1.0, top_k=2), Sampler(1.0, top_p=0.6), Sampler(1.0, top_k=3, top_p=0.8)]


def filtered(probs: np.ndarray, sampler: Sampler) -> np.ndarray:
    return np.array(sampler.filter(mx.log(double(probs))), np.float64)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("sampler", FILTERS, ids=["top-k", "top-p", "both"])
def test_filters_keep_rules_exact(sampler: Sampler, rule: str) -> None:
    for seed in range(2):
        plain = make_case(4, 2, "random", seed)
        p = [filtered(rows, sampler) for rows in plain.p]
        q = [filtered(rows, sampler) for rows in plain.q]
        for draft in (q, plain.q):  # an unfiltered draft is exact, too
            assert gap(Case(4, 2, p, draft), RULES[rule]) < EXACT


@pytest.mark.parametrize(
    ("shape", "kind"), [*itertools.product([(3, 1), (3, 2), (2, 4)], KINDS)], ids=name
)
def test_block_verification_accepts_at_least_as_many(shape: tuple[int, int], kind: str) -> None:
    """In expectation after every context, and more after some if there are two places."""
    gains = []
    for seed, depth in itertools.product(range(4), range(2)):
        case = make_case(*shape, kind, seed)
        token, block = (one_round(case, rule, depth)[1] for rule in RULES.values())
        gains += (block - token).tolist()
    assert min(gains) > -EXACT
    if shape[1] > 1 and kind in ("random", "adversarial", "mixed"):
        assert max(gains) > 0.001


@pytest.mark.parametrize("kind", KINDS)
def test_delta_accepts_more_and_one_accepts_everything(kind: str) -> None:
    case = make_case(3, 3, kind, 0)
    *rates, beyond = (
        one_round(case, partial(token_acceptance, delta=delta), 1)[1]
        for delta in (0.0, 0.1, 0.4, 0.8, 1.0, 2.0)
    )
    for less, more in itertools.pairwise(rates):
        assert (more >= less - EXACT).all()
        assert kind == "same" or more.sum() > less.sum() + 0.01
    np.testing.assert_allclose(rates[-1], beyond, rtol=0, atol=EXACT)
    if kind != "partial":
        np.testing.assert_allclose(rates[-1], 3, rtol=0, atol=EXACT)
    if kind == "same":
        np.testing.assert_allclose(rates[0], 3, rtol=0, atol=EXACT)


GREEDY = Groups([Sampler()])


def test_leniency_accepts_near_ties_and_nothing_else() -> None:
    logits = mx.log(mx.array([[[0.5, 0.41, 0.09], [0.5, 0.41, 0.09]]]))  # 0.41 / 0.5 = 0.82
    for token, delta, expected in (
        (1, 0.0, 0),
        (1, 0.17, 0),
        (1, 0.19, 1),
        (2, 0.19, 0),
        (2, 1.0, 2),
    ):
        found = Verifier(delta).choices(Draft(mx.array([[token]]), [1]), logits, GREEDY, None)
        assert found[0, 0].item() == expected


def test_leniency_never_accepts_where_nothing_was_drafted() -> None:
    logits = mx.array([[[0.0, 1.0], [0.0, 1.0]]])
    draft = Draft(mx.array([[0]]), [0])
    assert Verifier(1.0).choices(draft, logits, GREEDY, None).tolist() == [[1, 1]]


def test_greedy_counts_equal_both_rules_for_one_hot_distributions() -> None:
    """All drafts of up to three tokens out of three, against all targets."""
    targets = list(itertools.product(range(3), repeat=4))
    keys, seen = mx.zeros((len(targets), 4, 2), mx.uint32), set()
    for draft in itertools.product(range(3), repeat=3):
        for length in range(4):
            given = Draft(mx.array([draft] * len(targets)), [length] * len(targets))
            found = [num_agreed(draft[:length], target) for target in targets]
            seen.update(found)
            p = one_hot(mx.array(targets), 3)
            for rule in RULES.values():
                verdict = decide(rule(given, p), given, p, keys)
                assert verdict.num_accepted.tolist() == found
                best = [target[n] for target, n in zip(targets, found, strict=True)]
                assert verdict.next_token.tolist() == best
    assert seen == {0, 1, 2, 3}
