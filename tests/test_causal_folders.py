"""Folders of decoder-only models, as transformers and mlx-lm save them."""

import json
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

from speculative_t5 import SpeculativeDecoder, load
from speculative_t5.causal import DecoderOnlyModel, decoder_only
from speculative_t5.checkpoints import ModelFolder, list_models, registered
from speculative_t5.kernels import takes_stored

import mlx.core as mx
import numpy as np
import pytest
from checkpoints import POST_NORM, SHAPES, as_first_gpt2, refused, write_causal, write_tokenizer
from conftest import edit_json, needs_layers
from mlx.utils import tree_flatten

pytest.importorskip("mlx_lm")
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    **{kind: (kind, {}) for kind in SHAPES},
    "gpt2 as first saved": ("gpt2", {}),
    "opt normed behind": ("opt", POST_NORM),
    "opt without biases": ("opt", {"enable_bias": False, "activation_function": "gelu"}),
    "qwen2": ("qwen2", SHAPES["llama"] | {"rope_theta": 500.0}),
    "llama with scaled rotations": ("llama", {"rope_parameters": SCALED}),
}
TOKENS = [[5, 17, 260, 3, 99, 1, 42, 8, 8, 310], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]]
MOST = 24  # tokens of an output


def write_kind(folder: Path, name: str, **changes: Any) -> Any:
    """Save a model of `KINDS`; returns that of transformers."""
    kind, own = KINDS[name]
    if kind not in SHAPES:  # with the shape of another
        SHAPES[kind] = own
        own = {}
    reference = write_causal(folder, kind, **own, **changes)
    if name == "gpt2 as first saved":
        as_first_gpt2(folder)
    return reference


@pytest.fixture(autouse=True)
def shapes() -> Iterator[None]:
    before = dict(SHAPES)
    yield
    for name in {*SHAPES} - {*before}:
        del SHAPES[name]


@pytest.mark.parametrize("name", KINDS)
def test_logits_and_outputs_match_transformers(name: str, tmp_path: Path) -> None:
    """Logits of whole sequences and of a session's steps; 60 greedy outputs, with a draft."""
    import torch

    reference = write_kind(tmp_path / "target", name)
    write_kind(tmp_path / "draft", name, seed=1)
    with torch.no_grad():
        expected = reference(torch.tensor(TOKENS)).logits.numpy()
    model, tokenizer = load(tmp_path / "target", dtype="float32")
    session, _ = model.start([row[:4] for row in TOKENS])
    steps = [session.step(mx.array([row[a:b] for row in TOKENS])) for a, b in ((3, 6), (6, 10))]
    for ours, theirs in (
        (model(mx.array(TOKENS)), expected),  # type: ignore[call-arg]
        (mx.concatenate(steps, axis=1), expected[:, 3:]),
    ):
        np.testing.assert_allclose(np.array(ours), theirs, atol=1e-4, rtol=1e-4)
    assert model.info.max_context == 64 and model.info.eos_token_ids == {0}
    assert tokenizer is not None and model.info.vocabulary == tokenizer.vocabulary
    draft, _ = load(tmp_path / "draft", dtype="float32")
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, 300, rng.integers(1, 20)).tolist() for _ in range(60)]
    decoder = SpeculativeDecoder(model, draft, tokenizer, num_draft=4)
    outputs = decoder.generate_batch(prompts, max_tokens=MOST, batch_size=16)
    for prompt, output in zip(prompts, outputs, strict=True):
        found = reference.generate(
            torch.tensor([prompt]), max_new_tokens=MOST, do_sample=False, pad_token_id=0
        )
        theirs = found[0, len(prompt) :].tolist()
        ended = output.finish_reason == "eos"
        assert [*output.tokens, *[0] * ended] == theirs


def test_ids_that_a_checkpoint_forbids_are_forbidden(tmp_path: Path) -> None:
    """Everywhere, and at the beginning, as transformers has it; no first token is forced."""
    import torch

    reference = write_kind(tmp_path, "gpt2")
    prompts = [[5, 6, 7], [9, 30, 2, 4], [8, 8]]

    def outputs() -> tuple[list[list[int]], list[list[int]]]:
        decoder = SpeculativeDecoder.from_pretrained(tmp_path, "lookup", num_draft=3)
        done = decoder.generate_batch(prompts, max_tokens=MOST)
        model = type(reference).from_pretrained(tmp_path)
        found = [
            model.generate(torch.tensor([prompt]), max_new_tokens=MOST, pad_token_id=0)[0]
            for prompt in prompts
        ]
        theirs = [each[len(prompt) :].tolist() for each, prompt in zip(found, prompts, strict=True)]
        return [[*d.tokens, *[0] * (d.finish_reason == "eos")] for d in done], theirs

    plain, theirs = outputs()
    assert plain == theirs
    settings = {
        "suppress_tokens": [plain[0][1]],
        "begin_suppress_tokens": [plain[1][0]],
        "forced_bos_token_id": 3,
        "eos_token_id": 0,
    }
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    ours, theirs = outputs()
    assert ours == theirs != plain


