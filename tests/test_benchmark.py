"""What bench reports, on random models: counts and checks, never times."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from speculative_t5 import SpeculativeDecoder
from speculative_t5.bench.benchmark import (
    GREEDY,
    Bench,
    Costs,
    Report,
    Run,
    Variant,
    _Stepper,
    first_token_seconds,
    observed,
    variants_of,
)
from speculative_t5.bench.synthetic import (
    CAUSAL_SHAPES,
    SHAPES,
    Replayed,
    check_shapes,
    context_of,
    random_model,
    random_prompts,
    synthetic_plan,
)
from speculative_t5.cli.bench import _lengths, bench, draw
from speculative_t5.decoding.drafters import ModelDrafter
from speculative_t5.decoding.loop import decode
from speculative_t5.decoding.schedule import Outcome
from speculative_t5.models.causal import CausalModel, build
from speculative_t5.models.t5.model import T5

import mlx.core as mx
import pytest
from conftest import KINDS, REPOSITORY, run, tiny, tiny_causal, tiny_draft, tiny_model
from messages import check_message
from mlx.utils import tree_flatten

PROMPTS = [[5, 9, 1], [7, 3, 3, 8, 1], [4, 1]]


@pytest.fixture(scope="module")
def target() -> T5:
    return tiny_model(vocab_size=20, layers=2, eos_token_id=19)


@pytest.mark.parametrize("drafter", ["model", "lookup", None])
@pytest.mark.parametrize("num_draft", [1, 5, "auto"])
def test_a_round_waits_once(target: T5, drafter: str | None, num_draft: Any) -> None:
    draft = tiny_draft(target) if drafter == "model" else drafter
    decoder = SpeculativeDecoder(target, draft, num_draft=num_draft)  # type: ignore[arg-type]
    decoder.generate(PROMPTS[0])  # models are compiled when they are first used
    for prompt in PROMPTS:
        plan = decoder.plan([(0, prompt)], GREEDY, 30)
        seen = observed(target, prompt, plan)
        assert seen.waits == [1] * len(seen.rounds) and len(seen.rounds) == len(seen.emitted) > 1
        assert seen.tokens == decoder.generate(prompt, max_tokens=30).tokens


def test_a_second_wait_is_counted(target: T5, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = SpeculativeDecoder(target, tiny_draft(target), num_draft=3)
    decoder.generate(PROMPTS[0])
    propose = ModelDrafter.propose

    def reading(self: ModelDrafter, *arguments: Any) -> Any:
        draft = propose(self, *arguments)
        draft.tokens.tolist()
        return draft

    monkeypatch.setattr(ModelDrafter, "propose", reading)
    seen = observed(target, PROMPTS[0], decoder.plan([], GREEDY, 30))
    assert set(seen.waits) == {2}


@pytest.mark.parametrize(
    ("kind", "acceptance"), [("t5", 0.0), ("t5", 0.6), ("t5", 0.9), ("t5", 1.0), ("gpt2", 0.6)]
)
def test_replayed_drafts_are_right_as_often_as_asked(
    target: Any, kind: str, acceptance: float
) -> None:
    """And the output is the target's own whatever the drafts are."""
    choice = random.Random(0)
    if kind != "t5":
        target = tiny_causal(kind, vocab_size=20, layers=2, seed=26)  # whose outputs vary
    prompts = [[*choice.choices(range(2, 19), k=4), 1] for _ in range(12)]
    alone = SpeculativeDecoder(target)
    outputs = {tuple(p): alone.generate(p, max_tokens=100).tokens for p in prompts}
    decoder = SpeculativeDecoder(target, tiny(kind, vocab_size=20, seed=3), num_draft=1)
    drafted = accepted = 0
    for prompt in prompts:
        plan = synthetic_plan(decoder, outputs, acceptance, 100)
        rounds = list(decode(target, [(0, prompt)], plan, batch_size=1))
        assert rounds[-1].output == outputs[tuple(prompt)]
        drafted += rounds[-1].stats.drafted
        accepted += rounds[-1].stats.accepted
    assert drafted > 300
    # Of a few hundred draws; the last place of an output that ended early may be drafted wrong.
    assert accepted / drafted == pytest.approx(acceptance, abs=0.07)


