"""The benchmark's counts and checks, on random models; times are never asserted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from speculative_t5 import SpeculativeDecoder
from speculative_t5.bench import PLAIN, Report, Run, Stepper, Variant, measure, variants_of
from speculative_t5.bench.benchmark import PASSES, Costs, make_report, record, speedup
from speculative_t5.cli import bench as bench_command
from speculative_t5.cli.bench import _lengths, bench, first_token_seconds
from speculative_t5.decoding import Outcome, Plan, Stats
from speculative_t5.generation import Chunk, Generation, GenerationOptions
from speculative_t5.models.t5 import T5

import pytest
from checkpoints import refused
from commands import on_a_terminal
from conftest import KINDS, REPOSITORY, tiny, tiny_draft, tiny_model

GREEDY = GenerationOptions(max_tokens=30)
PROMPTS = [[5, 9, 1], [7, 3, 3, 8, 1], [4, 1]]


@pytest.fixture(scope="module")
def target() -> T5:
    return tiny_model(vocab_size=20, layers=2, eos_token_id=19)


@pytest.mark.parametrize("drafter", ["model", "sharing", "lookup", "both", None])
def test_rounds_are_recorded(target: T5, drafter: str | None) -> None:
    draft: Any = drafter
    if drafter in ("model", "sharing", "both"):
        draft = tiny_draft(target, sharing=drafter == "sharing")
    decoder = SpeculativeDecoder(target, draft, num_draft=3, lookup=drafter == "both")
    for prompt in PROMPTS:
        run = record(Variant("", decoder, GREEDY), prompt)
        done = decoder.generate(prompt, max_tokens=30)
        assert run.tokens == done.tokens and sum(run.emitted) == done.stats.emitted
        assert len(run.rounds) == len(run.emitted) == len(run.outcomes) == done.stats.rounds > 1
        # A lookup after a model has to wait for the model's tokens, unless there is no room.
        both = [2 if num_draft else 1 for num_draft in done.stats.num_draft]
        assert run.waits == (both if drafter == "both" else [1] * len(run.rounds))


@pytest.mark.parametrize("kind", KINDS)
def test_bare_passes_come_after_the_prompt_and_the_output(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, started = tiny(kind, vocab_size=4), []
    start = type(model).start

    def watched(*given: Any, **options: Any) -> Any:
        started.extend(given[1])
        return start(*given, **options)

    monkeypatch.setattr(type(model), "start", watched)
    stepper = Stepper(model, [2, 9, 7, 1], 37)
    assert started == [[2, 3, 3, 1]] and stepper._fill(2).tolist() == [[3, 3]], "ids it has"
    expected = [37 if kind == "t5" else 37 + 4 - 1]
    assert stepper._session.lengths == expected
    for _ in range(2):
        drafted = stepper.draft(2, 4)
        assert [token.shape for token in drafted] == [(1, 1)] * 2
        stepper.verify(4, drafted)
        assert stepper._session.lengths == expected


def test_outputs_of_one_round_leave_nothing_to_measure(target: T5, quick: None) -> None:
    variants = variants_of({"lookup": SpeculativeDecoder(target, "lookup")}, 1)
    with refused("plain: every output ends in its first round"):
        measure(variants, PROMPTS, 1)


def made_up(emitted: list[int], seconds: float, drafted: int = 0) -> Run:
    """A run whose rounds emit these numbers of tokens and take equally long."""
    count = len(emitted)
    outcomes = [Outcome(drafted, [drafted], [n - 1], 0.01, 0.02) for n in emitted]
    waits, tokens = [3] + [1] * (count - 1), [*range(sum(emitted))]
    return Run(seconds * count, [seconds] * count, emitted, outcomes, waits, tokens)


def test_costs_are_interpolated() -> None:
    costs = Costs(1.0, {(0, 1): 1.0, (2, 1): 3.0, (2, 5): 7.0})
    places = {(2, 3): 5.0, (1, 3): 3.0, (2, 9): 7.0, (9, 5): 7.0, (0, 4): 1.0}
    assert {place: costs.seconds(*place) for place in places} == places


def test_figures_by_hand() -> None:
    drafting: Any = SimpleNamespace(draft=True)
    alone = [made_up([1] * 6, 2.0), made_up([1] * 4, 2.0)]
    costs = Costs(2.0, {(0, 1): 2.0, (3, 1): 2.5, (3, 4): 2.5})
    turns = [
        {PLAIN: alone, "K = 3": [made_up(a, 3.0, 3), made_up(b, 3.0, 3)]}
        for a, b in (([3, 3], [4]), ([3, 3], [2, 2]), ([1, 2, 3], [2, 2]))
    ]
    report = make_report(Variant(PLAIN, drafting, GREEDY), turns, [costs] * 3, alone)
    assert report.forwards == report.speedup == report.theory == report.waits == 1
    report = make_report(Variant("K = 3", drafting, GREEDY), turns, [costs] * 3, turns[0]["K = 3"])
    assert report.forwards == 10 / 4  # the median of 10 / 3, 10 / 4 and 10 / 5
    assert (report.tokens_per_round, report.waits, report.same) == (10 / 5, 1, 2)
    # After first rounds, 3 tokens in 1 round, 5 in 2 and 7 in 3.
    assert report.speedup == pytest.approx(2 / (6 / 5))
    assert report.theory == pytest.approx(2 * 5 / (2 * 2.5))
    assert report.acceptance == (10 - 5) / 15
    assert report.draft_ms == pytest.approx(10) and report.other_ms == pytest.approx(2970)


def test_the_command_measures_the_shipped_pair(
    quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    (tmp_path / "prompts.txt").write_text(f"{bench_command.PROMPTS[0]}\n\n")
    monkeypatch.setattr(bench_command, "first_token_seconds", lambda arguments: len(arguments))
    models = [str(REPOSITORY / "weights" / name) for name in ("correct-base", "correct-small")]
    options: Any = {"turns": 1, "num_draft": "3", "max_tokens": 32, "as_json": True}
    options |= {"dtype": "float32", "steady": True, "prompts": tmp_path / "prompts.txt"}
    widths, plan = set(), SpeculativeDecoder.plan

    def planned(*given: Any, **options: Any) -> Plan:
        made = plan(*given, **options)
        widths.add(made.width)
        return made

    monkeypatch.setattr(SpeculativeDecoder, "plan", planned)
    bench(model=models[0], draft_model=models[1], **options)
    result = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in result["rows"]] == [
        "regular", "K = 3", "steady K = 3", "auto", "lookup"
    ]  # fmt: skip
    assert None in widths and len(widths) == 2, "steady passes have one width"
    assert result["rows"][0].keys() == Report.__dataclass_fields__.keys()
    assert all(row["waits"] == 1 and row["same"] == row["outputs"] == 1 for row in result["rows"])
    banner = bench_command._table(result, [])[0]
    assert banner.startswith("correct-base, correct-small drafts; 1 prompt, greedy, 1 turn")
    assert result["first_token_seconds"] == [8] * 5 and result["prompts"] == 1
    plain, drafting, _, _, lookup = (SimpleNamespace(**row) for row in result["rows"])
    assert plain.speedup == plain.tokens_per_round == 1 and plain.acceptance == 0
    assert drafting.efficiency == pytest.approx(drafting.speedup / drafting.theory)
    assert drafting.tokens_per_second > 0 and drafting.verify_ms > 0
    assert drafting.draft_ms > lookup.draft_ms
    assert _lengths("1-4") == [1, 2, 3, 4] and _lengths("8,2, 2-3") == [2, 3, 8]


def test_processes_are_timed_until_their_first_byte() -> None:
    assert 0 < first_token_seconds(["--version"]) < 60
    with pytest.raises(RuntimeError, match="gave no text"):
        first_token_seconds(["--model", "nowhere"])


def test_a_terminal_shows_progress_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    command = ("-m", "speculative_t5", "bench", "--model", "nowhere")
    shown = on_a_terminal(tmp_path, *command, code=2).split("\r")
    assert shown[1].startswith("loading:   0%") and "0/7" in shown[1]
    assert shown[-1].startswith("error: no model on this machine is named 'nowhere'")


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"acceptance": 2.0}, "from 0 to 1, got 2.0"),
        ({"turns": 0}, "--turns must be at least 1, got 0"),
        *(({"num_draft": wrong}, "--num-draft") for wrong in ("", "a", "1-", "-3", "0-2", "4-2")),
        ({"plot": Path("absent/plot.png")}, "create the folder absent"),
        ({"random_weights": "gpt2"}, "TARGET:DRAFT, such as t5-base:t5-small, got 'gpt2'"),
        ({"random_weights": "gpt2-xl:gpt2", "source": 1000, "max_tokens": 25},
         "at most 1024 together, which gpt2-xl reads, got 1000 and 25"),
    ],
)  # fmt: skip
def test_options_are_checked_before_anything_is_measured(options: Any, found: str) -> None:
    with refused(found):
        bench(**options)


WARM = Stats((5,), (5,), (5,), emitted=101, seconds=0.1)


def timed(monkeypatch: pytest.MonkeyPatch, *runs: list[float]) -> list[int]:
    """Make plain runs whose passes end at these times; return how many passes each one took."""
    passes: list[int] = []

    def stream(self: Any, prompt: Any, **options: Any) -> Iterator[Chunk]:
        assert options["speculative"] is False and options["top_k"] == 3
        passes.append(0)
        for time in runs[len(passes) - 1][: options["max_tokens"]]:
            passes[-1] += 1
            yield Chunk("", [5], 0, Stats(seconds=time))

    def generate(self: Any, prompt: Any, **options: Any) -> Generation:
        assert options["speculative"] is True and options["top_k"] == 3
        return Generation("", [], "eos", WARM)

    monkeypatch.setattr(SpeculativeDecoder, "stream", stream)
    monkeypatch.setattr(SpeculativeDecoder, "generate", generate)
    return passes


# The first pass includes the encoder, the third is disturbed, and the first run is cold.
RUN = [0.05, 0.06, 0.09, *(0.1 + 0.01 * i for i in range(100))]
SLOW = [float(i) for i in range(1, 100)]


@pytest.mark.parametrize(
    ("runs", "stats", "expected", "passes"),
    [
        ([[2 * t for t in RUN[:5]], RUN], (101, 0.25), (0.05 + 100 * 0.01) / 0.1, [5, PASSES]),
        ([SLOW], (11, 5.5), 2, [2]),
        ([[0.1], [0.1]], (101, 0.1), None, [1, 1]),
    ],
    ids=["a few passes stand for all", "slow models run two passes once", "one pass is too few"],
)
def test_estimates_from_a_few_passes(
    monkeypatch: pytest.MonkeyPatch, target: T5, runs: Any, stats: Any, expected: Any, passes: Any
) -> None:
    seen = timed(monkeypatch, *runs)
    emitted, seconds = stats
    done = Stats((5,), (5,), (5,), emitted=emitted, seconds=seconds)
    decoder = SpeculativeDecoder(target, tiny_draft(target))
    found = speedup(decoder, [3, 1], done, GenerationOptions(top_k=3))
    assert found == (expected and pytest.approx(expected))
    assert seen == passes


def test_a_real_decoder_gives_an_estimate(target: T5) -> None:
    decoder = SpeculativeDecoder(target, tiny_draft(target), num_draft=3)
    options = GenerationOptions(max_tokens=60, temperature=1.0)
    done = decoder.generate([3, 4, 1], max_tokens=60, temperature=1.0)
    found = speedup(decoder, [3, 4, 1], done.stats, options)
    assert done.stats.emitted > 2 and found is not None and found > 0
