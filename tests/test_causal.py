"""Models of mlx-lm in the loop, against its own decoding."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from speculative_t5 import SpeculativeDecoder
from speculative_t5.causal import DecoderOnlyModel, session
from speculative_t5.causal.model import ClampedPositions

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from checkpoints import refused
from conftest import EOS, GREEDY, POSITIONS, VARIED, tiny_causal, tiny_draft

pytest.importorskip("mlx_lm")
CAUSAL = ("gpt2", "opt", "qwen3")


@pytest.fixture(scope="module", params=CAUSAL)
def target(request: Any) -> DecoderOnlyModel:
    return tiny_causal(request.param, vocab_size=20, layers=2, seed=VARIED[request.param])


@pytest.fixture(scope="module")
def qwen() -> DecoderOnlyModel:
    """For rules that do not depend on the architecture."""
    return tiny_causal("qwen3", vocab_size=20, layers=2, seed=VARIED["qwen3"])


def prompts(count: int, longest: int = 30) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(2, 20, rng.integers(1, longest)).tolist() for _ in range(count)]


def test_greedy_outputs_are_those_of_mlx_lm(target: DecoderOnlyModel) -> None:
    from mlx_lm.generate import generate_step

    decoder = SpeculativeDecoder(target, tiny_draft(target), num_draft=4)
    for prompt in prompts(2):
        steps = generate_step(mx.array(prompt), target.model, max_tokens=30)
        tokens = (int(token) for token, _ in steps)
        expected = [*itertools.takewhile(lambda token: token != EOS, tokens)]
        for speculative in (True, False):
            out = decoder.generate(prompt, max_tokens=30, speculative=speculative)
            assert out.tokens == expected


def test_steps_of_ragged_rows_give_the_logits_of_whole_sequences(
    target: DecoderOnlyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of long prompts are read in parts."""
    monkeypatch.setattr(session, "PREFILL", 7)
    sequences = prompts(5, longest=20)
    decoding, contexts = target.start(sequences)
    assert contexts == sequences and decoding.lengths == [len(s) - 1 for s in sequences]
    rng = np.random.default_rng(1)
    for width in (1, 4, 3):
        new = rng.integers(2, 20, (5, width)).tolist()
        fed = mx.array([[s[-1], *row[:-1]] for s, row in zip(sequences, new, strict=True)])
        logits = np.array(decoding.step(fed))
        for i, row in enumerate(new):
            whole = target(mx.array([[*sequences[i], *row[:-1]]]))[0, -width:]
            np.testing.assert_allclose(logits[i], np.array(whole), atol=2e-4)
            kept = int(rng.integers(0, width + 1))  # the rest is rejected
            sequences[i] = [*sequences[i], *row[:kept]]
        decoding.truncate([len(s) - 1 for s in sequences])


def test_rows_are_given_to_waiting_prompts_and_dropped(target: DecoderOnlyModel) -> None:
    first, waiting = prompts(3), [[4], *prompts(6)[4:]]
    decoding, _ = target.start(first)
    together, alone = decoding.encode(waiting[:2]), decoding.encode(waiting[2:])
    assert decoding.replace([1], together[:1]) == waiting[:1]
    assert decoding.replace([0, 2], [*alone, *together[1:]]) == [waiting[2], waiting[1]]
    decoding.select([2, 0])
    rows = [waiting[1], waiting[2]]
    logits = np.array(decoding.step(mx.array([row[-1:] for row in rows])))[:, 0]
    for row, found in zip(rows, logits, strict=True):
        np.testing.assert_allclose(found, np.array(target(mx.array([row])))[0, -1], atol=2e-4)


def test_outputs_end_where_the_context_does(target: DecoderOnlyModel) -> None:
    """A row near its end has neighbours that are drafted for in full."""
    long = np.random.default_rng(2).integers(2, 20, POSITIONS - 3).tolist()
    for draft in (tiny_draft(target), "lookup", None):
        decoder = SpeculativeDecoder(target, draft, num_draft=7)
        alone = decoder.generate(long, max_tokens=50)
        assert alone.stats.emitted == 4 or alone.finish_reason == "eos"
        batch = decoder.generate_batch([long, [3, 4], [5]], max_tokens=20)
        assert batch[0].tokens == alone.tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("lookup", [False, True])
def test_a_draft_of_a_shorter_context_stops_drafting_at_its_end(
    qwen: DecoderOnlyModel, lookup: bool, temperature: float
) -> None:
    """Neighbours do not notice, nor do those for which lookups follow the drafts."""
    limit = 24
    draft = DecoderOnlyModel(tiny_draft(qwen).model, eos_token_id=1, max_context=limit)
    endless = DecoderOnlyModel(qwen.model, eos_token_id=0, max_context=POSITIONS)
    decoder = SpeculativeDecoder(endless, draft, num_draft=5, lookup=lookup)
    rows, runs = [[2, 3, 4, 5] * 5, [2, 3, 4, 5] * 2, [6, 7] * 10, [8] * (limit + 3)], []
    options = {"max_tokens": 40, "temperature": temperature}
    for batch_size in (1, 2, 4):
        outputs = decoder.generate_batch(rows, batch_size=batch_size, **options)
        runs.append([(o.tokens, o.stats.num_drafted, o.stats.num_accepted) for o in outputs])
    assert runs == runs[:1] * 3
    for prompt, (_, *counts) in zip(rows, runs[0], strict=True):
        length = len(prompt)
        for drafted, accepted in zip(*counts, strict=True):
            assert lookup or drafted <= max(0, limit - length + 1)
            length += accepted + 1
    assert sum(runs[0][1][1]) > 0
    if temperature == 0:
        plain = decoder.generate_batch(rows, speculative=False, **options)
        assert [o.tokens for o in plain] == [tokens for tokens, *_ in runs[0]]