def test_replayed_drafts_come_from_the_drafter_and_its_steps(target: T5) -> None:
    outputs = {tuple(PROMPTS[0]): list(range(2, 12)), tuple(PROMPTS[1]): [7] * 10}
    calls = []

    class Noted(ModelDrafter):
        def propose(self, context: Any, num_draft: int, keys: Any) -> Any:
            calls.append(num_draft)
            return super().propose(context, num_draft, keys)

    drafter = Replayed(Noted(target, GREEDY, 20), outputs, 1.0, 20)
    drafter.start(PROMPTS[:1])
    assert drafter.propose([[0]], 3, None).tokens.tolist() == [[2, 3, 4]]
    assert drafter.propose([[0, 2, 3]], 2, None).tokens.tolist() == [[4, 5]]
    assert drafter.propose([[0, 2]], 0, None).tokens.shape == (1, 0)
    drafter.replace([0], PROMPTS[1:2])
    assert drafter.propose([[0]], 2, None).tokens.tolist() == [[7, 7]]
    drafter.select([0])
    assert calls == [3, 2, 0, 2]


def test_replayed_drafts_follow_contexts_that_begin_with_prompts() -> None:
    model = tiny_causal(vocab_size=20)
    outputs = {tuple(PROMPTS[0]): list(range(2, 12)), tuple(PROMPTS[1]): [7, 8, 9, 10, 11]}
    drafter = Replayed(ModelDrafter(model, GREEDY, 20), outputs, 1.0, 20)
    first, second = PROMPTS[:2]
    drafter.start([first])
    assert drafter.propose([first], 3, None).tokens.tolist() == [[2, 3, 4]]
    assert drafter.propose([[*first, 2, 3]], 2, None).tokens.tolist() == [[4, 5]]
    drafter.replace([0], [second])
    assert drafter.propose([second], 0, None).tokens.shape == (1, 0)
    assert drafter.propose([[*second, 7]], 2, None).tokens.tolist() == [[8, 9]]
    drafter.select([0])
    assert drafter.propose([[*second, 7, 8]], 2, None).tokens.tolist() == [[9, 10]]


@pytest.mark.parametrize("kind", KINDS)
def test_bare_passes_are_behind_the_prompt_and_so_many_tokens(kind: str) -> None:
    stepper = _Stepper(tiny(kind, vocab_size=20), PROMPTS[1], 37)
    expected = [37 if kind == "t5" else 37 + len(PROMPTS[1]) - 1]
    assert stepper._session.lengths == expected
    for _ in range(2):
        stepper.verify(4, stepper.chain(2, 20))
        assert stepper._session.lengths == expected


def test_bare_passes_are_over_ids_of_the_vocabulary() -> None:
    seen: list[int] = []

    class Noted:
        lengths = [3]

        def step(self, tokens: mx.array) -> mx.array:
            self.lengths = [self.lengths[0] + tokens.shape[1]]
            seen.extend(tokens.flatten().tolist())
            return tokens

        def step_argmax(self, tokens: mx.array, vocab_size: int | None = None) -> mx.array:
            return self.step(tokens)

        def truncate(self, lengths: list[int]) -> None:
            self.lengths = lengths

    def start(prompts: list[list[int]]) -> Any:
        seen.extend(prompts[0])
        return Noted(), prompts

    model: Any = SimpleNamespace(vocab_size=4, start=start)
    stepper = _Stepper(model, [2, 9, 1], 20)
    assert stepper._session.lengths == [23]
    stepper.verify(5, stepper.chain(2, 4))
    assert seen == [2, 3, 1] + [3] * (20 + 2 + 5) and stepper._session.lengths == [23]


