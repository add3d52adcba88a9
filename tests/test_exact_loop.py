"""Proof by enumeration that outputs of the loop follow the distribution of whole passes.

Each row of a batch is scripted to have one possible history: the tokens drafted in each round, how
many of them are accepted, and the next token. See `scripted.py`. Neighbours may have other
temperatures, filters and transforms, or be greedy, and lookups draft as well.
"""

from speculative_t5.decoding.sampling import Sampler

import pytest
import scripted
from conftest import KINDS, PAIRS, VARIED
from reference import ENDINGS, TRANSFORMS
from scripted import PROMPTS, ROUNDING, gap

LOOPS = [("t5", 1, "token"), *((kind, 2, "token") for kind in KINDS), ("sharing", 2, "block")]
LOOPS += [("blocks", 2, rule) for rule in ("token", "block")]
LOOPS += [("opt", 2, "block"), ("gpt2", 1, "token")]


@pytest.mark.parametrize(("kind", "num_draft", "rule"), LOOPS)
def test_loop_outputs_follow_the_targets_distribution(kind: str, num_draft: int, rule: str) -> None:
    """With two drafted tokens there are 1,254 histories, which take the rows of others.

    Drafted tokens have the probabilities of the draft's whole passes.
    """
    assert gap(kind, rule, num_draft, prompts=PROMPTS, whole=True) < ROUNDING


TRANSFORMED = [("t5", name, "token") for name in TRANSFORMS]
TRANSFORMED += [("qwen3", "together", "block"), ("blocks", "penalty", "block")]
TRANSFORMED += [("opt", "penalty", "token"), ("gpt2", "penalty", "block")]


@pytest.mark.parametrize(("kind", "name", "rule"), TRANSFORMED)
def test_transformed_loop_outputs_follow_the_transformed_distribution(
    kind: str, name: str, rule: str
) -> None:
    """The reference transforms whole sequences; the loop has drafted tokens at each place."""
    assert gap(kind, rule, sampled=[Sampler(1.0, transform=TRANSFORMS[name])]) < ROUNDING


ENDED = [*(("t5", name) for name in ENDINGS), ("blocks", "dead"), ("qwen3", "dead")]


@pytest.mark.parametrize(("kind", "name"), ENDED)
def test_what_cannot_follow_an_end_does_not_matter(kind: str, name: str) -> None:
    assert gap(kind, "block", sampled=[Sampler(1.0, transform=ENDINGS[name])]) < ROUNDING


UNLIKE = [
    Sampler(1.0),
    Sampler(0.7, top_k=2),
    Sampler(2.0, top_p=0.8),
    Sampler(1.0, transform=TRANSFORMS["together"]),
]
GREEDY = [Sampler(), Sampler(transform=TRANSFORMS["penalty"])]
ROWS = [(kind, "model", "token", 1) for kind in VARIED]
ROWS += [("t5", "model", "block", 2), ("t5", "lookup", "token", 1)]
ROWS += [(kind, "both", "block", 1) for kind in (*PAIRS, "opt")]
ROWS += [(kind, "expected", "token", 2) for kind in (*PAIRS, "gpt2")]
ROWS += [("t5", "expected", "block", 2)]


@pytest.mark.parametrize(("kind", "drafter", "rule", "num_draft"), ROWS)
def test_rows_follow_their_own_distributions(
    kind: str, drafter: str, rule: str, num_draft: int
) -> None:
    assert gap(kind, rule, num_draft, drafter, sampled=UNLIKE, greedy=GREEDY) < ROUNDING


@pytest.mark.parametrize(
    ("drafter", "rule"), [("model", "token"), ("lookup", "block"), ("both", "block")]
)
def test_rows_that_end_or_cannot_go_on_follow_their_own_distributions(
    drafter: str, rule: str
) -> None:
    names = ("strict grammar", "forced end", "dead or ended")
    sampled = [Sampler(1.0), *(Sampler(1.0, transform=ENDINGS[name]) for name in names)]
    greedy = [Sampler(transform=each) for each in ENDINGS.values()]
    num_draft = 1 if drafter == "both" else 2  # a lookup may add as many
    assert gap("t5", rule, num_draft, drafter, sampled=sampled, greedy=greedy) < ROUNDING


@pytest.mark.parametrize(("drafter", "rule"), [("model", "block"), ("both", "token")])
def test_rows_that_stop_follow_their_own_distributions(drafter: str, rule: str) -> None:
    """The same token stops an output, and leaves nothing to follow it."""
    dead = ENDINGS["dead or ended"]
    rows = [Sampler(1.0, transform=dead), Sampler(1.0)], [Sampler(), Sampler(transform=dead)]
    assert gap("t5", rule, drafter=drafter, sampled=rows[0], greedy=rows[1], stop=2) < ROUNDING


@pytest.mark.parametrize("kind", ["t5", "sharing", "blocks"])
def test_a_model_drafts_as_whole_passes_would_beside_what_is_copied(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it drafted where a prediction was copied instead is no part of what it has read.

    Its draft after two tokens that were emitted in such a round shows that.
    """
    monkeypatch.setattr(scripted, "MAX_TOKENS", 4)
    scripted.histories_of.cache_clear()
    try:
        assert gap(kind, "token", 2, "expected", whole=True) < ROUNDING
    finally:
        scripted.histories_of.cache_clear()
