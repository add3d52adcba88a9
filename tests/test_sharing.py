"""Drafts that share their target's encoder: one encoding of each prompt, copies of layers."""

from itertools import product
from typing import Any

from speculative_t5 import SpeculativeDecoder
from speculative_t5.decoding import ModelDrafter
from speculative_t5.models import Quantization, SharingConfig, SharingDraft, copy_layers
from speculative_t5.models.encoder_decoder import EncoderDecoder
from speculative_t5.models.quantization import quantize

import mlx.core as mx
import pytest
from checkpoints import refused
from conftest import EOS, GREEDY, output_logits, tiny_gemma, tiny_model, tiny_sharing

PROMPTS = [[5, 9, 7, 3, EOS], [4, EOS], [12, 13, 6, 2, 8, 9, EOS]]
TOKENS = [[0, 4, 9, 3], [0, 17, 2, 2], [0, 5, 6, 7]]
WIDE = {"d_model": 32, "d_kv": 16, "d_ff": 64}


def make_target(kind: str) -> EncoderDecoder:
    options: dict[str, Any] = {"vocab_size": 20, "layers": 3, "seed": 3}
    if kind in GEMMAS:
        gemma = tiny_gemma(kind, **options)
        gemma.head.cap = 1.0 if kind == "t5gemma" else None  # so low that its lack is seen
        return gemma
    if kind == "tied":
        return tiny_model(**options, **TIED)
    if kind == "quantized":
        model = tiny_model(**options, **WIDE)
        quantize(model, Quantization(8, 32))
        return model
    model = tiny_model(**options, bias_per_layer=kind == "bias_per_layer")
    if kind == "bfloat16":
        model.set_dtype(mx.bfloat16)
    return model


TIED = {"own_head": False, "scale_decoder_outputs": True}
GEMMAS = ("t5gemma", "t5gemma2")
TARGETS = ["plain", "tied", "bias_per_layer", "quantized", "bfloat16", *GEMMAS]


@pytest.mark.parametrize(
    ("layers", "kind", "width"),
    [*product([1], TARGETS, [None]), (2, "plain", None), *product([2], TARGETS, [7])],
)
def test_a_draft_computes_the_same_alone_and_beside_its_target(
    layers: int, kind: str, width: int | None
) -> None:
    draft = tiny_sharing(make_target(kind), layers=layers, d_model=width)
    assert draft.dtype == draft.target.dtype
    session, beside, contexts = draft.start_both(PROMPTS)
    alone, same = draft.start(PROMPTS)
    assert contexts == same == [[0]] * 3
    session.step(mx.array(TOKENS)[:, :2])  # has its own cache
    parts = mx.array(TOKENS)[:, :3], mx.array(TOKENS)[:, 3:]
    given = [mx.concatenate([s.step(part) for part in parts], 1) for s in (alone, beside)]
    assert mx.array_equal(*given)
    assert beside.lengths == [4] * 3 and session.lengths == [2] * 3
    for row, (prompt, tokens) in enumerate(zip(PROMPTS, TOKENS, strict=True)):
        whole = output_logits(draft, prompt, [tokens[1:]])[0].astype(mx.float32)
        largest = mx.max(mx.abs(whole)).item()
        room = (0.05 if kind == "bfloat16" else 1e-4) * largest
        assert mx.allclose(given[0][row].astype(mx.float32), whole, rtol=0, atol=room)


@pytest.mark.parametrize("kind", ["plain", "bias_per_layer", *GEMMAS])
def test_whole_passes_over_blocks_are_those_over_each_tokens_own(kind: str) -> None:
    """A token's masks follow it, whatever tokens do."""
    target, block = make_target(kind), 3
    draft, tokens = tiny_sharing(target, layers=2, block=block), [0, *range(2, 16), 3, 5]
    sources = mx.array(PROMPTS[:1])
    memory, mask = target.encode(sources, None), None
    masks = [20 + i for i in range(block - 1)]
    parts = [tokens, *([each] * len(tokens) for each in masks)]
    x = draft.embed(mx.array([sum(parts, [])]))
    found = draft.logits(draft.decoder.whole(x, memory, mask, block))[0]
    for place in range(len(tokens)):
        alone = draft.embed(mx.array([[*tokens[: place + 1], *masks]]))
        expected = draft.logits(draft.decoder.whole(alone, memory, mask))[0, place:]
        own = found.reshape(block, len(tokens), -1)[:, place]
        assert mx.allclose(own, expected, rtol=1e-4, atol=1e-4), place