def test_costs_lie_on_lines_between_those_measured() -> None:
    costs = Costs(1.0, {(2, 1): 3.0, (2, 5): 7.0, (0, 1): 1.5})
    assert costs.seconds(2, 3) == 5.0 and costs.seconds(2, 9) == 7.0 and costs.seconds(0, 4) == 1.5


def test_costs_of_lengths_not_measured_are_on_lines_too() -> None:
    costs = Costs(1.0, {(0, 1): 1.0, (2, 1): 3.0, (2, 3): 5.0})
    assert costs.seconds(1, 3) == 3.0 and costs.seconds(9, 3) == 5.0


def test_outputs_of_one_round_leave_nothing_to_measure(target: T5) -> None:
    variants = variants_of({"lookup": SpeculativeDecoder(target, "lookup")}, 1, drafts=False)
    with pytest.raises(ValueError, match="regular: every output ends in its first round"):
        Bench(target, None, variants, PROMPTS).run(1)


def test_a_report_adds_up(target: T5) -> None:
    draft = tiny_draft(target)
    decoders = {
        "K = 2": SpeculativeDecoder(target, draft, num_draft=2),
        "lookup": SpeculativeDecoder(target, "lookup", num_draft=4),
    }
    done: list[int] = []
    bench = Bench(target, draft, variants_of(decoders, 24, drafts=True), PROMPTS)
    reports = bench.run(1, lambda n, total: done.append(total - n))
    assert done == [2, 1, 0]
    assert [r.name for r in reports] == ["regular", "K = 2", "lookup"]
    for report in reports:
        assert report.same == report.outputs == 3 and report.waits == 1
        assert report.efficiency == pytest.approx(report.speedup / report.theory)
        assert report.round_ms > 0 and report.verify_ms > 0 and report.tokens_per_second > 0
    regular, speculative, lookup = reports
    assert regular.speedup == 1 and regular.tokens_per_round == 1 and regular.acceptance == 0
    assert speculative.draft_ms > lookup.draft_ms
    outputs = [decoders["K = 2"].generate(p, max_tokens=24).stats for p in PROMPTS]
    assert speculative.acceptance == pytest.approx(
        sum(s.accepted for s in outputs) / sum(s.drafted for s in outputs)
    )


def made_up(emitted: list[int], seconds: float, drafted: int = 0) -> Run:
    """An output of rounds that give so many tokens, each as long."""
    count = len(emitted)
    outcomes = [Outcome(drafted, [drafted], [n - 1], 0.0, 0.0) for n in emitted]
    tokens = list(range(sum(emitted)))
    return Run(
        seconds * count, [seconds] * count, emitted, outcomes, [3] + [1] * (count - 1), tokens
    )


def test_forwards_are_passes_of_the_target_per_token(target: T5) -> None:
    variants = [
        Variant("regular", lambda prompt: None),
        Variant("K = 3", lambda prompt: None, True),
    ]  # type: ignore[arg-type, return-value]
    measured = Bench(target, None, variants, PROMPTS[:2])
    alone = [made_up([1] * 6, 2.0), made_up([1] * 4, 2.0)]
    turns = [
        {"regular": alone, "K = 3": [made_up(a, 3.0, 3), made_up(b, 3.0, 3)]}
        for a, b in (([3, 3], [4]), ([3, 3], [2, 2]), ([1, 2, 3], [2, 2]))
    ]
    costs = [Costs(2.0, {(0, 1): 2.0, (3, 1): 2.5, (3, 4): 2.5})] * 3
    regular, drafting = (measured._report(variant, turns, turns[-1], costs) for variant in variants)
    assert regular.forwards == 1 and regular.waits == 1 and regular.same == 2
    assert drafting.forwards == 10 / 4  # of 10 / 3, 10 / 4 and 10 / 5
    assert drafting.tokens_per_round == 10 / 5 and drafting.waits == 1


