"""Pictures in docs/images show what people see today."""

import shutil
from importlib.util import find_spec

from speculative_t5 import SpeculativeDecoder

import draw_round
import draw_views
import mlx.core as mx
import pytest
from draw_views import VIEWS, same, stored

HAS_BROWSER = find_spec("playwright") and any(map(shutil.which, draw_views.BROWSERS))


@pytest.mark.cpu
@pytest.mark.parametrize("name", VIEWS)
def test_a_picture_shows_what_is_seen_today(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw_views, "RUNS", 1)
    if name == "server" and not HAS_BROWSER:
        pytest.skip("the test needs Chromium and Playwright")
    seen = VIEWS[name]().text
    assert same(seen, stored(name)), f"python scripts/figures/draw_views.py {name}: {seen}"


@pytest.mark.cpu
def test_the_picture_of_rounds_shows_those_of_today() -> None:
    decoder = SpeculativeDecoder.from_pretrained(
        "correct-base", "correct-small", num_draft=draw_round.NUM_DRAFT, dtype=mx.float32
    )
    rounds = draw_round.judged_rounds(decoder, draw_round.PROMPT)
    eos = decoder.model.info.eos_token_id
    expected = draw_round.in_words(draw_round.to_draw(rounds, eos), decoder)
    assert same(stored("round"), expected), "python scripts/figures/draw_round.py"


def test_a_line_that_is_gone_is_noticed_and_another_speed_is_not() -> None:
    seen = "He goes.\n1,048 tok/s - 23 tokens"
    assert same(seen, "He goes.  \n 90 tok/s - 23 tokens")
    for other in ("\n", " - 2.3x plain (estimated)"):
        assert same(seen + other, seen) == (other == "\n")
    assert not same(seen, "He goes.\n90 tok/s - 24 tokens") and not same(seen, "")