@pytest.mark.parametrize("kind", ["plain", "t5gemma2"])
def test_blocks_follow_the_tokens_before_them(kind: str) -> None:
    """Rows that lack different numbers of tokens draft what each does alone, by whole passes."""
    block, num_draft = 3, 7
    draft = tiny_sharing(make_target(kind), layers=2, block=block)
    masks = [20 + i for i in range(block - 1)]
    drafter = ModelDrafter(draft, vocab_size=20)
    drafter.start(PROMPTS)
    contexts = [[0]] * 3
    for accepted in ([7, 0, 3], [0, 7, 6], [1, 2, 5]):
        found = drafter.propose(contexts, num_draft, GREEDY, None)
        for row, (prompt, context) in enumerate(zip(PROMPTS, contexts, strict=True)):
            expected = list[int]()
            while len(expected) < num_draft:
                fed = [*context[1:], *expected, *masks]
                best = mx.argmax(output_logits(draft, prompt, [fed])[0], axis=-1)
                expected += best.tolist()[-block:]
            assert found.tokens[row].tolist() == expected[:num_draft]
        drafted = [row[:n] for row, n in zip(found.tokens.tolist(), accepted, strict=True)]
        contexts = [[*c, *more, 9] for c, more in zip(contexts, drafted, strict=True)]


@pytest.mark.parametrize("kind", TARGETS)
def test_copies_of_all_layers_are_the_target(kind: str) -> None:
    target = make_target(kind)
    draft = tiny_sharing(target, noise=0)
    assert draft.dtype == target.dtype
    session, beside, _ = draft.start_both(PROMPTS)
    expected, found = (s.step(mx.array(TOKENS)).astype(mx.float32) for s in (session, beside))
    # Dequantized matrices are rounded, and multiplied by another kernel.
    room = 1e-2 if kind == "quantized" else 0
    assert mx.allclose(found, expected, rtol=0, atol=room * mx.max(mx.abs(expected)).item())


def test_copied_layers_are_evenly_spaced_and_end_with_the_last() -> None:
    target = make_target("bias_per_layer")
    tables = target.decoder.position_bias.weight.reshape(3, -1)
    for depth, chosen in ((1, [2]), (2, [0, 2]), (3, [0, 1, 2])):
        draft = SharingDraft(target, SharingConfig(depth, 16))
        copy_layers(draft)
        for layer, number in zip(draft.decoder.layers, chosen, strict=True):
            of_target = target.decoder.layers[number].feed_forward.wo.weight
            assert mx.array_equal(layer.feed_forward.wo.weight, of_target)
        own = draft.decoder.position_bias.weight.reshape(depth, -1)
        assert mx.array_equal(own, tables[mx.array(chosen)])


@pytest.mark.parametrize("changes", [{"gated": True}, {"bias_per_layer": True}, TIED, *GEMMAS])
def test_narrower_hidden_states_keep_what_lies_in_fewer_dimensions(changes: Any) -> None:
    """In a T5Gemma only where the norms after matrices have one number for all."""
    sizes: dict[str, Any] = {"vocab_size": 20, "layers": 2}
    target = tiny_gemma(changes, **sizes) if changes in GEMMAS else tiny_model(**sizes, **changes)
    used = mx.arange(16) % 4 != 1
    for name, module in target.named_modules():
        if name in ("shared", "lm_head"):
            module.weight = mx.where(used, module.weight, 0)
        elif name.startswith("decoder") and name.endswith((".out", ".wo")):
            module.weight = mx.where(used[:, None], module.weight, 0)
        elif name.endswith("post_norm"):
            module.weight = mx.full(module.weight.shape, 0.7)
    whole, narrow, too_narrow = (tiny_sharing(target, noise=0, d_model=n) for n in (None, 12, 11))
    assert narrow.decoder.layers[0].feed_forward.wo.weight.shape == (12, 16)
    expected, found, other = (
        output_logits(draft, PROMPTS[0], TOKENS) for draft in (whole, narrow, too_narrow)
    )
    assert mx.allclose(found, expected, rtol=1e-3, atol=1e-3)
    assert not mx.allclose(other, expected, rtol=1e-3, atol=1e-3)