def test_random_models_have_their_shapes_and_do_not_end() -> None:
    assert SHAPES["t5-base"].num_heads * SHAPES["t5-base"].d_kv == 768
    model = random_model("t5-small")
    assert sum(w.size for w in (model.shared.weight,)) == 512 * 32128
    assert SpeculativeDecoder(model).generate([5, 6, 1], max_tokens=3).finish_reason == "length"
    assert mx.array_equal(model.shared.weight, random_model("t5-small").shared.weight)
    with pytest.raises(ValueError, match="there is no shape 't5-tiny': choose from t5-small, "):
        random_model("t5-tiny")


def test_shapes_are_the_published_ones() -> None:
    """Counts of parameters, in millions, of models that are not computed."""
    millions = {
        shape: round(sum(w.size for _, w in tree_flatten(build(config).parameters())) / 1e6, 1)
        for shape, config in CAUSAL_SHAPES.items()
    }
    assert millions == {
        "gpt2": 124.4, "gpt2-medium": 354.8, "gpt2-large": 774.0, "gpt2-xl": 1557.6,
        "opt-125m": 125.2, "opt-350m": 331.2, "opt-1.3b": 1315.8,
        "qwen3-0.6b": 596.0, "qwen3-1.7b": 1720.6, "qwen3-4b": 4022.5,
    }  # fmt: skip
    contexts = {"gpt2-xl": 1024, "opt-350m": 2048, "qwen3-4b": 40960, "t5-base": None}
    assert {shape: context_of(shape) for shape in contexts} == contexts


@pytest.fixture
def small_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes like the published ones under their names, small and over a few tokens."""
    tiny = {"vocab_size": 60, "eos_token_id": 59}
    qwen3 = {"hidden_size": 32, "num_hidden_layers": 3, "head_dim": 16, "intermediate_size": 48}
    other = {"hidden_size": 32, "num_hidden_layers": 3, "ffn_dim": 64, "num_attention_heads": 2}
    gpt2 = {"n_embd": 32, "n_layer": 3, "n_head": 2, "n_positions": 64}
    for shape, changes in (
        ("gpt2", gpt2),
        ("opt-125m", other | {"word_embed_proj_dim": 32}),
        ("opt-350m", other | {"word_embed_proj_dim": 16}),
        ("qwen3-0.6b", qwen3 | {"num_attention_heads": 2, "num_key_value_heads": 1}),
    ):
        monkeypatch.setitem(CAUSAL_SHAPES, shape, CAUSAL_SHAPES[shape] | changes | tiny)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("shape", ["gpt2", "opt-125m", "opt-350m", "qwen3-0.6b"])
def test_random_causal_models_vary_and_do_not_end(
    small_shapes: None, shape: str, dtype: mx.Dtype
) -> None:
    model = random_model(shape, dtype=dtype, seed=1)
    assert isinstance(model, CausalModel) and model.eos_token_id == 59
    weights = dict(tree_flatten(model.model.parameters()))
    assert {w.dtype for w in weights.values()} == {dtype}
    again = random_model(shape, dtype=dtype, seed=1).model.parameters()
    assert all(mx.array_equal(weights[name], w) for name, w in tree_flatten(again))
    prompts = random_prompts(model, 20, 3)
    for prompt in prompts:
        done = SpeculativeDecoder(model).generate(prompt, max_tokens=40)
        assert done.finish_reason == "length" and len({*done.tokens}) > 4


def test_prompts_are_ids_of_the_vocabulary(small_shapes: None) -> None:
    """T5's end by EOS; a prompt that others are to go on from does not."""
    model = random_model("gpt2")
    prompts = random_prompts(model, 50, 4)
    assert prompts == random_prompts(model, 50, 4) and {len(p) for p in prompts} == {50}
    assert {i for p in prompts for i in p} <= {*range(59)} and len({*map(tuple, prompts)}) == 4
    source = random_prompts(tiny_model(vocab_size=60, eos_token_id=1), 50, 1)[0]
    assert len(source) == 50 and source.index(1) == 49