def test_weights_of_torch_are_read(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    for kind in ("gpt2", "opt"):
        folder = tmp_path / kind
        write_kind(folder, kind)
        before = load(folder)[0](mx.array(TOKENS))  # type: ignore[call-arg]
        weights = folder / "model.safetensors"
        stored = load_file(weights)
        if kind == "gpt2":  # as older versions of transformers have saved them
            mask = torch.tril(torch.ones(64, 64)).view(1, 1, 64, 64)
            for layer, mask_type in enumerate((torch.bool, torch.uint8)):
                stored[f"transformer.h.{layer}.attn.bias"] = mask.to(mask_type)
                stored[f"transformer.h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
        torch.save(stored, folder / "pytorch_model.bin")
        weights.unlink()
        assert mx.array_equal(load(folder)[0](mx.array(TOKENS)), before)  # type: ignore[call-arg]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("kind", ["gpt2", "qwen3"])
def test_folders_that_mlx_lm_has_quantized(
    bits: int, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they are: logits are those of mlx-lm's own model."""
    from mlx_lm.convert import convert
    from mlx_lm.utils import load_model

    size: dict[str, Any] = {"n_embd": 64, "n_head": 2}
    if kind == "qwen3":
        size = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 32}
    write_kind(tmp_path / "whole", kind, **size)
    if kind == "gpt2":
        as_first_gpt2(tmp_path / "whole")
    quantized = str(tmp_path / "small")
    convert(str(tmp_path / "whole"), quantized, quantize=True, q_bits=bits, q_group_size=32)
    model, _ = load(quantized)
    reference, _ = load_model(Path(quantized))
    reference.set_dtype(mx.float32)
    expected, found = reference(mx.array(TOKENS)), model(mx.array(TOKENS))  # type: ignore[call-arg]
    # Where integers are multiplied, activations have 16 bits.
    np.testing.assert_allclose(np.array(found), np.array(expected), atol=0.05)
    kinds = {weight.dtype for _, weight in tree_flatten(model.model.parameters())}  # type: ignore
    assert mx.uint32 in kinds
    monkeypatch.setenv("SPECULATIVE_T5_WEIGHTS", str(tmp_path))
    listed = {each.folder.name: each for each in list_models()}
    assert listed["small"].stored == (f"{bits} bits",) and not listed["small"].error
    # Scales and biases, of 32 numbers each, count as well.
    assert 1 < listed["small"].num_parameters / listed["whole"].num_parameters < 1.1
    assert (
        SpeculativeDecoder(model, model, num_draft=3).generate(TOKENS[0], max_tokens=MOST).tokens
        == SpeculativeDecoder(model).generate(TOKENS[0], max_tokens=MOST).tokens
    )


@needs_layers
def test_matrices_of_16_bits_stay_as_they_are_stored(tmp_path: Path) -> None:
    """Arithmetic is float32: outputs are those of the same weights in float32."""
    for kind in ("gpt2", "opt", "qwen3"):
        folder = tmp_path / kind
        write_kind(folder, kind, dtype="bfloat16")
        model: Any = load(folder)[0]
        assert takes_stored()
        stored = {weight.dtype for _, weight in tree_flatten(model.model.parameters())}
        assert stored == {mx.bfloat16, mx.float32}
        assert model.shapes[0][2] == mx.float32
        whole: Any = load(folder)[0]
        whole.model.set_dtype(mx.float32)
        found, expected = model(mx.array(TOKENS)), whole(mx.array(TOKENS))
        np.testing.assert_allclose(np.array(found), np.array(expected), atol=1e-4)


def test_each_end_that_a_folder_names_ends_outputs(tmp_path: Path) -> None:
    write_causal(tmp_path)
    edit_json(tmp_path / "generation_config.json", eos_token_id=[7, 0])
    assert load(tmp_path)[0].info.eos_token_ids == {0, 7}
    for name in ("generation_config.json", "config.json"):
        edit_json(tmp_path / name, eos_token_id=None)
    assert load(tmp_path)[0].info.eos_token_ids == {0}  # its tokenizer's
    edit_json(tmp_path / "tokenizer_config.json", eos_token=None)
    with refused("nothing ends an output"):
        load(tmp_path)
    edit_json(tmp_path / "config.json", eos_token_id=[10**6])  # that no row stands for
    edit_json(tmp_path / "tokenizer_config.json", eos_token="<|endoftext|>")
    assert load(tmp_path)[0].info.eos_token_ids == {0}


def test_other_weights_in_the_folder_are_not_mixed_in(tmp_path: Path) -> None:
    write_causal(tmp_path)
    (tmp_path / "model.fp16.safetensors").write_bytes(b"others")
    with refused("holds other weights beside its own, model.fp16.safetensors"):
        load(tmp_path)


def test_matrices_that_are_stored_transposed_are_in_order(tmp_path: Path) -> None:
    """Or each pass would copy them."""
    write_causal(tmp_path, "gpt2", dtype="bfloat16")
    model: Any = load(tmp_path)[0]
    for name, weight in tree_flatten(model.model.parameters()):
        strides = memoryview(weight.astype(mx.float32) if weight.ndim < 2 else weight).strides
        assert sorted(strides or (), reverse=True) == list(strides or ()), name


def test_rows_that_are_read_otherwise_side_by_side_are_refused(tmp_path: Path) -> None:
    """Gemma 2 takes a mask by row for one by head, in mlx-lm 0.32."""
    shape = SHAPES["llama"] | {"head_dim": 8, "tie_word_embeddings": True, "sliding_window": 48}
    for heads in (2, 3):
        SHAPES["gemma2"] = shape | {"num_attention_heads": 6, "num_key_value_heads": heads}
        write_causal(tmp_path / str(heads), "gemma2")
        with refused("cannot read rows of different lengths side by side", tmp_path):
            load(tmp_path / str(heads))


def test_an_entry_point_that_is_broken_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_causal(tmp_path)
    for value, message in (
        ("absent_module:family", "cannot be loaded .ModuleNotFoundError: "),
        ("json:dumps", "is no Family"),
    ):
        points = [EntryPoint("qwen3", value, registered.GROUP)]
        monkeypatch.setattr(registered, "entry_points", lambda group, points=points: points)
        registered._registered.cache_clear()
        with refused(f"the entry point qwen3 of the group .* {message}"):
            load(tmp_path)
    registered._registered.cache_clear()


def test_a_text_begins_with_one_begin_token(tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    write_causal(tmp_path)
    backend = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.post_processor = TemplateProcessing(
        single="<|user|> $A", pair="<|user|> $A $B", special_tokens=[("<|user|>", 1)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    edit_json(tmp_path / "tokenizer_config.json", bos_token="<|user|>")
    tokenizer: Any = load(tmp_path)[1]
    plain = tokenizer.encode("He go")
    assert plain[0] == 1 and plain.count(1) == 1
    assert tokenizer.encode("<|user|>He go") == plain
    assert tokenizer.decode([*plain, 310]) == "He go"


def test_a_window_of_attention_bounds_the_context(tmp_path: Path) -> None:
    """Where mlx-lm's model has plain caches, and would look beyond it."""
    write_causal(tmp_path)
    edit_json(tmp_path / "config.json", sliding_window=32, use_sliding_window=False)
    assert load(tmp_path)[0].info.max_context == 64
    edit_json(tmp_path / "config.json", use_sliding_window=True)
    assert load(tmp_path)[0].info.max_context == 32


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("gpt2", {"activation_function": "relu"}, "activation_function in config.json is 'relu'"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("gpt2", {"n_positions": 0}, "n_positions"),
        ("opt", {"activation_function": "silu"}, "expected relu or gelu"),
        ("opt", {"tie_word_embeddings": False}, "expected true for an OPT"),
        ("opt", {"vocab_size": "many"}, "vocab_size in config.json is 'many'"),
        ("gpt2", {"n_layer": 10**9}, "n_layer in config.json"),
        ("opt", {"num_attention_heads": 5}, "expected a divisor of hidden_size, which is 24"),
        ("opt", {"activation_function": ["relu"]}, "expected relu or gelu"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act in config.json is 'gelu', expected silu"),
        ("llama", {"model_type": "glm"}, "whose heads mlx-lm rotates as a whole"),
        (
            "qwen3",
            {"model_type": "nonsense"},
            "this is a nonsense .model_type in config.json., which mlx-lm does not have",
        ),
        ("qwen3", {"hidden_size": 32}, "mlx-lm cannot make a model of"),
        ("qwen3", {"model_file": "code.py"}, "mlx-lm cannot make a model of"),
    ],
)
def test_folders_that_cannot_be_run_are_refused(
    kind: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_causal(tmp_path, kind)
    edit_json(tmp_path / "config.json", **changes)
    with refused(message, tmp_path):
        load(tmp_path)


@pytest.mark.parametrize(
    ("kind", "changes", "cache"),
    [
        (
            "gemma3_text",
            {"sliding_window": 8, "head_dim": 8, "tie_word_embeddings": True},
            "RotatingKVCache",
        ),
        ("mamba", {"state_size": 4, "expand": 2}, "ArraysCache"),
    ],
)
def test_windows_and_state_spaces_are_refused_by_name(
    kind: str, changes: dict[str, Any], cache: str, tmp_path: Path
) -> None:
    SHAPES[kind] = SHAPES["llama"] | changes
    write_causal(tmp_path, kind)
    with refused(f"keeps its context in {cache}, which cannot be rewound row by row", tmp_path):
        load(tmp_path)


def test_without_mlx_lm_a_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_causal(tmp_path)
    monkeypatch.delitem(sys.modules, "speculative_t5.causal.gpt2", raising=False)
    monkeypatch.delattr("speculative_t5.causal.gpt2", raising=False)
    monkeypatch.setitem(sys.modules, "mlx_lm.models", None)
    with refused(r"run pip install 'speculative-t5\[causal\]'$"):
        load(tmp_path)


def test_a_family_may_be_registered_by_its_own_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes before what is registered for all decoder-only models."""
    write_causal(tmp_path)
    points = [
        EntryPoint("decoder-only", "speculative_t5.causal:decoder_only", registered.GROUP),
        EntryPoint("qwen3", "test_causal_folders:FakeFamily", registered.GROUP),
    ]
    monkeypatch.setattr(registered, "entry_points", lambda group: points)
    registered._registered.cache_clear()
    try:
        assert ModelFolder(tmp_path).family is FakeFamily
        edit_json(tmp_path / "config.json", model_type="gpt2")
        assert ModelFolder(tmp_path).family is decoder_only
        edit_json(tmp_path / "config.json", model_type="t5")
        assert ModelFolder(tmp_path).family is None
        edit_json(tmp_path / "config.json", model_type="gpt2", architectures=["A" + "ForMaskedLM"])
        assert ModelFolder(tmp_path).family is None
    finally:
        registered._registered.cache_clear()


class FakeFamily:
    """Stands for one of another package."""

    @staticmethod
    def load() -> None: ...


def test_models_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECULATIVE_T5_WEIGHTS", str(tmp_path))
    for name, layers in (("large", 2), ("small", 1)):
        write_causal(tmp_path / name, num_hidden_layers=layers)
    write_causal(tmp_path / "broken", "opt")
    edit_json(tmp_path / "broken" / "config.json", vocab_size=0)
    (tmp_path / "empty").mkdir()
    write_tokenizer(tmp_path / "empty")
    (tmp_path / "empty" / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    found = {model.folder.name: model for model in list_models()}
    large, small = found["large"], found["small"]
    assert large.family == "qwen3 (decoder-only)" and large.drafts == ("small",)
    assert large.num_parameters > small.num_parameters > 320 * 24
    assert large.stored == ("float32",) and large.default_type is not None
    assert "vocab_size in config.json is 0" in str(found["broken"].error)
    assert "empty" not in found  # as other folders without weights


def test_a_draft_has_to_be_of_the_same_kind(tmp_path: Path) -> None:
    write_causal(tmp_path)
    with refused("the target is an encoder-decoder, the draft is decoder-only"):
        SpeculativeDecoder.from_pretrained("correct-small", draft=tmp_path)
    with refused("takes no adapter"):
        adapter = tmp_path / "adapter"
        adapter.mkdir()
        settings = {"peft_type": "LORA", "base_model_name_or_path": tmp_path.name, "r": 2}
        (adapter / "adapter_config.json").write_text(json.dumps(settings))
        load(tmp_path, adapter=adapter)
    assert isinstance(load(tmp_path)[0], DecoderOnlyModel)
