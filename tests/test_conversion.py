"""Conversion: what is read, what is written, and what is refused."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from speculative_t5 import load
from speculative_t5.checkpoints.conversion import Observer, convert
from speculative_t5.checkpoints.loading import DTYPES
from speculative_t5.checkpoints.t5 import open_checkpoint, read_config

import mlx.core as mx
import numpy as np
import pytest
from conftest import REPOSITORY, V1_0, V1_1, edit_json, write_checkpoint
from families import write_family
from safetensors.torch import load_file, save_file

SOURCE, TARGET = mx.array([[5, 17, 9, 1]]), mx.array([[0, 9, 4]])


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory, spiece: bytes) -> Path:
    folder = tmp_path_factory.mktemp("original")
    write_checkpoint(folder, V1_1, spiece)
    return folder


@pytest.fixture
def source(original: Path, tmp_path: Path) -> Path:
    """A checkpoint that the test may spoil."""
    return Path(shutil.copytree(original, tmp_path / "source"))


def logits(folder: Path) -> np.ndarray:
    return np.array(load(folder, dtype=mx.float32)[0](SOURCE, TARGET))


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_converted_model_needs_nothing_else(source: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    folder = convert(
        str(source), tmp_path / "out", observer=Observer(lambda *counts: seen.append(counts))
    )
    assert left(folder) == ["config.json", "spiece.model", "weights.npz"]
    assert seen[-1] == (seen[-1][1],) * 2 and sorted(seen) == seen
    assert seen[-1][1] == sum(t.nbytes for t in open_checkpoint(source).tensors.values())
    assert left(tmp_path) == ["out", "source"]
    shutil.rmtree(source)
    model, tokenizer = load(folder)
    assert model.dtype == mx.float32
    assert model.vocabulary == tokenizer.vocabulary
    assert read_config(folder) == model.config


def test_a_named_draft_is_kept(source: Path, tmp_path: Path) -> None:
    for draft in ("small", "../small", None):
        edit_json(source / "config.json", draft=draft)
        folder = convert(str(source), tmp_path / f"with {draft is None} {len(draft or '')}")
        kept = json.loads((folder / "config.json").read_text()).get("draft")
        assert kept == ("small" if draft == "small" else None)


def test_a_prefix_is_kept(source: Path, tmp_path: Path) -> None:
    for prefix in ("summarize: ", "", None):
        edit_json(source / "config.json", prefix=prefix)
        folder = convert(str(source), tmp_path / "out", force=True)
        assert load(folder)[1].prefix == (prefix or "")  # type: ignore[attr-defined]
        assert ("prefix" in json.loads((folder / "config.json").read_text())) == bool(prefix)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dtypes_are_stored_as_asked(source: Path, tmp_path: Path, dtype: str) -> None:
    folder = convert(str(source), tmp_path / "out", dtype=dtype)
    stored = mx.load(str(folder / "weights.npz"))
    assert isinstance(stored, dict)
    assert {array.dtype for array in stored.values()} == {DTYPES[dtype]}
    whole = logits(convert(str(source), tmp_path / "whole"))
    np.testing.assert_allclose(logits(folder), whole, rtol=0, atol=0.05 * np.abs(whole).max())


def test_pickles_are_converted_without_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_family(tmp_path / "source", "flan_t5", "bin")
    monkeypatch.setitem(sys.modules, "torch", None)
    assert load(convert(str(tmp_path / "source"), tmp_path / "out"))


def test_tensors_are_believed_over_the_config(source: Path, tmp_path: Path) -> None:
    """Old configs say relu for gated-gelu, and know nothing of depths or of the head."""
    expected = logits(convert(str(source), tmp_path / "right"))
    edit_json(
        source / "config.json", feed_forward_proj="relu", num_layers=9, num_decoder_layers=None,
        tie_word_embeddings=True, scale_decoder_outputs=False,
    )  # fmt: skip
    assert (logits(convert(str(source), tmp_path / "corrected")) == expected).all()
    assert (logits(source) == expected).all()


def test_a_stored_head_that_equals_the_embedding_is_tied(tmp_path: Path, spiece: bytes) -> None:
    source = tmp_path / "source"
    write_checkpoint(source, V1_0, spiece)
    tied = convert(str(source), tmp_path / "tied")
    tensors = load_file(source / "model.safetensors")
    for name in ("lm_head.weight", "encoder.embed_tokens.weight"):
        tensors[name] = tensors["shared.weight"].clone()
    save_file(tensors, source / "model.safetensors")
    again = convert(str(source), tmp_path / "again")
    assert read_config(again) == read_config(tied)
    assert not read_config(again).own_head and read_config(again).scale_decoder_outputs


@pytest.mark.parametrize(
    ("raw", "scaled"),
    [
        ({}, True),
        ({"tie_word_embeddings": False}, False),
        ({"tie_word_embeddings": True, "scale_decoder_outputs": False}, False),
        ({"tie_word_embeddings": False, "scale_decoder_outputs": True}, True),
    ],
)
def test_scaling_follows_the_config(
    source: Path, tmp_path: Path, raw: dict[str, Any], scaled: bool
) -> None:
    stored = json.loads((source / "config.json").read_text())
    for name in ("tie_word_embeddings", "scale_decoder_outputs"):
        stored.pop(name, None)
    (source / "config.json").write_text(json.dumps(stored | raw))
    folder = convert(str(source), tmp_path / "out")
    assert read_config(folder).scale_decoder_outputs == scaled
    assert read_config(folder).own_head


def spoil_shape(source: Path) -> None:
    tensors = load_file(source / "model.safetensors")
    name = "decoder.block.0.layer.1.EncDecAttention.k.weight"
    tensors[name] = tensors[name][:-1].clone()
    save_file(tensors, source / "model.safetensors")


def spoil_names(source: Path) -> None:
    tensors = load_file(source / "model.safetensors")
    tensors["encoder.adapter.weight"] = tensors.pop("encoder.final_layer_norm.weight")
    save_file(tensors, source / "model.safetensors")


def shrink(source: Path) -> None:
    tensors = load_file(source / "model.safetensors")
    for name in ("shared.weight", "lm_head.weight"):
        tensors[name] = tensors[name][:100].clone()
    save_file(tensors, source / "model.safetensors")
    edit_json(source / "config.json", vocab_size=100)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda s: (s / "config.json").unlink(), "not a model folder: it has no config.json"),
        (lambda s: (s / "config.json").write_text("{"), "config.json is not JSON"),
        (lambda s: (s / "config.json").write_text("[]"), "holds a list, expected an object"),
        (lambda s: edit_json(s / "config.json", model_type="bert"), "this is a bert"),
        (lambda s: edit_json(s / "config.json", d_kv=0), "d_kv in config.json is 0, expected a"),
        (lambda s: edit_json(s / "config.json", feed_forward_proj="x"), "feed_forward_proj"),
        (lambda s: edit_json(s / "config.json", vocab_size=10**12), "vocab_size in config.json"),
        (lambda s: edit_json(s / "config.json", eos_token_id=[1]), r"eos_token_id .* is \[1\]"),
        (
            lambda s: edit_json(s / "config.json", decoder_start_token_id=999),
            "is 999, expected an id from 0 to 319",
        ),
        (lambda s: edit_json(s / "config.json", layer_norm_epsilon="x"), "layer_norm_epsilon"),
        (
            lambda s: edit_json(s / "config.json", relative_attention_num_buckets="32"),
            "relative_attention_num_buckets in config.json is '32'",
        ),
        (lambda s: (s / "spiece.model").unlink(), "no tokenizer in"),
        (lambda s: (s / "model.safetensors").unlink(), "no weights in .*: expected model.safet"),
        (lambda s: truncate(s / "model.safetensors"), "truncated or damaged"),
        (spoil_shape, r"EncDecAttention.k.weight has shape \(79, 32\), expected \(80, 32\)"),
        (spoil_names, r"has no tensor encoder.final_layer_norm.weight, expected one of shape"),
        (
            lambda s: (s / "model.safetensors").rename(s / "pytorch_model.bin"),
            "pytorch_model.bin is truncated or damaged",
        ),
        (
            lambda s: edit_json(s / "config.json", eos_token_id=5),
            "ends a text by 1, the model by 5",
        ),
        (
            lambda s: (s / "tokenizer_config.json").write_text('{"extra_ids": 1000000000}'),
            "extra_ids in .* is 1000000000, expected an integer from 0 to 10000",
        ),
        (lambda s: edit_json(s / "config.json", prefix=3), "prefix in .* is 3, expected a string"),
        (lambda s: shrink(s), "has 220 pieces, the model 100 rows for them"),
    ],
)
def test_bad_checkpoints_are_refused_and_leave_nothing(
    source: Path, tmp_path: Path, spoil: Any, message: str
) -> None:
    spoil(source)
    with pytest.raises(ValueError, match=message):
        convert(str(source), tmp_path / "out")
    assert left(tmp_path) == ["source"]


@pytest.mark.parametrize(
    "failure", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")]
)
def test_an_interrupted_run_keeps_the_old_folder_and_leaves_nothing_else(
    source: Path, tmp_path: Path, failure: BaseException
) -> None:
    convert(str(source), tmp_path / "out")
    before = (tmp_path / "out" / "weights.npz").read_bytes()

    def interrupt(done: int, total: int) -> None:
        if done > total // 2:
            raise failure

    for output in ("out", "new"):
        with pytest.raises(type(failure)):
            convert(
                str(source),
                tmp_path / output,
                dtype="float16",
                force=True,
                observer=Observer(interrupt),
            )
        assert left(tmp_path) == ["out", "source"]
    assert (tmp_path / "out" / "weights.npz").read_bytes() == before
    convert(str(source), tmp_path / "out", dtype="float16", force=True)
    assert (tmp_path / "out" / "weights.npz").stat().st_size < len(before)
    assert left(tmp_path) == ["out", "source"]


KILLED = """
import os, signal, sys
from pathlib import Path
from speculative_t5.checkpoints import writing as weights
from speculative_t5.checkpoints.conversion import Observer, convert

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