def test_a_draft_gives_no_probabilities_beyond_its_context(qwen: DecoderOnlyModel) -> None:
    draft = DecoderOnlyModel(qwen.model, eos_token_id=1, max_context=12)
    endless = DecoderOnlyModel(qwen.model, eos_token_id=99, max_context=POSITIONS)
    out = SpeculativeDecoder(endless, draft).generate([3] * 9, max_tokens=8, probabilities=True)
    known = [q is not None for _, q in out.probabilities or ()]
    assert known == [True] * 4 + [False] * 4


def test_each_of_several_eos_tokens_ends_an_output(qwen: DecoderOnlyModel) -> None:
    prompt = prompts(3)[2]
    alone = SpeculativeDecoder(qwen).generate(prompt, max_tokens=40)
    end = alone.tokens[-1]
    both = DecoderOnlyModel(qwen.model, eos_token_id=1, extra_eos_ids=[end], max_context=POSITIONS)
    assert both.info.eos_token_ids == {1, end}
    out = SpeculativeDecoder(both, tiny_draft(qwen)).generate(prompt, max_tokens=40)
    assert out.finish_reason == "eos"
    assert out.tokens == alone.tokens[: alone.tokens.index(end)]


def test_lookups_search_prompt_and_output_as_one_text(qwen: DecoderOnlyModel) -> None:
    decoder = SpeculativeDecoder(qwen, "lookup", num_draft=3)
    drafter = decoder.engine.plan().drafter
    drafter.start([[2, 3, 4, 5, 6, 3]])
    assert drafter.propose([[2, 3, 4, 5, 6, 3]], 3, GREEDY, None).tokens.tolist() == [[4, 5, 6]]
    # The latest of the longest matches, wherever it is.
    assert drafter.propose([[2, 3, 4, 5, 6, 3, 7, 3]], 3, GREEDY, None).tokens.tolist() == [[7, 3]]


def test_a_cache_that_cannot_be_rewound_is_refused() -> None:
    from mlx_lm.models.cache import KVCache, RotatingKVCache

    model = tiny_causal("qwen3").model
    model.make_cache = lambda: [KVCache(), RotatingKVCache(8)]  # type: ignore[attr-defined]
    with refused("in RotatingKVCache, which cannot be rewound"):
        DecoderOnlyModel(model, eos_token_id=1, max_context=8)


def test_positions_beyond_a_learned_table_read_its_last_row() -> None:
    plain = nn.Embedding(6, 32)
    for table in (plain, plain.to_quantized(32, 8)):
        rows = ClampedPositions(table)(mx.array([[0, 5], [6, 99]]))
        assert mx.array_equal(rows.reshape(4, 32), table(mx.array([0, 5, 5, 5])))


class LooksAtNumbers(nn.Module):
    """A model whose passes cannot be compiled, as they evaluate what they are given."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model

    @property
    def layers(self) -> Any:
        return self.inner.layers

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        if cache is None or hasattr(cache[0], "buffers"):  # not a look at shapes alone
            assert tokens.tolist() is not None
        logits: mx.array = self.inner(tokens, cache=cache)
        return logits


def test_passes_over_few_tokens_are_compiled_where_a_model_can_be(
    target: DecoderOnlyModel,
) -> None:
    """And outputs are the same where it cannot."""
    assert target.passes is not None
    plain = DecoderOnlyModel(LooksAtNumbers(target.model), eos_token_id=EOS, max_context=POSITIONS)
    assert plain.passes is None
    for draft in (None, "lookup", tiny_draft(target)):
        decoders = [SpeculativeDecoder(model, draft, num_draft=3) for model in (target, plain)]
        found, expected = (
            [output.tokens for output in decoder.generate_batch(prompts(5), max_tokens=20)]
            for decoder in decoders
        )
        assert found == expected


def test_threads_compile_passes_of_their_own(target: DecoderOnlyModel) -> None:
    decoder = SpeculativeDecoder(target, tiny_draft(target), num_draft=3)
    expected = decoder.generate(prompts(1)[0], max_tokens=20).tokens
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(lambda _: decoder.generate(prompts(1)[0], max_tokens=20).tokens, range(4))
    assert [*found] == [expected] * 4


def test_changed_weights_count_from_the_next_compilation_on() -> None:
    """Those that are changed before the first generation need none."""
    source, model = (tiny_causal("qwen3", vocab_size=20, layers=2, seed=i) for i in (1, 2))
    decoders = [SpeculativeDecoder(each, "lookup", num_draft=3) for each in (source, model)]
    model.model.update(source.model.parameters())
    expected, found = (decoder.generate([5, 6], max_tokens=20).tokens for decoder in decoders)
    assert found == expected
    other = tiny_causal("qwen3", vocab_size=20, layers=2, seed=3)
    model.model.update(other.model.parameters())
    model.recompile()
    expected = SpeculativeDecoder(other).generate([5, 6], max_tokens=20).tokens
    assert decoders[1].generate([5, 6], max_tokens=20).tokens == expected