def test_narrow_layers_are_narrower_than_the_target() -> None:
    with refused("d_model must be below 16, the target's, got 16"):
        SharingDraft(make_target("t5gemma2"), SharingConfig(1, 16, d_model=16))


def test_each_prompt_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    target, encoded = make_target("plain"), []
    encoder = type(target.encoder)
    encode = encoder.__call__

    def counted(self: Any, x: mx.array, mask: Any) -> Any:
        encoded.append(x.shape[0])
        return encode(self, x, mask)

    monkeypatch.setattr(encoder, "__call__", counted)
    decoder = SpeculativeDecoder(target, tiny_sharing(target), num_draft=3)
    outputs = decoder.generate_batch(PROMPTS * 3, batch_size=2, max_tokens=12)
    assert sum(encoded) == 9
    assert sum(o.stats.accepted for o in outputs) > 0


def test_rows_of_other_prompts_are_drafted_for_as_new_ones() -> None:
    """After rounds that draft nothing, too, and after rows were dropped."""
    target = make_target("plain")
    draft = tiny_sharing(target, noise=0.3)
    drafter, fresh = (ModelDrafter(draft, 20) for _ in range(2))
    session, beside, _ = draft.start_both(PROMPTS)
    drafter.start(PROMPTS, beside)
    drafter.propose(TOKENS, 3, GREEDY, None)
    new = [9, 9, 3, EOS]
    (encoded,) = session.encode([new])
    assert session.replace([1], [encoded]) == [[0]]
    assert beside.replace([1], beside.encode([new])) == [[0]]
    assert beside.lengths == [6, 0, 6]
    drafter.replace([1], [new])
    prompts, contexts = [PROMPTS[0], new, PROMPTS[2]], [[*TOKENS[0], 8], [0], [*TOKENS[2], 5]]
    drafter.propose(contexts, 0, GREEDY, None)
    contexts[1] = [0, 8, 5]
    drafter.propose(contexts, 0, GREEDY, None)
    kept = [2, 1]
    for rows in (range(3), kept):
        fresh.start([prompts[row] for row in rows])
        given = [contexts[row] for row in rows]
        expected = fresh.propose(given, 4, GREEDY, None).tokens.tolist()
        assert drafter.propose(given, 4, GREEDY, None).tokens.tolist() == expected
        if rows is not kept:
            session.select(kept)
            drafter.select(kept)


@pytest.mark.parametrize("width", [None, 12])
def test_a_draft_follows_its_recompiled_target(width: int | None) -> None:
    target = make_target("tied")
    draft = tiny_sharing(target, d_model=width)
    before = draft.start(PROMPTS[:1])[0].step(mx.array(TOKENS[:1]))
    target.shared.weight = -2 * target.shared.weight
    target.recompile()
    after = draft.start(PROMPTS[:1])[0].step(mx.array(TOKENS[:1]))
    expected = output_logits(draft, PROMPTS[0], [TOKENS[0][1:]])
    assert mx.allclose(after, expected, rtol=0, atol=1e-3 * mx.max(mx.abs(expected)).item())
    assert not mx.allclose(after, before, atol=0.1)


def test_drafts_that_do_not_go_with_the_target_are_refused() -> None:
    target = make_target("plain")
    draft = tiny_sharing(target)
    with refused("shares the encoder of another model"):
        SpeculativeDecoder(make_target("plain"), draft)
    target.set_dtype(mx.bfloat16)
    with refused("the draft computes in float32, and its target in bfloat16"):
        SpeculativeDecoder(target, draft)


def test_a_draft_says_the_same_of_itself_each_time_without_making_it_again() -> None:
    target = make_target("plain")
    draft = SharingDraft(target, SharingConfig(1, 16, block=3))
    assert draft.info is draft.info and draft.info.block == 3
    assert draft.info.vocab_size == target.info.vocab_size
    # The target is no part of the draft, whose weights are its own alone.
    assert draft.target is target and "target" not in draft.children()
