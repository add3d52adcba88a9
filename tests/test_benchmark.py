"""The benchmark's counts and checks, on random models; times are never asserted."""

import json
import random
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from speculative_t5 import SpeculativeDecoder
from speculative_t5.cli import bench as bench_command
from speculative_t5.cli.bench import _counts, bench
from speculative_t5.cli.examples import SENTENCES_TO_CORRECT
from speculative_t5.decoding import (
    ModelDrafter,
    Outcome,
    Plan,
    decode,
)
from speculative_t5.generation import Engine, GenerationOptions
from speculative_t5.measure import (
    PLAIN_DECODING,
    SHAPES,
    Comparison,
    ReplayDrafter,
    Run,
    Variant,
    VariantReport,
    check_pair_of_shapes,
    config_of_shape,
    random_model,
    random_prompts,
    replaying_plan,
    report_on,
    throughput,
    variants_of,
)
from speculative_t5.measure.comparison import record
from speculative_t5.measure.reports import make_report
from speculative_t5.models import T5, EncoderDecoder, T5Config, T5GemmaConfig, new_model

import mlx.core as mx
import pytest
from checkpoints import refused
from commands import Printed
from conftest import GREEDY as GROUPS
from conftest import REPOSITORY, tiny_draft, tiny_model
from mlx.utils import tree_flatten

GREEDY = GenerationOptions(max_tokens=30)
PROMPTS = [[5, 9, 1], [7, 3, 3, 8, 1], [4, 1]]


@pytest.fixture(scope="module")
def target() -> T5:
    return tiny_model(vocab_size=20, layers=2, eos_token_id=19)


@pytest.mark.parametrize("drafter", ["model", "sharing", "lookup", "both", None])
def test_rounds_are_recorded(target: T5, drafter: str | None) -> None:
    draft: Any = drafter
    if drafter in ("model", "sharing", "both"):
        draft = tiny_draft(target, block=int(drafter == "sharing"))
    decoder = SpeculativeDecoder(target, draft, num_draft=3, lookup=drafter == "both")
    for prompt in PROMPTS:
        run = record(Variant("", decoder, GREEDY), prompt)
        done = decoder.generate(prompt, max_tokens=30)
        assert run.tokens == done.tokens and sum(run.emitted) == done.stats.emitted
        assert len(run.rounds) == len(run.emitted) == len(run.outcomes) == done.stats.rounds > 1
        # A lookup after a model has to wait for the model's tokens, unless there is no room.
        both = [2 if num_draft else 1 for num_draft in done.stats.num_draft]
        assert run.waits == (both if drafter == "both" else [1] * len(run.rounds))


def test_outputs_of_one_round_leave_nothing_to_measure(target: T5) -> None:
    variants = variants_of({"lookup": SpeculativeDecoder(target, "lookup")}, 1)
    with refused("every output ends with its first token"):
        report_on(variants, PROMPTS, 1)


def made_up(emitted: list[int], seconds: float, drafted: int = 0) -> Run:
    """A run whose rounds emit these numbers of tokens and take equally long."""
    count = len(emitted)
    outcomes = [Outcome(drafted, [drafted], [n - 1], 0.01, 0.02) for n in emitted]
    waits, tokens = [3] + [1] * (count - 1), [*range(sum(emitted))]
    return Run(seconds * count, [seconds] * count, emitted, outcomes, waits, tokens)


def test_figures_by_hand() -> None:
    alone = [made_up([1] * 6, 2.0), made_up([1] * 4, 2.0)]
    turns = [
        {PLAIN_DECODING: alone, "K = 3": [made_up(a, 3.0, 3), made_up(b, 3.0, 3)]}
        for a, b in (([3, 3], [4]), ([3, 3], [2, 2]), ([1, 2, 3], [2, 2]))
    ]
    comparison = Comparison(turns)
    report = make_report(PLAIN_DECODING, comparison, alone)
    assert report.forwards == report.speedup == report.waits == 1
    report = make_report("K = 3", comparison, turns[0]["K = 3"])
    assert report.forwards == 10 / 4  # the median of 10 / 3, 10 / 4 and 10 / 5
    assert (report.tokens_per_round, report.waits, report.same) == (10 / 5, 1, 2)
    # After first rounds, 3 tokens in 1 round, 5 in 2 and 7 in 3.
    assert report.speedup == pytest.approx(2 / (6 / 5))
    assert report.acceptance == (10 - 5) / 15
    assert report.draft_ms == pytest.approx(10) and report.other_ms == pytest.approx(2970)


