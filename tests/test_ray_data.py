"""`Generator` on batches of every kind, and in a real Ray Data job whose worker is killed."""

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

from speculative_t5 import SpeculativeDecoder
from speculative_t5.ray_data import Generator

import mlx.core as mx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from checkpoints import refused
from commands import caller
from conftest import REPOSITORY
from messages import check_message

pytestmark = pytest.mark.cpu  # outputs of commands are compared with those of others
WORDS = ["old", "man", "The", "sea", "and", "was", "fish"]
PROMPTS = [" ".join(WORDS[(i * j) % 7] for j in range(1, 2 + i % 9)) for i in range(24)]
ADDED = ("text", "finish_reason", "tokens", "rounds", "drafted", "accepted", "error")
RECORDED = ("tokens", "rounds", "drafted", "accepted")  # in the statistics of batch's records


@pytest.fixture
def models(place: Path) -> tuple[str, str]:
    return str(place / "weights" / "target"), str(place / "weights" / "draft")


@pytest.fixture
def make(models: tuple[str, str]) -> Any:
    return lambda **options: Generator(*models, **({"max_tokens": 12, "num_draft": 5} | options))


def column(values: list[Any]) -> np.ndarray:
    return np.array(values, dtype=object)


def rows_of(batch: Any, names: tuple[str, ...] = ADDED) -> list[tuple[Any, ...]]:
    """The rows of either kind of batch, as values of Python."""
    columns = [getattr(batch[n], "to_pylist", None) or batch[n].tolist for n in names]
    return list(zip(*(values() for values in columns), strict=True))


def decoded(models: Any, prompts: list[str]) -> list[tuple[Any, ...]]:
    """The rows that the decoder itself gives."""
    decoder = SpeculativeDecoder.from_pretrained(*models, num_draft=5)
    outputs = decoder.generate_batch(prompts, max_tokens=12)
    return [
        (o.text, o.finish_reason, o.stats.emitted, o.stats.rounds, o.stats.drafted,
         o.stats.accepted, None)
        for o in outputs
    ]  # fmt: skip


def test_outputs_are_the_decoders_in_order(make: Any, models: Any) -> None:
    expected = decoded(models, PROMPTS)
    assert len({text for text, *_ in expected}) > 7
    ids = np.arange(len(PROMPTS))
    out = make(batch_size=5)({"id": ids, "prompt": column(PROMPTS)})
    assert list(out) == ["id", "prompt", *ADDED] and out["id"] is ids
    assert rows_of(out) == expected
    generate = make(batch_size=16)
    table = generate(pa.table({"id": ids, "prompt": PROMPTS}))
    assert table.column_names == ["id", "prompt", *ADDED]
    assert rows_of(table) == expected
    halves = [generate(pa.table({"prompt": half})) for half in (PROMPTS[:7], PROMPTS[7:])]
    assert rows_of(pa.concat_tables(halves)) == expected


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
    found = records("--temperature", "1", "--seed", "3", "--scores", "-n", "2")
    generate = make(
        index_column="number", temperature=1.0, seed=3, scores=True, num_return_sequences=2
    )
    order = np.random.default_rng(0).permutation(len(PROMPTS))
    for part in (order[:5], order[5:]):
        batch = {"number": part, "prompt": column([PROMPTS[i] for i in part])}
        for out in (generate(batch), generate(pa.table(batch))):
            names = ("text", "finish_reason", "score", "alternatives")
            for index, done in zip(part, rows_of(out, (*names, *RECORDED)), strict=True):
                named = [found[index][name] for name in names]
                named[2] = pytest.approx(named[2])
                named[3] = [a | {"score": pytest.approx(a["score"])} for a in named[3]]
                assert list(done) == [*named, *(found[index]["stats"][n] for n in RECORDED)]
    assert len({record["text"] for record in found}) == len(found)


def test_rows_with_the_same_index_sample_alike(make: Any) -> None:
    generate = make(index_column="i", temperature=1.0)
    batch = pa.table({"i": [4, 7, 4, 4], "prompt": ["The old man", "The sea"] * 2})
    first, _, third, fourth = rows_of(generate(batch))
    assert first == third
    alone = rows_of(generate(pa.table({"i": [4], "prompt": ["The sea"]})))
    assert [fourth] == alone
    with_null = {"i": np.array([4.0, np.nan]), "prompt": column(["The old man", "The sea"])}
    as_float, without = rows_of(generate(with_null))  # NumPy has no integers that are null
    assert as_float == first
    check_message(without[-1], "nan")