@pytest.mark.parametrize(
    ("pair", "found"),
    [
        (("t5-base", "gpt2"), "t5-base has the vocabulary of t5, gpt2 that of gpt2"),
        (("qwen3-4b", "gpt2"), "qwen3-4b has the vocabulary of qwen3, gpt2 that"),
        (("gpt2-xl", "opt-125m"), "of gpt2, opt-125m that of opt"),
        (("gpt2", "gpt3"), "there is no shape 'gpt3'"),
    ],
)
def test_shapes_that_make_no_pair_are_refused(pair: tuple[str, str], found: str) -> None:
    with pytest.raises(ValueError, match=found) as error:
        check_shapes(*pair)
    check_message(str(error.value))
    check_shapes("opt-1.3b", "opt-125m")
    check_shapes("t5-3b", "t5-small")


def test_random_models_of_mlx_lm_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlx_lm", None)
    with pytest.raises(ValueError, match="gpt2 .*mlx-lm") as error:
        random_model("gpt2")
    check_message(str(error.value), "gpt2")


RANDOM: dict[str, Any] = {
    "source": 20, "max_tokens": 24, "count": 2, "turns": 1, "acceptance": 1.0, "prompts": None,
    "dtype": None,
}  # fmt: skip


def test_a_causal_pair_is_measured(small_shapes: None, capsys: pytest.CaptureFixture[str]) -> None:
    bench(random_weights="opt-350m:opt-125m", num_draft="1,3", as_json=True, plot=None, **RANDOM)
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["name"] for row in rows] == ["regular", "K = 1", "K = 3"]
    assert [row["forwards"] for row in rows] == [1, 2, 4]
    assert all(row["waits"] == 1 and row["same"] == row["outputs"] for row in rows)


def test_the_table_and_the_plot_have_forwards(
    small_shapes: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot = tmp_path / "plot.png"
    bench(random_weights="gpt2:gpt2", num_draft="3", as_json=False, plot=plot, **RANDOM)
    title, names, regular, drafting, *notes = capsys.readouterr().out.splitlines()
    end = names.index("forwards") + len("forwards")
    assert regular[:end].endswith(" 1.00") and drafting[:end].endswith(" 4.00")
    assert max(map(len, (title, names, *notes))) <= 140 and notes[0].startswith("forwards: ")
    assert plot.is_file()


def test_a_prompt_and_an_output_that_are_too_long_together_are_refused() -> None:
    options = RANDOM | {"source": 1000, "max_tokens": 25}
    with pytest.raises(ValueError, match="at most 1024 together, .*gpt2-xl.*, got 1000") as error:
        bench(random_weights="gpt2-xl:gpt2", as_json=False, plot=None, **options)
    check_message(str(error.value), "got 1000 and 25")


def test_draft_lengths_are_numbers_and_ranges() -> None:
    assert _lengths("1-4") == [1, 2, 3, 4] and _lengths("8,2, 2-3") == [2, 3, 8]
    for wrong in ("", "a", "1-", "-3", "0", "0-2", "4-2"):
        with pytest.raises(ValueError, match="--num-draft"):
            _lengths(wrong)


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    row = dict.fromkeys(Report.__dataclass_fields__, 1.0)
    reports = [Report(**{**row, "name": name}) for name in ("regular", "K = 2", "K = 4", "auto")]  # type: ignore[arg-type]
    draw(reports, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="nothing to plot"):
        draw(reports[:1], tmp_path / "none.png")


def test_a_process_that_says_nothing_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="gave no text"):
        first_token_seconds(["--model", "nowhere"])


def test_the_command_reports_the_shipped_pair(tmp_path: Path) -> None:
    (tmp_path / "weights").symlink_to(REPOSITORY / "weights")
    command = ("bench", "--turns", "1", "--num-draft", "3")
    done = run(tmp_path, *command, "--max-tokens", "12", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [row["name"] for row in result["rows"]] == ["regular", "K = 3", "auto", "lookup"]
    assert all(row["waits"] == 1 and row["same"] == row["outputs"] for row in result["rows"])
    assert len(result["first_token_seconds"]) == 5
    done = run(tmp_path, *command, "--acceptance", "2")
    assert done.returncode == 2
    assert done.stderr == b"error: --acceptance must be from 0 to 1, got 2.0\n"