@dataclass(frozen=True)
class Measured:
    """What `bench --json` said of the shipped pair, and the widths of passes in its plans."""

    result: dict[str, Any]
    widths: set[int | None]

    @property
    def rows(self) -> list[dict[str, Any]]:
        return self.result["rows"]


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    prompts = tmp_path_factory.mktemp("bench") / "prompts.txt"
    prompts.write_text(f"{SENTENCES_TO_CORRECT[0]}\n\n")
    models = [str(REPOSITORY / "weights" / name) for name in ("correct-base", "correct-small")]
    options: Any = {"turns": 1, "num_draft": "3", "max_tokens": 32, "as_json": True}
    options |= {"dtype": "float32", "steady": True, "prompts": prompts}
    widths, plan = set(), Engine.plan

    def planned(*given: Any, **options: Any) -> Plan:
        made = plan(*given, **options)
        widths.add(made.width)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "plan", planned)
        printed = Printed(patch)
        bench(model=models[0], draft_model=models[1], **options)
        return Measured(json.loads(printed.readouterr()[0]), widths)


def test_the_command_measures_every_way_to_draft(shipped: Measured) -> None:
    names = [row["name"] for row in shipped.rows]
    assert names == ["regular", "K = 3", "steady K = 3", "auto", "lookup"]
    assert None in shipped.widths and len(shipped.widths) == 2, "steady passes have one width"


def test_rows_of_the_command_have_all_figures(shipped: Measured) -> None:
    assert shipped.rows[0].keys() == VariantReport.__dataclass_fields__.keys()
    plain, drafting, *_ = (SimpleNamespace(**row) for row in shipped.rows)
    assert plain.speedup == plain.tokens_per_round == 1 and plain.acceptance == 0
    assert drafting.tokens_per_second > 0 and drafting.verify_ms > 0


def test_all_ways_give_the_same_output_and_wait_once(shipped: Measured) -> None:
    assert all(row["same"] == row["outputs"] == 1 for row in shipped.rows)
    # A lookup behind a model's tokens, which "auto" may try, waits for them.
    assert all(row["waits"] == 1 or row["name"] == "auto" for row in shipped.rows)


def test_the_table_says_what_was_measured(shipped: Measured) -> None:
    banner = bench_command._bench_table(shipped.result, [])[0]
    assert banner.startswith("correct-base, correct-small drafts; 1 prompt, greedy, 1 turn")
    assert shipped.result["prompts"] == 1, "an empty line is none"


def test_batches_of_several_sizes_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(throughput, "BATCHES", 1)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(SENTENCES_TO_CORRECT[:2]))
    models: Any = {"model": "correct-base", "draft_model": "correct-small", "prompts": prompts}
    sizes: Any = {"batch_size": "1,3", "turns": 1, "dtype": "float32"}
    bench(num_draft="2", as_json=True, **sizes, **models)
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["name"], row["batch_size"]) for row in rows] == [
        (name, size) for name in ("regular", "K = 2", "auto", "lookup") for size in (1, 3)
    ]
    assert all(row["same"] == row["outputs"] == 3 for row in rows), "prompts fill the batch"
    plain, drafting = (SimpleNamespace(**row) for row in rows[1:3])
    assert (plain.speedup, plain.drafted) == (1.0, 0.0) and 1 < drafting.drafted <= 2
    assert plain.tokens_per_second > 1  # tokens over seconds, not the reverse
    bench(**sizes, **models)
    title, heads, *lines, _ = capsys.readouterr().out.splitlines()
    assert title.endswith("Device(cpu, 0)") and heads.split()[0] == "batch"
    assert [line.split()[:2] for line in lines[:2]] == [["1", "plain"], ["1", "auto"]]


