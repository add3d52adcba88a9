"""`Generate`, for Ray Data: on tables and arrays, and in a job that loses a worker."""

import os
import pickle
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from speculative_t5 import SpeculativeDecoder
from speculative_t5.decoding.logits import NOTHING_LEFT
from speculative_t5.ray import Generate

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
ADDED = ["text", "finish_reason", "stats", "error"]
SHOWN = ["text", "finish_reason", "error"]


@pytest.fixture
def models(place: Path) -> tuple[str, str]:
    return str(place / "weights" / "target"), str(place / "weights" / "draft")


@pytest.fixture
def make(models: tuple[str, str]) -> Any:
    usual = {"max_tokens": 12, "num_draft": 5, "column": "sentence"}
    return lambda **options: Generate(*models, **(usual | options))


def table_of(prompts: Any, ids: Any = None) -> pa.Table:
    ids = pa.array(range(len(prompts)) if ids is None else ids, pa.int64())
    return pa.table({"id": ids, "sentence": pa.array(prompts, pa.string())})


def rows_of(table: pa.Table) -> list[tuple[Any, ...]]:
    """What is added to each row."""
    return list(zip(*(table[name].to_pylist() for name in SHOWN), strict=True))


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


@pytest.mark.parametrize("kind", ["numpy", "pandas"])
def test_arrays_and_tables_of_pandas_have_the_same_columns(kind: str, make: Any) -> None:
    prompts = [*PROMPTS[:5], " ", ""]
    table = table_of(prompts)
    expected = make()(table)
    if kind == "numpy":
        batch: Any = {"id": np.arange(7), "sentence": np.array(prompts, object)}
        found = make()(batch)
        assert [*found] == expected.column_names
        assert found["id"] is batch["id"] and [*batch] == ["id", "sentence"]
        assert {array.dtype for name, array in found.items() if name in ADDED} == {np.dtype(object)}
    else:
        pytest.importorskip("pandas")
        batch = table.to_pandas()
        found = make()(batch)
        assert [*found.columns] == expected.column_names
        assert [*batch.columns] == ["id", "sentence"]
    for name in ADDED:  # pandas has NaN for what is missing in a text
        values = [None if each != each else each for each in found[name].tolist()]
        assert values == expected[name].to_pylist()


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
    assert {done.schema.field(name).type for name in SHOWN} == {pa.string()}
    wrong = table.set_column(4, "sentence", pa.array([None, ""]))
    for same in (table[:0], wrong):
        assert generate(same).schema == done.schema


def test_columns_are_those_that_the_options_give(make: Any, models: Any) -> None:
    generate = make(
        temperature=1.0,
        num_return_sequences=2,
        scores=True,
        truncate=True,
        max_source_length=8,
        id_column="id",
        column_prefix="out_",
        dtype=mx.float32,
    )
    table = table_of(["The old man", "The sea and the fish " * 9, None])
    done = pickle.loads(pickle.dumps(generate))(table)
    names = ["text", "finish_reason", "score", "truncated", "alternatives", "stats", "error"]
    assert done.column_names == ["id", "sentence", *(f"out_{name}" for name in names)]
    assert [*generate.columns] == done.column_names[2:]
    assert done["out_truncated"].to_pylist() == [False, True, None]
    first, second, nothing = done["out_alternatives"].to_pylist()
    assert [*first[0]] == ["text", "finish_reason", "score"] and len(second) == 1
    assert nothing is None
    decoder = SpeculativeDecoder.from_pretrained(*models, num_draft=5)
    own = decoder.generate(
        "The old man", max_tokens=12, temperature=1.0, num_return_sequences=2, scores=True
    )
    assert done["out_text"].to_pylist()[0] == own.text
    assert done["out_score"].to_pylist()[0] == own.score
    assert first[0]["text"] == own.alternatives[0].text
    stats = done["out_stats"].to_pylist()[0]
    assert stats["tokens"] == own.stats.emitted and stats["rounds"] == own.stats.rounds
    assert stats["tokens_per_round"] == own.stats.tokens_per_round
    assert generate(table[:0]).schema == done.schema


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
        generate = make(temperature=1.0, seed=3, id_column="id")
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


