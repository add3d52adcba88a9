"""Tiny checkpoints and models, made here: nothing is downloaded."""

import atexit
import dataclasses
import functools
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

# Read by the package as MLX is loaded: on a Mac, too, tests compute on the CPU.
os.environ["SPECULATIVE_T5_DEVICE"] = (
    "gpu" if os.environ.get("SPECULATIVE_T5_TEST_DEVICE") == "gpu" else "cpu"
)

from speculative_t5 import SpeculativeDecoder, device
from speculative_t5.causal import DecoderOnlyModel, opt
from speculative_t5.checkpoints.conversion import convert
from speculative_t5.checkpoints.loading import load
from speculative_t5.decoding.history import NO_TOKEN
from speculative_t5.decoding.logits import nothing_allowed
from speculative_t5.decoding.sampling import Groups, Sampler
from speculative_t5.kernels import accelerate, layers
from speculative_t5.models import SharingConfig, SharingDraft, additive, copy_layers
from speculative_t5.models.config import T5GEMMA_TYPES, T5Config
from speculative_t5.models.t5 import T5
from speculative_t5.models.t5gemma import T5Gemma
from speculative_t5.models.t5gemma_config import T5GemmaConfig

import browsing
import mlx.core as mx
import numpy as np
import pytest
from families import SHAPE, train_spiece, write_model
from lacking_packages import pytest_make_collect_report, pytest_runtest_makereport  # noqa: F401
from mlx.utils import tree_map, tree_map_with_path
from reference import transformed_rows

REPOSITORY = Path(__file__).parent.parent
needs_layers = pytest.mark.skipif(layers.library is None, reason="the layers were not built")

# Tests neither see nor change the models that the user of this machine has converted, nor what
# draft lengths have gained here.
OWN_DATA = tempfile.TemporaryDirectory(prefix="speculative-t5-data-")
atexit.register(OWN_DATA.cleanup)
os.environ["XDG_DATA_HOME"] = os.environ["XDG_CACHE_HOME"] = OWN_DATA.name
os.environ.pop("SPECULATIVE_T5_WEIGHTS", None)
os.environ["SPECULATIVE_T5_TIPS"] = "0"  # a machine's lacks add no lines to outputs

# The processes that tests start stay on the CPU, whose outputs in float32 are known. So do tests
# marked `cpu` if others are to use the GPU.
IMITATED = os.environ.get("SPECULATIVE_T5_TEST_DEVICE") == "imitated"  # the CPU, taken for a GPU
CHOSEN, ON_CPU = mx.default_device(), device.on_cpu
os.environ["SPECULATIVE_T5_DEVICE"] = "cpu"


# Every T5's decoder uses all kernels for Metal, which the CPU runs: slow, for a few files.
WITH_METAL = os.environ.get("SPECULATIVE_T5_TEST_METAL") == "1"


def pytest_report_header() -> str:
    with_metal = ", kernels for Metal on the CPU" * WITH_METAL
    return f"MLX computes on {CHOSEN}{', taken for a GPU' * IMITATED}{with_metal}"


def pytest_sessionstart() -> None:
    if WITH_METAL:
        from metal import everywhere

        everywhere.use()


def pytest_sessionfinish(session: pytest.Session) -> None:
    if WITH_METAL:
        from metal import everywhere

        print(f"\nkernels for Metal were called {everywhere.calls()} times")
        if not everywhere.calls():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(tryfirst=True)  # before fixtures make models
def pytest_runtest_setup(item: pytest.Item) -> None:
    # For all threads: MLX has one default device, and each thread its own streams on it.
    needs_cpu = item.get_closest_marker("cpu") is not None
    mx.set_default_device(mx.cpu if needs_cpu else CHOSEN)
    device.on_cpu = (lambda: False) if IMITATED and not needs_cpu else ON_CPU
    if item.get_closest_marker("forks") and mx.cuda.is_available():
        pytest.skip("a process that has imported MLX for CUDA cannot be forked")
    if item.get_closest_marker("linux") and not sys.platform.startswith("linux"):
        pytest.skip("needs Linux")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