def test_a_row_that_cannot_be_used_has_an_error_and_no_output(make: Any) -> None:
    prompts = ["The old man", None, " ", "The sea " * 400, "old", "\ud800"]
    generate = make(scores=True)
    out = generate({"prompt": column([*prompts, 7])})
    errors = out["error"].tolist()
    assert [error is None for error in errors] == [True, False, False, False, True, False, False]
    for error, found in zip(errors[1:4] + errors[5:], ("None", "empty", "tokens", "0x", "7"),
                            strict=True):  # fmt: skip
        check_message(error, found)
    for row in (1, 2, 3, 5, 6):
        assert [out[name][row] for name in ADDED[:-1]] == [None, None, 0, 0, 0, 0]
        assert np.isnan(out["score"][row])
    table = generate(pa.table({"prompt": prompts[:5]}))
    assert rows_of(table) == rows_of(out)[:5]
    assert table["score"].null_count == 3
    bytes_ = generate(pa.table({"prompt": pa.array([7, None])}))
    assert bytes_["text"].null_count == 2
    out = make(truncate=True, max_source_length=8)(pa.table({"prompt": ["The sea " * 9, "old"]}))
    assert out["truncated"].to_pylist() == [True, False]


@pytest.mark.parametrize("many", [{}, {"scores": True, "temperature": 1.0, "index_column": "i",
                                       "num_return_sequences": 2, "truncate": True}])  # fmt: skip
def test_types_do_not_depend_on_the_rows(make: Any, many: dict[str, Any]) -> None:
    generate = make(column_prefix="out_", **many)
    full = pa.table({"i": [0, 1], "prompt": ["The sea", "The old man"]})
    none = full.slice(0, 0)
    wrong = full.set_column(1, "prompt", pa.array([None, ""], pa.string()))
    schemas = [generate(table).schema for table in (full, none, wrong)]
    assert schemas[0] == schemas[1] == schemas[2]
    assert not [field for field in schemas[0] if pa.types.is_null(field.type)]
    assert schemas[0].names == ["i", "prompt", *generate.columns]
    batches = [
        generate({name: table[name].to_numpy(zero_copy_only=False) for name in ("i", "prompt")})
        for table in (full, none, wrong)
    ]
    kinds = [{name: array.dtype for name, array in batch.items()} for batch in batches]
    assert kinds[0] == kinds[1] == kinds[2]
    assert [len(array) for array in batches[1].values()] == [0] * len(kinds[0])


def test_pickles_hold_options_alone(make: Any) -> None:
    generate = make(dtype=mx.float32)
    batch = pa.table({"prompt": PROMPTS[:3]})
    before = pickle.dumps(generate)
    expected = generate(batch)
    assert generate.decoder is generate.decoder
    assert pickle.dumps(generate) == before and len(before) < 2000
    assert pickle.loads(before)(batch).equals(expected)


def test_columns_that_do_not_fit_are_refused(make: Any) -> None:
    for options, batch, found in (
        ({}, {"line": column(["a"]), "n": np.arange(1)}, "'line', 'n'"),
        ({}, {}, "none"),
        ({"index_column": "i", "temperature": 1.0}, {"prompt": column(["a"])}, "'i'"),
        ({"column_prefix": "x_"}, {"prompt": column(["a"]), "x_error": np.arange(1)}, "'x_error'"),
    ):
        for each in (batch, pa.table(batch)):
            with refused(".", found):
                make(**options)(each)
    with refused("a batch must be", "list"):
        make()([{"prompt": "a"}])
    assert make()({"prompt": ["old man"]})["error"].tolist() == [None], "a list is a column"


def test_wrong_options_are_refused_before_any_model_is_loaded() -> None:
    wrong: dict[str, Any] = {
        "temperature": -1.0, "num_draft": 0, "batch_size": 0, "dtype": "int8", "max_tokens": 0,
        "prompt_column": 3, "index_column": 3, "column_prefix": None, "draft": 5,
    }  # fmt: skip
    for name, value in wrong.items():
        with refused(".", value):
            Generator("no such model", **{name: value})
    together: list[tuple[dict[str, Any], str]] = [
        ({"temperature": 0.7}, "temperature is 0.7"),
        ({"steady": True, "batch_size": 4}, "4"),
        ({"prompt_column": "text"}, "'text'"),
    ]
    for options, found in together:
        with refused(".", found):
            Generator("no such model", **options)


def test_unknown_options_and_models_are_refused(make: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'probabilities'"):
        make(probabilities=True)
    missing = Generator(tmp_path / "nothing")
    assert len(missing({"prompt": column([])})["text"]) == 0
    with pytest.raises(ValueError, match="nothing"):  # and no errors of single rows
        missing({"prompt": column(["a", None])})
    with pytest.raises(ValueError, match="has the id 1000000"):
        make(suppress_tokens=[10**6])({"prompt": column(["a"])})


def test_a_ray_job_whose_worker_is_killed_loses_nothing(
    models: tuple[str, str], tmp_path: Path
) -> None:
    prompts = [f"{PROMPTS[i % 24]} {i}" for i in range(40)]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts))
    done = subprocess.run(
        [sys.executable, REPOSITORY / "tests" / "ray_job.py", tmp_path, *models],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    workers = {*(tmp_path / "log").read_text().splitlines()}
    assert len(workers) == 3, "two, and one in the place of the one that was killed"
    table = pq.read_table(tmp_path / "out").sort_by("id")
    assert table["id"].to_pylist() == list(range(40))
    assert table["prompt"].to_pylist() == prompts
    assert rows_of(table) == decoded(models, prompts)
