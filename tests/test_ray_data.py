"""The class of docs/distributed.md for Ray Data: on tables, and in a job that loses a worker."""

import os
import pickle
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from speculative_t5 import SpeculativeDecoder

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from checkpoints import refused
from commands import caller
from conftest import REPOSITORY
from messages import check_message
from test_docs import blocks

pytestmark = pytest.mark.cpu  # outputs of commands are compared with those of others
(RECIPE,) = (
    block
    for block in blocks(REPOSITORY / "docs" / "distributed.md", "python")
    if "\nclass Generator:\n" in block
)
recipe: Any = ModuleType("recipe")
sys.modules["recipe"] = recipe  # where a pickle looks for its class
exec(compile(RECIPE, "docs/distributed.md", "exec"), vars(recipe))

WORDS = ["old", "man", "The", "sea", "and", "was", "fish"]
PROMPTS = [" ".join(WORDS[(i * j) % 7] for j in range(1, 2 + i % 9)) for i in range(24)]
ADDED = ["text", "finish_reason", "error"]


@pytest.fixture
def models(place: Path) -> tuple[str, str]:
    return str(place / "weights" / "target"), str(place / "weights" / "draft")


@pytest.fixture
def make(models: tuple[str, str]) -> Any:
    return lambda **options: recipe.Generator(*models, **({"max_tokens": 12} | options))


def table_of(prompts: Any, ids: Any = None) -> pa.Table:
    ids = pa.array(range(len(prompts)) if ids is None else ids, pa.int64())
    return pa.table({"id": ids, "sentence": pa.array(prompts, pa.string())})


def rows_of(table: pa.Table) -> list[tuple[Any, ...]]:
    """What is added to each row."""
    return list(zip(*(table[name].to_pylist() for name in ADDED), strict=True))


def decoded(models: tuple[str, str], prompts: list[str]) -> list[tuple[Any, ...]]:
    """What the decoder itself makes of prompts, one at a time."""
    decoder = SpeculativeDecoder.from_pretrained(*models, num_draft=5)
    outputs = [decoder.generate(prompt, max_tokens=12) for prompt in prompts]
    return [(done.text, done.finish_reason, None) for done in outputs]


def test_outputs_are_the_decoders_in_the_order_of_the_rows(make: Any, models: Any) -> None:
    expected = decoded(models, PROMPTS)
    assert len({text for text, *_ in expected}) > 7
    generate, table = make(), table_of(PROMPTS)
    assert rows_of(generate(table)) == expected
    halves = [generate(half) for half in (table[:7], table[7:])]
    assert rows_of(pa.concat_tables(halves)) == expected
    ids, arrays = np.arange(len(PROMPTS)), np.array(PROMPTS, dtype=object)  # as Spark gives them
    assert rows_of(generate(pa.table({"id": ids, "sentence": arrays}))) == expected


def test_other_columns_are_passed_on_and_types_do_not_depend_on_the_rows(make: Any) -> None:
    generate = make()
    others = {
        "score": pa.array([0.5, None], pa.float32()),
        "tags": pa.array([["a"], None], pa.list_(pa.large_string())),
        "kind": pa.array(["x", "y"]).dictionary_encode(),
        "id": pa.array([7, 2], pa.uint16()),
    }
    table = pa.table(others | {"sentence": ["The sea", "The old man"]})
    done = generate(table)
    assert done.column_names == [*table.column_names, *ADDED]
    assert done.drop_columns(ADDED).equals(table)
    assert {done.schema.field(name).type for name in ADDED} == {pa.string()}
    wrong = table.set_column(4, "sentence", pa.array([None, ""]))
    for same in (table[:0], wrong):
        assert generate(same).schema == done.schema


@pytest.fixture
def records(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> Any:
    """What `batch` says of the prompts."""
    (tmp_path / "weights").symlink_to(place / "weights")
    (tmp_path / "in.txt").write_text("\n".join(PROMPTS) + "\n")
    call = caller(tmp_path, monkeypatch, capfd)
    models = ("--model", "target", "--draft-model", "draft", "--max-tokens", "12")
    pair = (*models, "--num-draft", "5")
    return lambda *options: call("batch", "in.txt", *pair, *options).records


def test_sampled_outputs_are_those_of_batch_whatever_the_batches(make: Any, records: Any) -> None:
    found = [
        (record["text"], record["finish_reason"], None)
        for record in records("--temperature", "1", "--seed", "3")
    ]
    assert len(set(found)) > 20
    order = np.random.default_rng(0).permutation(len(PROMPTS))
    for part in (order[:5], order[5:], order):
        generate = make(temperature=1.0, seed=3)
        done = generate(table_of([PROMPTS[i] for i in part], part))
        assert rows_of(done) == [found[i] for i in part]


def test_a_row_that_cannot_be_used_has_an_error_and_no_output(make: Any) -> None:
    prompts = ["The old man", None, " ", "The sea " * 400, "old"]
    first, *wrong, last = rows_of(make()(table_of(prompts)))
    assert [first, last] == rows_of(make()(table_of(["The old man", "old"])))
    for (*nothing, error), found in zip(wrong, ("None", "empty", "tokens"), strict=True):
        assert nothing == [None, None]
        check_message(error, found)
    (number,) = rows_of(make()(pa.table({"id": [0], "sentence": [7]})))
    assert "got 7" in number[-1]


def test_one_is_pickled_before_its_first_call(make: Any) -> None:
    generate, table = make(), table_of(PROMPTS[:3])
    pickled = pickle.dumps(generate)
    assert len(pickled) < 2000, "it has names and options alone"
    expected, decoder = generate(table), generate.decoder
    assert pickle.loads(pickled)(table).equals(expected)
    assert generate(table).equals(expected) and generate.decoder is decoder


def test_what_is_wrong_with_all_rows_ends_the_job(make: Any, tmp_path: Path) -> None:
    table = table_of(["old", None])
    missing = recipe.Generator(str(tmp_path / "nothing"), None)
    with pytest.raises(ValueError, match="nothing"):
        missing(table)
    with pytest.raises(ValueError, match="temperature"):
        make(temperature=-1.0)(table)
    with refused("rows have the same id", "id"):
        make()(table_of(["old", "The sea"], [4, 4]))
    with refused("a prompt's index", "None"):
        make()(table_of(["old", "The sea"], [4, None]))


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
def test_a_ray_job_whose_worker_is_killed_loses_nothing(
    models: tuple[str, str], tmp_path: Path
) -> None:
    prompts = [f"{PROMPTS[i % 24]} {i}" for i in range(40)]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts))
    (tmp_path / "recipe.py").write_text(RECIPE)
    done = subprocess.run(
        [sys.executable, REPOSITORY / "tests" / "ray_job.py", tmp_path, *models],
        env=os.environ | {"PYTHONPATH": f"{REPOSITORY}{os.pathsep}{tmp_path}"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    workers = {*(tmp_path / "log").read_text().splitlines()}
    assert len(workers) == 3, "two, and one in the place of the one that was killed"
    table = pq.read_table(tmp_path / "out").sort_by("id")
    assert table["id"].to_pylist() == list(range(40))
    assert table["sentence"].to_pylist() == prompts
    assert rows_of(table) == decoded(models, prompts)