if sys.argv[3] == "swap":
    rename = os.rename
    os.rename = lambda a, b: die() if Path(a).name == "new" else rename(a, b)
tell = die if sys.argv[3] == "half" else print
convert(sys.argv[1], Path(sys.argv[2]), force=True, observer=Observer(tell))
"""


@pytest.mark.parametrize("when", ["half", "swap"])
def test_what_a_killed_run_leaves_is_cleared_away_by_the_next(
    source: Path, tmp_path: Path, when: str
) -> None:
    convert(str(source), tmp_path / "out")
    before = (tmp_path / "out" / "weights.npz").read_bytes()
    command = [sys.executable, "-c", KILLED, str(source), str(tmp_path / "out"), when]
    killed = subprocess.run(command, capture_output=True, cwd=REPOSITORY, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert ".out.partial" in left(tmp_path)
    seen: list[bytes] = []

    def look(done: int, total: int) -> None:
        seen.append((tmp_path / "out" / "weights.npz").read_bytes())

    convert(str(source), tmp_path / "out", force=True, observer=Observer(look))
    assert seen[0] == before  # whole all the time, or brought back
    assert left(tmp_path) == ["out", "source"]
    assert load(tmp_path / "out")


def test_two_conversions_to_one_folder_are_refused(source: Path, tmp_path: Path) -> None:
    messages: list[str] = []

    def another(done: int, total: int) -> None:
        if not messages:
            with pytest.raises(OSError, match="another conversion is at work") as caught:
                convert(str(source), tmp_path / "out")
            messages.append(str(caught.value))

    convert(str(source), tmp_path / "out", observer=Observer(another))
    assert messages and left(tmp_path) == ["out", "source"]


def test_a_lack_of_space_is_told_at_once(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    seen: list[int] = []
    with pytest.raises(OSError, match="No space left on device: it takes 0.00 GB") as caught:
        convert(
            str(source), tmp_path / "out", observer=Observer(lambda done, total: seen.append(done))
        )
    assert caught.value.errno == errno.ENOSPC and not seen
    assert left(tmp_path) == ["source"]


def test_a_failed_swap_brings_the_old_folder_back(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(str(source), tmp_path / "out")
    rename, calls = os.rename, iter([False, True, False])

    def fail_second(a: Path, b: Path) -> None:
        if next(calls):
            raise KeyboardInterrupt
        rename(a, b)

    monkeypatch.setattr(os, "rename", fail_second)
    with pytest.raises(KeyboardInterrupt):
        convert(str(source), tmp_path / "out", dtype="float16", force=True)
    assert left(tmp_path) == ["out", "source"]
    assert load(tmp_path / "out")


def test_a_checkpoint_is_never_replaced(source: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(source, tmp_path / "other"))
    for output, message in (
        (source, "is or holds the checkpoint itself"),
        (other, "not a converted"),
    ):
        with pytest.raises(ValueError, match=message):
            convert(str(source), output)
        assert (output / "model.safetensors").exists()


def test_a_folder_of_something_else_is_not_replaced(source: Path, tmp_path: Path) -> None:
    other = tmp_path / "thesis"
    other.mkdir()
    (other / "chapter.txt").write_text("words")
    with pytest.raises(ValueError, match="thesis exists and is not a converted model"):
        convert(str(source), other)
    assert left(other) == ["chapter.txt"]


def test_an_existing_folder_is_replaced_when_forced(source: Path, tmp_path: Path) -> None:
    convert(str(source), tmp_path / "out")
    with pytest.raises(ValueError, match="out exists: use --force to replace it, or --output to"):
        convert(str(source), tmp_path / "out", dtype="float16")
    assert load(tmp_path / "out", dtype=None)
    convert(str(source), tmp_path / "out", dtype="float16", force=True)
    stored = mx.load(str(tmp_path / "out" / "weights.npz"))
    assert isinstance(stored, dict)
    assert {array.dtype for array in stored.values()} == {mx.float16}


def change(source: Path, name: str, value: float) -> None:
    tensors = load_file(source / "model.safetensors")
    tensors[name][1, 2] = value
    save_file(tensors, source / "model.safetensors")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [None, "float16", "bfloat16"])
def test_weights_that_are_no_numbers_are_named(
    source: Path, tmp_path: Path, value: float, dtype: str | None
) -> None:
    name = "encoder.block.1.layer.0.SelfAttention.k.weight"
    change(source, name, value)
    with pytest.raises(
        ValueError, match=f"{name} has weights that are NaN or infinite; use --allow-"
    ):
        convert(str(source), tmp_path / "out", dtype=dtype)
    assert left(tmp_path) == ["source"]
    folder = convert(str(source), tmp_path / "out", dtype=dtype, allow_nonfinite=True)
    stored = load(folder, dtype=mx.float32)[0].encoder.layers[1].self_attention.qkv.weight
    assert np.array_equal(np.array(stored[80 + 1, 2]), value, equal_nan=True)


def test_weights_that_float16_cannot_hold_are_named(source: Path, tmp_path: Path) -> None:
    name = "decoder.block.0.layer.2.DenseReluDense.wo.weight"
    change(source, name, 65519.0)  # rounds down to the largest there is
    convert(str(source), tmp_path / "holds", dtype="float16")
    change(source, name, 65520.0)
    with pytest.raises(ValueError, match=f"{name} has weights too large for float16: use bfloat16"):
        convert(str(source), tmp_path / "out", dtype="float16")
    assert left(tmp_path) == ["holds", "source"]
    convert(str(source), tmp_path / "out", dtype="bfloat16")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sixteen_bit_weights_are_kept_to_the_bit(source: Path, tmp_path: Path, dtype: str) -> None:
    """Through conversion as it is, a second one of the result, and `load`."""
    import torch

    kind, path = getattr(torch, dtype), source / "model.safetensors"
    halves = {name: tensor.to(kind) for name, tensor in load_file(path).items()}
    save_file(halves, path)
    first = convert(str(source), tmp_path / "first")
    second = convert(str(first), tmp_path / "second")
    assert (first / "weights.npz").read_bytes() == (second / "weights.npz").read_bytes()
    stored = mx.load(str(second / "weights.npz"))
    assert isinstance(stored, dict)
    assert {array.dtype for array in stored.values()} == {DTYPES[dtype]}
    model = load(second, dtype=mx.float32)[0]
    dense = "decoder.block.0.layer.2.DenseReluDense"
    for ours, theirs in (
        (model.shared.weight, "shared.weight"),
        (model.encoder.norm.weight, "encoder.final_layer_norm.weight"),
        (model.decoder.layers[0].feed_forward.wo.weight, f"{dense}.wo.weight"),
    ):
        assert (np.array(ours) == halves[theirs].float().numpy()).all()


def test_a_model_folder_is_converted_to_another_type(source: Path, tmp_path: Path) -> None:
    first = convert(str(source), tmp_path / "first")
    again = convert(str(first), tmp_path / "again")
    assert (first / "weights.npz").read_bytes() == (again / "weights.npz").read_bytes()
    direct = convert(str(source), tmp_path / "direct", dtype="bfloat16")
    half = convert(str(first), tmp_path / "half", dtype="bfloat16")
    assert (half / "weights.npz").read_bytes() == (direct / "weights.npz").read_bytes()


def test_an_output_that_holds_something_else_is_not_replaced(source: Path, tmp_path: Path) -> None:
    folder = convert(str(source), tmp_path / "out")
    inner = Path(shutil.copytree(source, folder / "inner"))
    for model, message in ((source, "also holds inner"), (inner, "is or holds the checkpoint")):
        with pytest.raises(ValueError, match=message):
            convert(str(model), folder, force=True)
    assert left(inner) == left(source)


def test_odd_outputs(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "model")
    convert(str(source), tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and load(tmp_path / "disk" / "model")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(ValueError, match="is the current folder: choose another --output"):
        convert(str(source), Path("."))
    change(source, "shared.weight", np.nan)
    with pytest.raises(ValueError, match="shared.weight has weights that are NaN"):
        convert(str(source), tmp_path / "some" / "where" / "new")
    assert left(tmp_path) == ["disk", "empty", "link", "source"]


def test_a_revision_is_not_of_a_folder(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a revision is of a repository on the Hub, and .* folder"):
        convert(str(source), tmp_path / "out", revision="v2")


SLOW = """
import sys, time
from speculative_t5.checkpoints import conversion
from speculative_t5.cli import convert_main
checked = conversion._checked
conversion._checked = lambda tensor: (time.sleep(0.1) or item for item in checked(tensor))
convert_main()
"""


def interrupted(source: Path, number: int, handler: Any) -> subprocess.Popen[bytes]:
    """A conversion to out beside the source that got a signal on its way, with that disposition."""
    output = source.parent / "out"
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, "--model", str(source), "--output", str(output)],
        cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(number, handler),
    )  # fmt: skip
    while not (source.parent / ".out.partial" / "new" / "weights.npz").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_leave_nothing_behind(source: Path, tmp_path: Path, number: int) -> None:
    process = interrupted(source, number, signal.SIG_DFL)
    assert process.communicate(timeout=30)[1] in (b"", b"error: interrupted\n")
    assert process.returncode == 128 + number
    assert left(tmp_path) == ["source"]


def test_nohup_is_heeded(source: Path, tmp_path: Path) -> None:
    process = interrupted(source, signal.SIGHUP, signal.SIG_IGN)
    assert process.communicate(timeout=60)[1] == b"" and process.returncode == 0
    assert left(tmp_path) == ["out", "source"]