V1_0: dict[str, Any] = SHAPE | {"feed_forward_proj": "relu", "tie_word_embeddings": True}
V1_1: dict[str, Any] = {
    "d_model": 32, "d_kv": 16, "num_heads": 5, "d_ff": 48, "num_layers": 3,
    "num_decoder_layers": 1, "vocab_size": 320, "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(scope="session")
def spiece() -> bytes:
    """A SentencePiece model of 120 pieces in T5's layout."""
    return train_spiece(pad_id=0, eos_id=1, unk_id=2, bos_id=-1)


@pytest.fixture(scope="session")
def lacking(tmp_path_factory: pytest.TempPathFactory, spiece: bytes) -> Path:
    """A converted random model whose vocabulary lacks most characters."""
    folder = tmp_path_factory.mktemp("lacking")
    write_checkpoint(folder / "source", V1_0, spiece)
    return convert(str(folder / "source"), folder / "converted")


def write_checkpoint(folder: Path, shape: dict[str, Any], spiece: bytes, seed: int = 0) -> Any:
    """Save a random transformers model and a tokenizer; returns the model (torch)."""
    config = shape | {"pad_token_id": 0, "eos_token_id": 1}
    model = write_model(folder, config, own_head=not shape["tie_word_embeddings"], seed=seed)
    (folder / "spiece.model").write_bytes(spiece)
    return model


@pytest.fixture(scope="session", params=["v1_0", "v1_1"])
def pair(request: Any, tmp_path_factory: Any, spiece: bytes) -> tuple[Any, T5]:
    """The same random model in transformers (torch) and here, float32."""
    folder = tmp_path_factory.mktemp(request.param)
    source = folder / "checkpoint"
    reference = write_checkpoint(source, V1_0 if request.param == "v1_0" else V1_1, spiece)
    convert(str(source), folder / "converted")
    return reference, load(folder / "converted", dtype=mx.float32)[0]


def tiny_model(*, vocab_size: int = 5, seed: int = 0, layers: int = 1, **changes: Any) -> T5:
    """A random model over a few tokens, float32."""
    options = {
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 16,
        "num_heads": 2,
        "num_layers": 1,
        "num_decoder_layers": layers,
        "vocab_size": vocab_size,
        "own_head": True,
        "scale_decoder_outputs": False,
    } | changes
    model = T5(T5Config(**options))
    mx.random.seed(seed)
    # Heavier than usual, so that outputs depend on everything before them and do not just repeat.
    model.apply(lambda x: mx.random.normal(x.shape))
    if model.config.own_head:
        model.lm_head.weight = model.lm_head.weight * 0.25
    mx.eval(model.parameters())
    accelerate(model)
    return model


def tiny_gemma(
    kind: str, *, vocab_size: int = 5, seed: int = 0, layers: int = 1, **changes: Any
) -> T5Gemma:
    """A random T5Gemma over a few tokens, float32; an output is longer than its window."""
    stack = {
        "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 8, "num_hidden_layers": layers,
        "sliding_window": 4, "query_pre_attn_scalar": 4, "vocab_size": vocab_size,
        "sliding_window_pattern": 2, "attn_logit_softcapping": 20.0,
    }  # fmt: skip
    config = {
        "model_type": kind,
        "decoder": stack,
        "tie_word_embeddings": False,
        "encoder": stack | {"hidden_size": 24 if kind == "t5gemma" else 16},
        "bos_token_id": 0,
        "pad_token_id": 0,
        "eos_token_id": EOS,
    }
    model = T5Gemma(T5GemmaConfig.from_dict(config | changes))
    mx.random.seed(seed + 14)  # below, some models say the same to everything
    model.update(tree_map_with_path(random_weight, model.parameters()))
    model.lm_head.weight = model.lm_head.weight * 0.4
    mx.eval(model.parameters())
    accelerate(model)
    return model


def causal_config(kind: str, size: int, *, vocab_size: int, layers: int) -> dict[str, Any]:
    """A config.json of a decoder-only model of mlx-lm with two heads."""
    return {
        "model_type": kind,
        "vocab_size": vocab_size,
        "max_position_embeddings": POSITIONS,
        "hidden_size": size,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "intermediate_size": size,
        "num_key_value_heads": 1,
        "head_dim": size // 2,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "tie_word_embeddings": kind != "llama",
        # GPT-2's.
        "n_embd": size,
        "n_head": 2,
        "n_layer": layers,
        "n_positions": POSITIONS,
        "n_ctx": POSITIONS,
        "layer_norm_epsilon": 1e-5,
        # OPT's.
        "ffn_dim": size,
    }


def build_causal(config: dict[str, Any]) -> Any:
    """The model that a config.json describes, of mlx-lm or ours; tests are skipped without it."""
    pytest.importorskip("mlx_lm")
    if config["model_type"] == "opt":
        return opt.OPT(opt.OPTConfig.from_dict(config))
    module = import_module(f"mlx_lm.models.{config['model_type']}")
    return module.Model(module.ModelArgs.from_dict(config))


def tiny_causal(
    kind: str = "gpt2", *, vocab_size: int = 5, seed: int = 0, layers: int = 1
) -> DecoderOnlyModel:
    """A random decoder-only model of mlx-lm over a few tokens, float32, which ends by id 1."""
    model: Any = build_causal(causal_config(kind, 16, vocab_size=vocab_size, layers=layers))
    mx.random.seed(seed)
    model.update(tree_map_with_path(random_weight, model.parameters()))
    mx.eval(model.parameters())
    return DecoderOnlyModel(model, eos_token_id=EOS, max_context=POSITIONS)


LAST_NORMS = ("model.norm.", "model.ln_f.")


def random_weight(name: str, like: mx.array) -> mx.array:
    """A heavy matrix, a norm's weight about 1, a bias about 0; less before the head."""
    if like.ndim > 1:
        return mx.random.normal(like.shape) * 0.7
    vector = mx.random.normal(like.shape) * 0.2 + (not name.endswith("bias"))
    return vector * 0.4 if name.startswith(LAST_NORMS) else vector


EOS = 1  # of all tiny models
GREEDY = Groups([Sampler()])  # of any number of rows
POSITIONS = 256
# That tests of the loop go through; test_causal.py has the others.
KINDS = ("t5", "t5gemma", "t5gemma2", "qwen3")
# A T5 whose draft shares its encoder, and proposes a token or a block in a pass.
SHARING = {"sharing": 1, "blocks": 2}  # by the block of the draft
NARROW = {"sharing": None, "blocks": 12}  # and the width of its layers
PAIRS = (*KINDS, *SHARING)
# Of two layers over 20 tokens: outputs that vary, some ending by EOS and some at a limit.
VARIED = {
    "t5": 3,
    "t5gemma": 6,
    "t5gemma2": 3,
    "gpt2": 26,
    "opt": 26,
    "qwen3": 9,
    "sharing": 3,
    "blocks": 3,
}


def tiny(kind: str = "t5", **options: Any) -> T5 | DecoderOnlyModel:
    """A tiny random model of any kind, see `PAIRS`."""
    if kind in ("t5", *SHARING):
        return tiny_model(**options)
    return tiny_gemma(kind, **options) if kind in T5GEMMA_TYPES else tiny_causal(kind, **options)


def unrelated_pair(kind: str, *, seeds: tuple[int, int] = (0, 1), **options: Any) -> Any:
    """A tiny random target, and a draft that has other random weights."""
    target = tiny(kind, seed=seeds[0], **options)
    if kind not in SHARING:
        return target, tiny(kind, seed=seeds[1], **options)
    block = SHARING[kind]
    config = SharingConfig(options.get("layers", 1), 16, block=block, d_model=NARROW[kind])
    draft = SharingDraft(target, config)
    mx.random.seed(seeds[1])
    draft.apply(lambda x: mx.random.normal(x.shape))
    accelerate(draft)
    return target, draft


def output_logits(model: Any, prompt: list[int], outputs: list[Sequence[int]]) -> mx.array:
    """Logits (N, L + 1, V) of each token of some outputs of L, and of what follows; in one pass."""
    if isinstance(model, DecoderOnlyModel):
        return model(mx.array([[*prompt, *output] for output in outputs]))[:, len(prompt) - 1 :]
    sources = mx.array([prompt] * len(outputs))
    tokens = mx.array([[0, *output] for output in outputs])
    if isinstance(model, SharingDraft):
        mask = additive(sources != 0, model.dtype)
        memory = model.encode(sources, mask)
        return model.logits(model.decoder.whole(model.embed(tokens), memory, mask))
    return model(sources, tokens)


def output_distribution(
    model: Any, prompt: list[int], max_tokens: int, sampler: Sampler
) -> dict[tuple[int, ...], float]:
    """Return the exact distribution of whole outputs (EOS included), by enumeration.

    Outputs that nothing can follow before they end have `NO_TOKEN` as their last token.
    """
    masses: dict[tuple[int, ...], float] = {}
    open_prefixes: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    for length in range(max_tokens):
        prefixes = [prefix for prefix, _ in open_prefixes]
        logits = output_logits(model, prompt, prefixes)[:, -1]
        if sampler.transform:
            before = prompt if isinstance(model, DecoderOnlyModel) else [0]
            logits = transformed_rows(sampler.transform, logits, before, prefixes)
        nothing = np.array(nothing_allowed(logits))
        probs = np.array(sampler.probs(logits), np.float64)
        extended = [
            ((*prefix, token), mass * p)
            for (prefix, mass), row, dead in zip(open_prefixes, probs, nothing, strict=True)
            for token, p in ([(NO_TOKEN, 1.0)] if dead else enumerate(row / row.sum()))
        ]
        ends = (EOS, NO_TOKEN)
        ended = [e for e in extended if e[0][-1] in ends or length == max_tokens - 1]
        masses.update(ended)
        open_prefixes = [e for e in extended if e[0] not in masses]
    return masses


def tiny_pair(kind: str, *, noise: float = 0.1, **options: Any) -> Any:
    """A tiny random target, and a draft that often agrees with it."""
    target = tiny(kind, **options)
    if kind not in SHARING:
        return target, tiny_draft(target, noise=noise)
    return target, tiny_sharing(target, noise=noise, block=SHARING[kind], d_model=NARROW[kind])


def tiny_sharing(
    target: T5,
    *,
    layers: int | None = None,
    noise: float = 0.1,
    block: int = 1,
    d_model: int | None = None,
) -> SharingDraft:
    """A sharing draft of copies of its target's layers, by default all, with noise on them."""
    depth, d_ff = layers or target.config.num_decoder_layers, target.config.d_ff
    draft = SharingDraft(target, SharingConfig(depth, d_ff, block=block, d_model=d_model))
    copy_layers(draft)
    mx.random.seed(99)
    draft.apply(lambda x: x + noise * mx.random.normal(x.shape).astype(x.dtype))
    mx.eval(draft.parameters())
    accelerate(draft)
    return draft


def tiny_draft(
    target: Any, *, noise: float = 0.1, vocab_size: int | None = None, block: int = 0
) -> Any:
    """A draft that often agrees with its target: the target with noise on its weights.

    With a block, it shares the target's encoder.
    """
    if block:
        return tiny_sharing(target, noise=noise, block=block)
    size = vocab_size or target.info.vocab_size

    def resized(weight: mx.array) -> mx.array:
        if weight.shape[0] == target.info.vocab_size:
            kept = weight[:size]
            weight = mx.concatenate([kept, mx.zeros((size - len(kept), weight.shape[1]))])
        return weight + noise * mx.random.normal(weight.shape)

    if isinstance(target, DecoderOnlyModel):
        args = dataclasses.replace(target.model.args, vocab_size=size)
        new = type(target.model)(args)
        draft: Any = DecoderOnlyModel(new, eos_token_id=EOS, max_context=target.info.max_context)
        module, source = draft.model, target.model
    else:
        draft = module = type(target)(dataclasses.replace(target.config, vocab_size=size))
        source = target
    mx.random.seed(99)  # a new model has sampled random weights
    module.update(tree_map(resized, source.parameters()))
    mx.eval(module.parameters())
    if module is draft:
        accelerate(module)
    return draft


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory, spiece: bytes) -> Path:
    """A folder with a checkpoint, and weights/target and weights/draft from it."""
    place = tmp_path_factory.mktemp("place")
    write_checkpoint(place / "checkpoint", V1_0, spiece)
    target = convert(str(place / "checkpoint"), place / "weights" / "target")
    for name in ("draft", "other"):
        shutil.copytree(target, place / "weights" / name)
    (place / "weights" / "other" / "tokenizer_config.json").write_text('{"extra_ids": 3}')
    (place / "bert").mkdir()
    (place / "bert" / "config.json").write_text('{"model_type": "bert"}')
    return place


@pytest.fixture(scope="module")
def loaded_once() -> Iterator[None]:
    """Let the commands of a module share a decoder where they load the same one."""
    with pytest.MonkeyPatch.context() as patch:
        cached = functools.cache(SpeculativeDecoder.from_pretrained)
        patch.setattr(SpeculativeDecoder, "from_pretrained", staticmethod(cached))
        yield


@pytest.fixture
def here(place: Path) -> Path:
    """The folder in which `call` runs commands, unless a module has its own."""
    return place


@pytest.fixture
def call(here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Any:
    """A function that runs a command, see `commands.caller`."""
    from commands import caller  # which imports this module

    return caller(here, monkeypatch, capfd)


# A browser, for the server's page:


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=browsing.BROWSER, args=["--no-sandbox"])


@pytest.fixture
def page(chromium: Any) -> Iterator[Any]:
    """A tab."""
    with chromium.new_page() as made:
        made.set_default_timeout(1000 * browsing.SECONDS)
        yield made


@pytest.fixture
def logged(page: Any) -> list[str]:
    """What the page logs, its errors and violated policies included."""
    found: list[str] = []
    page.on("console", lambda message: found.append(message.text))
    page.on("pageerror", lambda error: found.append(str(error)))
    return found
