"""The picture of a round shows what happened."""

from pathlib import Path

from speculative_t5 import SpeculativeDecoder

import draw_round
import mlx.core as mx
import pytest
from conftest import REPOSITORY
from draw_round import Judged, judged_rounds, to_draw

EOS = 1


def test_rounds_are_those_of_the_output() -> None:
    pair = (REPOSITORY / "weights" / name for name in ("correct-base", "correct-small"))
    decoder = SpeculativeDecoder.from_pretrained(*pair, num_draft=5, dtype=mx.float32)
    out = decoder.generate(draw_round.PROMPT)
    rounds = judged_rounds(decoder, draw_round.PROMPT)
    assert tuple(one.num_accepted for one in rounds) == out.stats.num_accepted
    emitted = [token for one in rounds for token in one.emitted]
    assert emitted[: len(out.tokens) + 1] == [*out.tokens, EOS]
    for one in rounds:
        assert one.drafted[: one.num_accepted] == one.emitted[: one.num_accepted]
        assert one.before == out.tokens[: len(one.before)]
    rejects, accepts = to_draw(rounds, EOS)
    assert rejects.num_accepted < 5 == accepts.num_accepted


def test_prompt_without_such_rounds_is_refused() -> None:
    whole = Judged(1, [], [5, 6], [5, 6, 7], 2)
    ends = Judged(2, [5, 6, 7], [8, 9], [EOS, 3, 4], 0)
    with pytest.raises(ValueError, match="change PROMPT"):
        to_draw([whole, whole, ends, whole], EOS)


def test_picture_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    draw_round.main(output=tmp_path / "new" / "round.png")
    assert (tmp_path / "new" / "round.png").read_bytes().startswith(b"\x89PNG")
