"""Folders of drafts that share their target's encoder: which targets they fit, and commands."""

import copy
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from speculative_t5 import SpeculativeDecoder, load
from speculative_t5.checkpoints import load_draft, save_draft
from speculative_t5.checkpoints.conversion import convert
from speculative_t5.doctor import Subject, speed
from speculative_t5.models import SharingConfig, SharingDraft
from speculative_t5.models.t5 import T5

import mlx.core as mx
import pytest
from checkpoints import refused
from commands import Call
from conftest import V1_0, edit_json, tiny, tiny_sharing, write_checkpoint
from mlx.utils import tree_flatten

WIDE = {"d_model": 32, "d_kv": 16, "d_ff": 64}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory, spiece: bytes) -> Path:
    """A folder with weights/target, a draft of one layer beside it, and the checkpoint."""
    here = tmp_path_factory.mktemp("here")
    write_checkpoint(here / "source", V1_0 | WIDE, spiece)
    convert(str(here / "source"), here / "weights" / "target")
    target, _ = load(here / "weights" / "target", dtype=mx.float32)
    assert isinstance(target, T5)
    save_draft(here / "weights" / "mine", tiny_sharing(target, layers=1, noise=0.01), "target")
    return here


@pytest.fixture(scope="module")
def target(here: Path) -> T5:
    found, _ = load(here / "weights" / "target", dtype=mx.float32)
    assert isinstance(found, T5)
    return found


def test_a_folder_holds_the_draft_rounded_to_float16(target: T5, tmp_path: Path) -> None:
    draft = tiny_sharing(target, layers=2, block=3, d_model=24)
    for name in ("one", "two"):
        save_draft(tmp_path / name, draft, "target")
    for file in ("config.json", "weights.npz"):
        assert len({(tmp_path / name / file).read_bytes() for name in ("one", "two")}) == 1
    again = load_draft(tmp_path / "one", target)
    assert again.own == draft.own and again.target is target
    kept = dict(tree_flatten(again.parameters()))
    for name, weight in tree_flatten(draft.parameters()):
        assert mx.array_equal(kept[name], weight.astype(mx.float16).astype(mx.float32)), name
    limited = SharingDraft(target, SharingConfig(1, V1_0["d_ff"], draft_vocab=40))
    save_draft(tmp_path / "limited", limited, "target")
    decoder = SpeculativeDecoder(target, load_draft(tmp_path / "limited", target), num_draft=3)
    assert decoder.draft_vocab == 40
    assert SpeculativeDecoder(target, decoder.draft, draft_vocab=30).draft_vocab == 30


def test_the_target_may_be_stored_and_computed_in_any_type(here: Path, tmp_path: Path) -> None:
    ways: list[tuple[dict[str, Any], list[str]]] = [
        ({"dtype": "bfloat16"}, ["float32", "float16"]), ({"quantize": 4}, ["bfloat16"]),
    ]  # fmt: skip
    for options, dtypes in ways:
        stored = convert(
            str(here / "source"), tmp_path / "other", group_size=32, force=True, **options
        )
        for dtype in dtypes:
            model, _ = load(stored, dtype=dtype)
            draft, tokenizer = load(here / "weights" / "mine", target=model)
            assert isinstance(draft, SharingDraft) and draft.dtype == model.dtype
            decoder = SpeculativeDecoder(model, draft, num_draft=3)
            assert decoder.generate([5, 9, 1], max_tokens=4).stats.drafted and tokenizer is None


def fine_tuned(target: T5) -> T5:
    """The target with a hundredth of other weights on two matrices, as an adapter changes them."""
    model = copy.deepcopy(target)
    attention = model.decoder.layers[1].self_attention
    for linear in (attention.qkv, model.encoder.layers[0].self_attention.qkv):
        rows, columns = linear.weight.shape
        change = mx.random.normal((rows, 4)) @ mx.random.normal((4, columns))
        scale = mx.linalg.norm(linear.weight) / mx.linalg.norm(change)
        linear.weight = linear.weight + 0.01 * scale * change
    return model


def resized(target: T5) -> T5:
    """The target with more rows in its embedding, the first of which are the same."""
    config = copy.copy(target.config)
    model = T5(type(config)(**vars(config) | {"vocab_size": config.vocab_size + 8}))
    weights = dict(tree_flatten(target.parameters()))
    more = mx.zeros((8, config.d_model))
    weights["shared.weight"] = mx.concatenate([weights["shared.weight"], more])
    model.load_weights(list(weights.items()))
    return model


