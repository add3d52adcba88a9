"""The comparison of programs, on tiny models: one checkpoint and the same outputs for all."""

import contextlib
import dataclasses
import json
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from speculative_t5 import SpeculativeDecoder, device
from speculative_t5.kernels import accelerate
from speculative_t5.models.t5 import T5

import compare
import ctranslate2
import mlx.core as mx
import numpy as np
import pytest
import torch
import typer
from conftest import needs_layers, tiny_draft, tiny_model
from mlx.utils import tree_flatten, tree_map
from programs import (
    ASSISTED,
    AUTO,
    BY_TYPES,
    COMBINED,
    KEPT,
    PLAIN,
    SPECULATIVE,
    STEADY,
    checkpoints,
    measuring,
    naive,
    serving,
    throughput,
    workers,
)
from typer.testing import CliRunner

pytestmark = pytest.mark.cpu  # outputs are compared with those of programs that run there
PROMPTS = [[*random.Random(i).choices(range(2, 40), k=3 + 2 * i), 1] for i in range(6)]
MAX_TOKENS = 12
ON_CPU = {"backend": "cpu", "dtype": "float32"}


@pytest.fixture(scope="module")
def model() -> T5:
    return tiny_model(vocab_size=40, seed=4)


@pytest.fixture(scope="module")
def place(model: T5, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("compare")
    checkpoints.as_hugging_face(model, place / "target")
    checkpoints.as_hugging_face(tiny_draft(model), place / "draft")
    return place


def regular_outputs(model: T5) -> list[list[int]]:
    outputs = SpeculativeDecoder(model).generate_batch(PROMPTS, max_tokens=MAX_TOKENS)
    return [o.tokens + [1] * (o.finish_reason == "eos") for o in outputs]


def test_checkpoint_has_the_same_logits_in_transformers(
    pair: tuple[Any, T5], tmp_path: Path
) -> None:
    from transformers import T5ForConditionalGeneration

    model = pair[1]
    checkpoints.as_hugging_face(model, tmp_path)
    theirs = T5ForConditionalGeneration.from_pretrained(tmp_path).eval()
    assert theirs.dtype == torch.float32
    source, target = [[5, 17, 100, 3, 250, 9, 40, 1]], [[0, 9, 4, 33, 200]]
    with torch.inference_mode():
        logits = theirs(
            input_ids=torch.tensor(source), decoder_input_ids=torch.tensor(target)
        ).logits.numpy()
    ours = np.array(model(mx.array(source), mx.array(target)))
    assert np.abs(ours - logits).max() < 1e-4 * np.abs(logits).max()
    again = checkpoints.read_back(tmp_path)
    accelerate(again)
    assert again.config == model.config
    assert np.array_equal(np.array(again(mx.array(source), mx.array(target))), ours)
    again.config = dataclasses.replace(model.config, bias_per_layer=True)
    with pytest.raises(ValueError, match="umt5"):
        checkpoints.as_hugging_face(again, tmp_path)


@pytest.mark.parametrize("options", [
    {}, {"layers": 2, "bias_per_layer": True, "gated": True},
    {"relative_attention_num_buckets": 4, "relative_attention_max_distance": 6},
])  # fmt: skip
def test_naive_loop_gives_the_same_tokens(options: dict[str, Any]) -> None:
    model = tiny_model(vocab_size=40, seed=1, **options)
    # A small bias would not change any output.
    model.decoder.position_bias.weight = model.decoder.position_bias.weight * 30
    found = [naive.generate(model, prompt, MAX_TOKENS) for prompt in PROMPTS]
    assert found == regular_outputs(model)
    with pytest.raises(ValueError, match="max_tokens"):
        naive.generate(model, PROMPTS[0], 0)


@pytest.mark.parametrize(
    ("name", "note"),
    [("transformers", ""), (ASSISTED, "schedule"), ("ctranslate2", "backend")],
)
def test_other_programs_give_the_same_tokens(model: T5, place: Path, name: str, note: str) -> None:
    if name.startswith("ctranslate2"):
        checkpoints.as_ctranslate2(place / "target", place / "ctranslate2")
    generate, about = serving.load_program(name, {"place": str(place), "threads": 1} | ON_CPU)
    expected = regular_outputs(model)
    assert len({*map(tuple, expected)}) > 3  # or the test could not tell programs apart
    assert {output[-1] == 1 for output in expected} == {True, False}
    assert [generate(ids, MAX_TOKENS) for ids in PROMPTS] == expected
    assert about["versions"] and note in about.get("note", "")
    assert (about["device"], about["dtype"]) == ("cpu", "float32")


def test_programs_search_with_beams(model: T5, place: Path) -> None:
    spec = {"place": str(place), "num_beams": 3} | ON_CPU
    found = {}
    for name in (PLAIN, "transformers"):
        generate, _ = serving.load_program(name, spec)
        found[name] = [generate(ids, MAX_TOKENS) for ids in PROMPTS]
    assert found[PLAIN] == found["transformers"] != regular_outputs(model)
    names, search, unlike = compare.chosen_for(3, None)
    assert names == [PLAIN, "transformers", "ctranslate2", "ctranslate2 int8"]
    assert search == {"num_beams": 3} and unlike == ("ctranslate2",)
    with pytest.raises(typer.BadParameter, match="naive is left out"):
        compare.chosen_for(3, ["naive"])


def test_a_draft_that_shares_its_targets_encoder_drafts_for_ours_alone(
    model: T5, place: Path, tmp_path: Path
) -> None:
    (tmp_path / "target").symlink_to(place / "target")
    checkpoints.write_draft(tiny_draft(model, block=1), tmp_path / "draft")
    spec = {"place": str(tmp_path), "num_draft": 3} | ON_CPU
    for name in (SPECULATIVE, AUTO, COMBINED, STEADY):
        generate, _ = serving.load_program(name, spec)
        assert [generate(ids, MAX_TOKENS) for ids in PROMPTS] == regular_outputs(model)
    with pytest.raises(serving.CannotRun, match="it needs one that is a model"):
        serving.load_program(ASSISTED, spec)


def test_programs_share_a_checkpoint_in_16_bits(
    model: T5, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype, kind, widths, start = "bfloat16", mx.bfloat16, set(), T5.start

    def watched(*given: Any, width: int | None = None) -> Any:
        widths.add(width)
        return start(*given, width=width)

    monkeypatch.setattr(T5, "start", watched)
    for name, one in (("target", model), ("draft", tiny_draft(model))):
        other = T5(one.config)
        other.update(tree_map(lambda weight: weight.astype(kind), one.parameters()))
        checkpoints.as_hugging_face(other, tmp_path / name)
    loaded = checkpoints.read_back(tmp_path / "target")
    kinds = {weight.dtype for _, weight in tree_flatten(loaded.parameters())}
    assert loaded.shared.weight.dtype == kind and kinds <= {kind, mx.float32}
    places = [str(tmp_path / name) for name in ("target", "ctranslate2")]
    assert CliRunner().invoke(compare.app, ["convert", *places]).exit_code == 0
    spec = {"place": str(tmp_path), "threads": 1, "num_draft": 2, "backend": "cpu", "dtype": dtype}
    for name in (PLAIN, SPECULATIVE, "transformers", ASSISTED, "ctranslate2 int8", STEADY):
        assert widths <= {None}
        generate, about = serving.load_program(name, spec)
        expected = "int8_float32" if name == "ctranslate2 int8" else dtype
        assert (about["device"], about["dtype"]) == ("cpu", expected)
        assert 1 <= len(generate(PROMPTS[0], MAX_TOKENS)) <= MAX_TOKENS
    assert len(widths) > 1, "steady passes have a width"
    with pytest.raises(serving.CannotRun, match=f"on cpu it computes in .*, not in {dtype}"):
        serving.load_program("ctranslate2", spec)


@needs_layers
def test_programs_of_ours_keep_matrices_in_other_types(tmp_path: Path) -> None:
    model = tiny_model(vocab_size=40, seed=4, d_model=64, d_kv=32, d_ff=128)
    for name in ("target", "draft"):
        checkpoints.as_hugging_face(model, tmp_path / name)
    spec = {"place": str(tmp_path), "num_draft": 3} | ON_CPU
    sizes = []
    for kind in ("float32", *dict.fromkeys(KEPT.values())):
        loaded = checkpoints.read_back(tmp_path / "target", kind)
        sizes.append(sum(weight.nbytes for _, weight in tree_flatten(loaded.parameters())))
        accelerate(loaded)
        expected = regular_outputs(loaded)
        for name in [name for name, each in KEPT.items() if each == kind]:
            generate, about = serving.load_program(name, spec)
            assert [generate(ids, MAX_TOKENS) for ids in PROMPTS] == expected
            assert about["dtype"] == kind
    whole, *smaller = sizes
    for size, share in zip(smaller, (0.5, 0.28, 0.16), strict=True):
        assert size == pytest.approx(share * whole, rel=0.1)
    assert compare.chosen(None, BY_TYPES) == [*BY_TYPES]
    assert compare.chosen(["ours plain in 8 bits"]) == [PLAIN, "ours plain in 8 bits"]


def test_torch_uses_the_gpu_that_mlx_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    for backend, cuda, mps, expected in (
        ("cpu", True, True, "cpu"),
        ("cuda", True, False, "cuda"),
        ("cuda", False, True, "cpu"),
        ("metal", True, True, "mps"),
        ("metal", True, False, "cpu"),
    ):
        monkeypatch.setattr(torch.cuda, "is_available", lambda cuda=cuda: cuda)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda mps=mps: mps)
        assert serving.torch_device(backend) == expected


def test_ctranslate2_uses_the_gpu_that_mlx_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[tuple[str, str]] = []

    class Translator:
        def __init__(self, folder: str, *, device: str, compute_type: str, **_: Any) -> None:
            self.compute_type = compute_type
            used.append((device, compute_type))

    monkeypatch.setattr(ctranslate2, "Translator", Translator)
    for backend, gpus, where, eight_bits in (
        ("cuda", 1, "cuda", "int8_bfloat16"),
        ("cuda", 0, "cpu", "int8"),
        ("metal", 1, "cpu", "int8"),
    ):
        kinds = {"bfloat16", eight_bits}
        monkeypatch.setattr(ctranslate2, "get_cuda_device_count", lambda gpus=gpus: gpus)
        monkeypatch.setattr(
            ctranslate2, "get_supported_compute_types", lambda device, kinds=kinds: kinds
        )
        used.clear()
        for name in ("ctranslate2", "ctranslate2 int8"):
            spec = {"place": "", "threads": 1, "backend": backend, "dtype": "bfloat16"}
            serving.load_program(name, spec)
        assert used == [(where, "bfloat16"), (where, eight_bits)]


def test_types_are_the_devices_default_or_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compare.setting_of(None) == (ON_CPU, mx.float32)
    setting = {"backend": "cpu", "dtype": "float16"}
    assert compare.setting_of("float16") == (setting, mx.float16)
    monkeypatch.setattr(device, "on_cpu", lambda: False)
    setting = {"backend": "metal", "dtype": "bfloat16"}
    assert compare.setting_of(None) == (setting, mx.bfloat16)
    with pytest.raises(typer.BadParameter, match="no type 'int8', expected one of: float32, "):
        compare.setting_of("int8")


@pytest.fixture(scope="module")
def compared(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with copies of a target and its draft."""
    folder = tmp_path_factory.mktemp("compared")
    (folder / "draft").symlink_to(place / "draft")
    shutil.copytree(place / "target", folder / "target")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "convert", lambda *_: "it has no shape")
        patch.setattr(workers, "PAUSE", 0.0)
        yield folder


def test_workers_take_turns_and_those_that_cannot_start_are_left_out(
    compared: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    names = [PLAIN, SPECULATIVE, "transformers", "ctranslate2"]
    options = ON_CPU | {"dtype": "float23", "num_draft": 3}  # ours have the checkpoint's type
    with contextlib.ExitStack() as stack:
        started = workers.start(names, options, compared, PROMPTS[:1], MAX_TOKENS, stack)
        assert [*started] == [PLAIN, SPECULATIVE]
        wrong = r"AttributeError: module 'torch' has no attribute 'float23' \(__init__.py, line "
        assert re.match(wrong, started.left_out["transformers"])
        assert started.left_out["ctranslate2"] == "it has no shape"
        figures = measuring.compare("a title", started, PROMPTS[:3], MAX_TOKENS, 2)
        again = measuring.compare("", started, PROMPTS[:3], MAX_TOKENS, 1, as_json=True)
    title, _, _, plain, speculative, *_, last = capfd.readouterr().out.splitlines()
    assert title == "a title" and plain.split()[:4] == [*PLAIN.split(), "cpu", "float32"]
    assert speculative.split()[:4] == [*SPECULATIVE.split(), "cpu", "float32"]
    assert "3/3" in speculative.split()
    assert speculative.endswith(" GB") == serving.STATUS.exists()
    found = json.loads(last)["programs"]
    assert {name: program["tokens_per_second"] for name, program in found.items()} == {
        name: figure.speed for name, figure in again.items()
    }
    assert found[SPECULATIVE]["about"]["device"] == "cpu" and found[SPECULATIVE]["agree"] == 3
    assert list(figures) == [PLAIN, SPECULATIVE]
    speeds = [speed for program in figures.values() for speed in program.speeds]
    assert len(speeds) == 2 * 2 and min(speeds) > 1  # tokens over seconds, not the reverse


def test_a_worker_that_fails_is_left_out_unless_the_others_are_compared_with_it(
    compared: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    names, options = [PLAIN, SPECULATIVE], ON_CPU | {"num_draft": 3}
    with contextlib.ExitStack() as stack:
        started = workers.start(names, options, compared, PROMPTS[:1], MAX_TOKENS, stack)
        started[SPECULATIVE]._process.kill()
        left = measuring.compare("", started, PROMPTS[:2], MAX_TOKENS, 1)
        assert [*left] == [*started] == [PLAIN]
        assert capfd.readouterr().err == f"left out: {SPECULATIVE}: ended with exit code -9\n"
        assert {len(started[PLAIN].ask(ids, 2)[0]) for ids in PROMPTS[:2]} == {2}
        measuring.compare("", started, PROMPTS[:2], 2, 1, exact_length=True)
        started[PLAIN]._process.kill()
        with pytest.raises(SystemExit, match="without ours plain"):
            measuring.compare("", started, PROMPTS[:2], MAX_TOKENS, 1)


def test_batches_of_several_sizes_are_measured(
    model: T5,
    place: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("target", "draft"):
        (tmp_path / name).symlink_to(place / name)
    monkeypatch.setattr(workers, "convert", lambda *at: checkpoints.as_ctranslate2(*at) or "")
    names = [PLAIN, AUTO, "naive", "transformers", "ctranslate2"]
    options = ON_CPU | {"num_draft": 3}
    with contextlib.ExitStack() as stack:
        started = workers.start(
            names, options, tmp_path, PROMPTS[:2], MAX_TOKENS, stack, workers.BATCHES
        )
        for program in started.values():
            outputs, _ = program.ask_all(PROMPTS, MAX_TOKENS, 4)
            assert outputs == regular_outputs(model)
        throughput.compare_batches("a title", started, PROMPTS, MAX_TOKENS, [1, 4], 2)
        throughput.compare_batches("", started, PROMPTS, MAX_TOKENS, [2], 1, as_json=True)
        started["ctranslate2"]._process.kill()
        assert throughput.run(started, "ctranslate2", PROMPTS, MAX_TOKENS, 2) is None
    assert [*started] == [PLAIN, AUTO, "transformers"]
    printed, errors = capfd.readouterr()
    title, _, heads, plain, *_, other, last = printed.splitlines()
    assert title == "a title" and heads.split()[-7:] == "batch 1 batch 4 same output peak".split()
    assert plain.split()[3:6:2] == ["1.00", "1.00"] and "6/6" in other.split()
    assert plain.endswith(" GB") == serving.STATUS.exists()
    found = json.loads(last)["programs"]
    assert [*found] == [PLAIN, AUTO, "transformers", "ctranslate2"]
    (speed,) = found[AUTO]["speeds"]["2"]
    assert speed > 1  # tokens over seconds, not the reverse
    naive_left_out, lost = errors.splitlines()[-2:]
    assert "not measured in batches" in naive_left_out and "exit code -9" in lost


def test_batches_of_random_models_are_drafted_by_replaying(model: T5, place: Path) -> None:
    spec = {"place": str(place), "num_draft": 3, "acceptance": 0.8} | ON_CPU
    for name in (SPECULATIVE, AUTO):
        generate_all, _ = serving.load_in_batches(name, spec)
        for size in (1, 4):
            assert generate_all(PROMPTS, MAX_TOKENS, size) == regular_outputs(model)
    assert compare.sizes_of("1,16") == [1, 16]
    for wrong in ("1,", "0", "two"):
        with pytest.raises(typer.BadParameter, match="must be numbers by commas"):
            compare.sizes_of(wrong)


def test_other_outputs_are_tolerated_by_type() -> None:
    outputs = {PLAIN: [[i, 3] for i in range(20)]}
    for dtype, wrong in (("float32", 1), ("float32", 2), ("int8_float32", 20), ("float16", 9)):
        outputs["naive"] = [[7]] * wrong + outputs[PLAIN][wrong:]
        programs: Any = {name: SimpleNamespace(about={"dtype": dtype}) for name in outputs}
        if (dtype, wrong) == ("float32", 2):
            with pytest.raises(SystemExit, match="naive .2 of 20"):
                measuring.check_agreement(programs, outputs)
        else:
            agree = measuring.check_agreement(programs, outputs)
            assert agree == {PLAIN: 20, "naive": 20 - wrong}