def test_an_output_that_cannot_go_on_is_an_error_of_its_row(make: Any, models: Any) -> None:
    decoder = SpeculativeDecoder.from_pretrained(*models, num_draft=5)
    outputs = [decoder.generate(prompt, max_tokens=12) for prompt in PROMPTS]
    begun = outputs[0].tokens[:2]
    hopeless = [output.tokens[:2] == begun for output in outputs]
    assert 0 < sum(hopeless) < len(PROMPTS)

    def forbid(tokens: mx.array, logits: mx.array) -> mx.array:
        return logits - mx.inf if tokens.tolist() == [0, *begun] else logits

    table = table_of(PROMPTS)
    rows = rows_of(make(logits_processors=[forbid])(table))
    for (text, reason, error), output, is_hopeless in zip(rows, outputs, hopeless, strict=True):
        if is_hopeless:
            assert (text, reason) == (None, None) and NOTHING_LEFT in error
        else:
            assert (text, reason, error) == (output.text, output.finish_reason, None)


def test_what_is_wrong_with_all_rows_ends_the_job(make: Any, tmp_path: Path) -> None:
    table = table_of(["old", None])
    missing = Generate(str(tmp_path / "nothing"), None, column="sentence")
    assert missing(table[:0]).num_rows == 0, "without rows there is nothing to load"
    with pytest.raises(ValueError, match="nothing"):
        missing(table)
    for ids in ([4, 4], [4, None], [-1, 2]):
        found = {4: "two rows have the number 4", None: "got None", -1: "got -1"}
        with refused("number", found[ids[1] if ids[0] == 4 else -1]):
            make(id_column="id")(table_of(["old", "The sea"], ids))
    with refused("the rows have no column 'prompt'", "sentence"):
        make(column="prompt")(table)
    with refused("already have a column", "'text'"):
        make()(table.append_column("text", table["sentence"]))
    with refused("a batch must be", "list"):
        make()([1])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"temperature": -1.0}, "temperature must be .* got -1.0"),
        ({"temperature": 1.0}, "temperature is 1.0, and what a row samples .*: give the id_column"),
        ({"column": 7}, "column must be text, got 7"),
        ({"column": "text"}, "already have a column 'text'.*: give a column_prefix"),
        ({"num_draft": 0}, "num_draft must be an integer of at least 1 or 'auto', got 0"),
        ({"group": object()}, "group splits a model, .*: leave it out"),
        ({"batch_size": 0}, "batch_size must be an integer from 1"),
    ],
)
def test_a_wrong_option_is_refused_before_there_is_a_job(
    options: dict[str, Any], said: str, make: Any
) -> None:
    with pytest.raises(ValueError, match=said):
        make(**options)


def test_an_unknown_option_is_named(make: Any) -> None:
    with pytest.raises(
        TypeError, match="unexpected keyword argument 'max_token': write max_tokens"
    ):
        make(max_token=7)


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
def test_a_ray_job_whose_worker_is_killed_loses_nothing(
    models: tuple[str, str], tmp_path: Path
) -> None:
    prompts = [f"{PROMPTS[i % 24]} {i}" for i in range(40)]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts))
    done = subprocess.run(
        [sys.executable, REPOSITORY / "tests" / "ray_job.py", tmp_path, *models],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    workers = {*(tmp_path / "log").read_text().splitlines()}
    assert len(workers) == 3, "two, and one in the place of the one that was killed"
    table = pq.read_table(tmp_path / "out").sort_by("id")
    assert table["id"].to_pylist() == list(range(40))
    assert table["sentence"].to_pylist() == prompts
    assert rows_of(table) == decoded(models, prompts)
