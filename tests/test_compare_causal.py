"""scripts/benchmarks/compare.py causal: all programs give the same outputs for a pair."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import write_causal
from conftest import edit_json
from programs import ASSISTED, AUTO, CAUSAL, MLX_LM, MLX_LM_SPECULATIVE, PLAIN, SPECULATIVE
from programs.causal import load_causal, windows_of
from programs.serving import CannotRun

pytest.importorskip("mlx_lm")
MOST = 20
SPEC: dict[str, Any] = {"num_draft": 3, "backend": "cpu", "dtype": "float32", "causal": True}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("pair")
    for name, layers in (("target", 2), ("draft", 1)):
        write_causal(place / name, "gpt2", n_layer=layers)
    return place


def test_all_programs_give_the_same_outputs(pair: Path) -> None:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, 300, rng.integers(3, 12)).tolist() for _ in range(5)]
    endless = load_causal(PLAIN, SPEC | {"place": str(pair)})[0](prompts, MOST, 1)
    for name, file in itertools.product(("target", "draft"), ("config", "generation_config")):
        edit_json(pair / name / f"{file}.json", eos_token_id=endless[0][5])
    outputs = {}
    for name in CAUSAL:
        generate_all, about = load_causal(name, SPEC | {"place": str(pair)})
        assert about["versions"] and about["dtype"] == "float32"
        outputs[name] = generate_all(prompts, MOST, 1)
        if name in (PLAIN, SPECULATIVE, AUTO, MLX_LM):
            assert generate_all(prompts, MOST, 3) == outputs[name]
        elif name in (MLX_LM_SPECULATIVE, "transformers", ASSISTED):
            with pytest.raises(CannotRun, match="one prompt at a time"):
                generate_all(prompts, MOST, 3)
    assert all(found == outputs[PLAIN] for found in outputs.values())
    assert {len(output) for output in outputs[PLAIN]} != {MOST}  # some end
    with pytest.raises(CannotRun, match="decoder-only"):
        load_causal("ctranslate2", SPEC | {"place": str(pair)})


def test_prompts_are_windows_of_a_text() -> None:
    assert windows_of(range(10), 3, 2) == [[0, 1], [3, 4], [6, 7]]
    with pytest.raises(ValueError, match="ask for less"):
        windows_of(range(5), 3, 2)