OTHERS: list[Callable[[T5], Any]] = [
    fine_tuned,
    resized,
    lambda _: tiny("t5gemma", vocab_size=20),
    lambda _: None,
]


@pytest.mark.parametrize("make", OTHERS)
def test_another_target_is_refused_by_name(make: Any, here: Path, target: T5) -> None:
    mx.random.seed(0)
    with refused("is a draft for target, "):
        load(here / "weights" / "mine", target=make(target))


SHORT = "0" * 16 + "." + "0" * 20  # a fingerprint of fewer weights than there are
# Entries of config.json, or files, and what the error says.
DAMAGES: list[tuple[dict[str, Any], str]] = [
    ({"num_decoder_layers": 0}, "num_decoder_layers in config.json is "),
    ({"draft_vocab": 2**40}, "draft_vocab in config.json is "),
    ({"block": 0}, "block in config.json is "),
    ({"block": 2}, "has no tensor masks"),
    ({"num_decoder_layers": 2}, "has no tensor decoder.layers.1."),
    ({"d_ff": 7}, "expected (7, 32)"),
    ({"d_ff": 2**24}, "expected (16777216, 32)"),
    ({"d_model": 0}, "d_model in config.json is "),
    ({"d_model": 24}, "expected (24,)"),
    ({"draft_vocab": 1}, "draft_vocab is 1"),
    ({"shares": []}, "shares is []"),
    *(
        ({"fingerprint": value}, "fingerprint is ")
        for value in (None, 5, "", ".", "0" * 16 + ".", "0" * 16 + "." + "g" * 20)
    ),
    ({"fingerprint": SHORT}, "is a draft for target"),
    ({"target": 5, "fingerprint": SHORT}, "it does not name"),
    ({"target": "a\x1b[2J\nb", "fingerprint": SHORT}, "a\\x1b"),
    ({"config.json": b"{"}, "config.json is not JSON"),
    ({"config.json": b"[1]"}, "config.json holds a list"),
    ({"weights.npz": b"junk"}, "weights.npz"),
]


@pytest.mark.parametrize(("damage", "found"), DAMAGES, ids=str)
def test_a_damaged_folder_is_refused(
    damage: dict[str, Any], found: str, here: Path, target: T5, tmp_path: Path
) -> None:
    folder = shutil.copytree(here / "weights" / "mine", tmp_path / "mine")
    for name, value in damage.items():
        if (folder / name).exists():
            (folder / name).write_bytes(value)
        else:
            edit_json(folder / "config.json", **{name: value})
    with refused(re.escape(found)):
        load(folder, target=target)


HELLO = ("--prompt", "The old man.")


def test_models_names_the_draft_and_its_target(call: Call) -> None:
    found = {Path(record["folder"]).name: record for record in call("models", "--json").records}
    assert found["mine"]["draft_for"] == "target" and found["mine"]["error"] is None
    assert found["mine"]["drafts"] == [] and found["target"]["drafts"] == ["mine"]
    assert "mine" in call("--inspect", "--model", "weights/target", program="convert.py").out


@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        ("__main__.py", ("--model", "mine", *HELLO)),
        ("__main__.py", ("doctor", "--model", "mine")),
        ("__main__.py", ("--model", "correct-small", "--draft-model", "mine", *HELLO)),
        ("__main__.py", ("doctor", "--model", "correct-small", "--draft-model", "mine")),
        ("convert.py", ("--model", "weights/mine")),
        ("convert.py", ("--model", "weights/mine", "--inspect")),
    ],
)
def test_a_draft_alone_or_for_another_model_is_refused(
    program: str, arguments: tuple[str, ...], call: Call
) -> None:
    done = call(*arguments, program=program, stdin="The old man.\n")
    done.check_error("a draft for target, ")


def test_a_command_decodes_with_the_draft(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = call("--model", "target", "--regular-decode", "--max-tokens", "9", *HELLO)
    pair = ("--model", "target", "--draft-model", "mine")
    drafted = call(*pair, "--max-tokens", "9", "--json", *HELLO).records[0]
    assert drafted["text"] == expected.out.rstrip("\n") and drafted["stats"]["drafted"] > 0
    monkeypatch.setattr(speed, "SECONDS_OF_TURNS", 0.0)
    monkeypatch.setattr(speed, "SENTENCE_STEP", 60)
    found = speed.speed(Subject("weights/target", "weights/mine", "float32"))
    assert found.status == "ok" and found.details["draft_step_seconds"] > 0
