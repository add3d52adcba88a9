"""The pair that ships: exact in float32, small, and free of paths."""

import random
import re

from speculative_t5 import Generation, SpeculativeDecoder

import mlx.core as mx
import pytest
from conftest import REPOSITORY
from corruption import PREFIX, Corruptor
from families import TEXT

WEIGHTS = REPOSITORY / "weights"
PAIR = ("correct-base", "correct-small")


@pytest.fixture(scope="module")
def decoder() -> SpeculativeDecoder:
    return SpeculativeDecoder.from_pretrained(
        WEIGHTS / "correct-base", WEIGHTS / "correct-small", num_draft=5, dtype=mx.float32
    )


@pytest.fixture(scope="module")
def plain(decoder: SpeculativeDecoder) -> dict[str, Generation]:
    """Plain outputs for damaged sentences, none of them from the training text."""
    corruptor, rng = Corruptor(TEXT), random.Random(0)
    sources = sorted({PREFIX + corruptor.sentence(text, rng) for text in TEXT})[:12]
    assert len(sources) == 12
    return {source: decoder.generate(source, speculative=False) for source in sources}


@pytest.mark.parametrize("num_draft", [1, 8])
def test_greedy_speculative_outputs_equal_plain_ones(
    decoder: SpeculativeDecoder, plain: dict[str, Generation], num_draft: int
) -> None:
    other = SpeculativeDecoder(decoder.model, decoder.draft, decoder.tokenizer, num_draft=num_draft)
    accepted = drafted = 0
    for source, expected in plain.items():
        out = other.generate(source)
        assert (out.tokens, out.finish_reason) == (expected.tokens, expected.finish_reason), source
        accepted += out.stats.accepted
        drafted += out.stats.drafted
    assert accepted > drafted / 2
    assert sum(out.text in TEXT for out in plain.values()) > len(plain) / 2, "corrected sentences"


def test_the_draft_is_the_one_that_the_target_names_unless_told_otherwise() -> None:
    implied = SpeculativeDecoder.from_pretrained("correct-base")
    given = SpeculativeDecoder.from_pretrained(*PAIR)
    assert implied.draft and given.draft
    assert implied.draft.fingerprint == given.draft.fingerprint
    for alone in (
        SpeculativeDecoder.from_pretrained("correct-base", None),
        SpeculativeDecoder.from_pretrained("correct-small"),  # names none
    ):
        assert alone.draft is None and not alone.drafts
    beams = implied.generate(TEXT[0], num_beams=2)  # a search does without it
    assert beams.tokens == given.generate(TEXT[0], num_beams=2, speculative=False).tokens
    copying = SpeculativeDecoder.from_pretrained("correct-base", lookup=True)
    for chosen in (given, copying):
        with pytest.raises(ValueError, match="does not go with a draft"):
            chosen.generate(TEXT[0], num_beams=2)


def test_the_pair_is_small_and_holds_no_paths() -> None:
    files = [path for name in PAIR for path in (WEIGHTS / name).iterdir()]
    assert sum(path.stat().st_size for path in files) < 60e6
    shared = list((WEIGHTS / "correct-draft").iterdir())
    assert sum(path.stat().st_size for path in shared) < 6.3e6
    kept = [*files, *shared]
    stored = [path.read_bytes() for path in kept if path.suffix in (".model", ".json", ".md")]
    assert len(stored) == 8
    assert not re.search(rb"/(home|root|tmp|Users)/|deu\.txt", b"".join(stored))