def test_a_random_pair_is_measured_in_batches(small_shapes: None, capsys: Any) -> None:
    sizes: Any = {"source": 20, "max_tokens": 12, "count": 2, "turns": 1, "dtype": "float32"}
    bench(random_weights="t5-base:t5-small", acceptance=1.0, batch_size="2", num_draft="3", **sizes)
    _, _, plain, drafting, auto, _ = capsys.readouterr().out.splitlines()
    assert plain.split()[:2] == ["2", "plain"] and auto.split()[:2] == ["2", "auto"]
    assert drafting.split()[-2:] == ["3.0", "6/6"]  # 12 tokens by three passes


def test_numbers_and_ranges_are_lengths() -> None:
    assert _counts("1-4", "--n", "1") == [1, 2, 3, 4]
    assert _counts("8,2, 2-3", "--n", "1") == [2, 3, 8]


def test_options_are_checked_before_anything_is_measured() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"acceptance": 2.0}, "acceptance must be between 0 and 1, got 2.0"),
        ({"turns": 0}, "turns must be an integer of at least 1, got 0"),
        *(({"num_draft": wrong}, "--num-draft") for wrong in ("", "a", "1-", "-3", "0-2", "4-2")),
        *(({"batch_size": wrong}, "--batch-size") for wrong in ("", "0", "1;4", "4-2")),
        ({"batch_size": "4", "steady": True}, "--steady decodes one prompt at a time"),
        ({"random_weights": "gpt2"}, "TARGET:DRAFT, such as t5-base:t5-small, got 'gpt2'"),
    ]
    for options, found in cases:
        with refused(found):
            bench(**options)


@pytest.mark.parametrize(("acceptance", "count"), [(0.6, 10), (1.0, 3)])
def test_replayed_drafts_are_right_as_often_as_asked(acceptance: float, count: int) -> None:
    """The output is the target's own all the same."""
    target = tiny_model(vocab_size=20, layers=2, eos_token_id=19)
    choice = random.Random(0)
    prompts = [[*choice.choices(range(2, 19), k=4), 1] for _ in range(count)]
    alone = SpeculativeDecoder(target)
    outputs = {tuple(p): alone.generate(p, max_tokens=60).tokens for p in prompts}
    decoder = SpeculativeDecoder(target, tiny_model(vocab_size=20, seed=3), num_draft=1)
    plan = replaying_plan(decoder, outputs, acceptance)
    requests = decoder.engine.requests(enumerate(prompts), GenerationOptions(max_tokens=60))
    ended = [each for each in decode(target, requests, plan, batch_size=1) if each.finish_reason]
    done = sorted(ended, key=lambda each: each.index)
    assert [last.output for last in done] == list(outputs.values())
    drafted = sum(last.stats.drafted for last in done)
    accepted = sum(last.stats.accepted for last in done)
    assert drafted > 20 * count
    # Over a few hundred tokens; the last one of an output that ended early may be drafted wrong.
    assert accepted / drafted == pytest.approx(acceptance, abs=0.07)


def test_replayed_drafts_follow_the_context() -> None:
    first, second = [5, 9, 1], [7, 3, 3, 8, 1]
    outputs = {tuple(first): list(range(2, 12)), tuple(second): [7, 8, 9, 10, 11]}
    inner_model = tiny_model(vocab_size=20)
    inner: Any = ModelDrafter(inner_model, 20)
    calls, propose = [], inner.propose
    inner.propose = lambda *given: calls.append(given[1]) or propose(*given)
    drafter = ReplayDrafter(inner, outputs, acceptance=1.0, target=inner_model.info)
    drafter.start([first])
    for drafts in (
        [([], 3, [2, 3, 4]), ([2, 3], 2, [4, 5])],
        [([], 0, []), ([7], 2, [8, 9]), ([7, 8], 2, [9, 10])],
    ):
        for emitted, num_draft, expected in drafts:
            draft = drafter.propose([[0, *emitted]], num_draft, GROUPS, None)
            assert draft.tokens.tolist() == [expected]
        drafter.replace([0], [second])
        drafter.select([0])
    assert calls == [3, 2, 0, 2, 2], "at the cost of its own drafts"


def test_shapes_are_the_published_ones() -> None:
    """Count parameters, in millions, of models that are never evaluated."""
    models = {shape: new_model(config_of_shape(shape)) for shape in SHAPES}
    millions = {
        shape: round(sum(w.size for _, w in tree_flatten(model.parameters())) / 1e6, 1)
        for shape, model in models.items()
    }
    assert millions == {
        "t5-efficient-tiny": 15.6,
        "t5-small": 60.5,
        "t5-base": 222.9,
        "t5-large": 737.7,
        "t5-3b": 2851.6,
        "flan-t5-base": 247.6,
        "flan-t5-large": 783.2,
        "flan-t5-xl": 2849.8,
        "t5gemma-s": 312.5,
        "t5gemma-b": 591.5,
        "t5gemma-l": 1241.8,
        "t5gemma-xl": 3767.0,
        "t5gemma-2b": 5596.9,
        "t5gemma-9b": 20333.4,
        "t5gemma2-270m": 368.4,
        "t5gemma2-1b": 1697.8,
        "t5gemma2-4b": 7089.1,
    }


@pytest.fixture
def small_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put small shapes under the names of published ones, and measure briefly."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    base = T5Config(24, 8, 48, 3, 3, 3, vocab_size=60)
    small = T5Config(16, 8, 32, 2, 2, 2, vocab_size=60)
    gemma = config_of_shape("t5gemma2-270m")
    assert isinstance(gemma, T5GemmaConfig)
    stack = replace(gemma.decoder, **heads, hidden_size=32, intermediate_size=48)
    gemma = replace(gemma, encoder=stack, decoder=stack, vocab_size=60, eos_token_ids=(59,))
    for name, config in (("t5-base", base), ("t5-small", small), ("t5gemma2-270m", gemma)):
        monkeypatch.setitem(SHAPES, name, partial(replace, config))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [("t5-small", mx.float32), ("t5-small", mx.bfloat16), ("t5gemma2-270m", mx.float32)],
)
def test_outputs_of_random_models_do_not_end_and_each_token_follows_itself(
    small_shapes: None, shape: str, dtype: mx.Dtype
) -> None:
    model = random_model(shape, dtype=dtype, seed=1)
    assert isinstance(model, EncoderDecoder)
    found, again = (
        dict(tree_flatten(each.parameters()))
        for each in (model, random_model(shape, dtype=dtype, seed=1))
    )
    assert {w.dtype for w in found.values()} <= {dtype, mx.float32}
    assert found["shared.weight"].dtype == dtype
    assert all(mx.array_equal(found[name], again[name]) for name in found)
    for prompt in random_prompts(model, 20, 3):
        done = SpeculativeDecoder(model).generate(prompt, max_tokens=40)
        assert done.finish_reason == "length"
        assert len({*done.tokens}) == 1


def test_shapes_that_make_no_pair_are_refused() -> None:
    for pair, found in (
        (("t5-base", "t5gemma-s"), "t5-base has the vocabulary of t5, t5gemma-s that of T5Gemma 1"),
        (("t5gemma-s", "t5gemma2-1b"), "of T5Gemma 1, t5gemma2-1b that of T5Gemma 2"),
        (("t5-base", "gpt2"), "there is no shape 'gpt2': choose from t5-efficient-tiny, t5-small"),
    ):
        with refused(found):
            check_pair_of_shapes(*pair)
    check_pair_of_shapes("t5-3b", "t5-small")


def test_a_random_pair_is_measured(
    small_shapes: None, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    widths, start = set(), T5.start

    def watched(*given: Any, width: int | None = None) -> Any:
        widths.add(width)
        return start(*given, width=width)

    monkeypatch.setattr(T5, "start", watched)
    sizes: Any = {"source": 20, "max_tokens": 12, "count": 1, "turns": 1, "num_draft": "1,3"}
    sizes |= {"steady": True, "dtype": "float32"}
    bench(random_weights="t5-base:t5-small", acceptance=1.0, **sizes)
    title, names, *rows, forwards, _, _ = capsys.readouterr().out.splitlines()
    ends = {name: names.index(name) + len(name) for name in ("waits", "forwards", "same output")}
    columns = [[row[:end].split()[-1] for end in ends.values()] for row in rows]
    assert columns == [["1.00", n, "1/1"] for n in ("1.00", "2.00", "4.00", "2.00", "4.00")]
    names = ["plain", "K = 1", "K = 3", "steady K = 1", "steady K = 3"]
    assert [row[:12].rstrip() for row in rows] == names
    assert widths >= {None, 2, 4}
    assert max(map(len, (title, names, forwards))) <= 140 and forwards.startswith("forwards: ")
