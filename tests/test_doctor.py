"""`doctor`: each check passes where all is well, and sees its fault; the command reports them."""

import json
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

from speculative_t5 import SpeculativeDecoder, device
from speculative_t5.checkpoints import convert, dtype_name
from speculative_t5.cli import doctor as command
from speculative_t5.doctor import (
    ALL_CHECKS,
    Check,
    Finding,
    Subject,
    arithmetic,
    checks,
    environment,
    outputs,
    run_check,
    speed,
    tiny,
)
from speculative_t5.generation import steady
from speculative_t5.measure import SHAPES, passes
from speculative_t5.models import T5Config
from speculative_t5.models.cache import SMALLEST_CAPACITY, KVCache
from speculative_t5.models.session import T5Session
from speculative_t5.models.t5 import T5

import mlx.core as mx
import numpy as np
import pytest
from commands import Call, on_a_terminal
from conftest import REPOSITORY, V1_0, V1_1, write_checkpoint
from messages import check_message

SHIPPED = Subject(str(REPOSITORY / "weights" / "correct-base"))
NAMES = [check.name for check in ALL_CHECKS]


@pytest.fixture
def tiny_subject(place: Path) -> Subject:
    return Subject(str(place / "weights" / "target"), str(place / "weights" / "draft"))


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less of everything, where that shows the same."""
    kept = {name: tiny.TINY_FAMILIES[name] for name in ("t5", "t5gemma")}
    monkeypatch.setattr(tiny, "TINY_FAMILIES", kept)
    monkeypatch.setattr(arithmetic, "LOGIT_TOLERANCES", {mx.float32: 2e-4})
    less = {"NUM_SENTENCES": 2, "NUM_TIES": 2, "NUM_THREADED": 8, "SAMPLED_OUTPUTS": 1000}
    for module, changes in (
        (outputs, less),
        (arithmetic, {"PASS_WIDTHS": range(5, 7)}),
        (speed, {"SENTENCE_STEP": 50, "SECONDS_OF_TURNS": 0.0}),
        (passes, {"SECONDS_AT_A_TIME": 0.0, "SECONDS_IN_ALL": 0.0}),
    ):
        for name, value in changes.items():
            monkeypatch.setattr(module, name, value)
    shape = T5Config(64, 16, 64, 2, 1, 1, vocab_size=160)
    monkeypatch.setitem(SHAPES, "tiny", lambda: shape)


@pytest.mark.parametrize("name", NAMES)
def test_sound_models_pass(name: str, tiny_subject: Subject) -> None:
    (check,) = (check for check in ALL_CHECKS if check.name == name)
    found = check.find(tiny_subject)
    assert (found.name, found.status) == (name, "ok"), found
    # The line of `rows` is longer where bits differ, as they do on a Mac.
    assert len(found.reason) < 160
    assert name == "rows" or all(len(note) <= 70 for note in found.notes), found.notes
    assert json.loads(json.dumps(found.details)) == found.details


def test_other_models_are_checked_in_their_own_type(
    tmp_path: Path, spiece: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quantized model in 16 bits, where the user has asked for no type, and bfloat16 is usual."""
    monkeypatch.setattr(device, "on_cpu", lambda: False)
    # Such products take MLX 20 ms on a CPU, so there are few of them.
    wide = V1_0 | {"d_model": 64, "d_kv": 32, "num_heads": 2, "d_ff": 64}
    wide |= {"num_layers": 1, "num_decoder_layers": 1}
    write_checkpoint(tmp_path / "source", wide, spiece)
    made = convert(str(tmp_path / "source"), tmp_path / "made", dtype="float16", quantize=8)
    subject = Subject(str(made))
    found = [f(subject) for f in (arithmetic.rows, outputs.greedy, outputs.threads, speed.speed)]
    assert [each.status for each in found] == ["ok"] * 4, found
    compared = found[1].details["compared"]
    assert [each["name"].split()[-1] for each in compared] == [
        "float16",
        "float16",
        "float32",
        "bfloat16",
    ]


def in_tf32(x: mx.array) -> mx.array:
    """Round float32 to TF32's 10 bits."""
    bits = np.array(x).view(np.uint32)
    return mx.array(((bits + 0x1000) & 0xFFFFE000).astype(np.uint32).view(np.float32))


@pytest.mark.parametrize(("variable", "status"), [("0", "failed"), ("1", "ok")])
def test_tf32_is_seen(variable: str, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    product = mx.matmul
    monkeypatch.setattr(
        mx, "matmul", lambda a, b: product(in_tf32(a), in_tf32(b)) if a.shape[1] > 1 else a @ b
    )
    monkeypatch.setenv(arithmetic.TF32, variable)
    found = arithmetic.float32(SHIPPED)
    assert found.status == status and "as in TF32" in found.reason
    assert ("as you chose" in found.reason) == (status == "ok")
    errors = found.details["errors"]
    assert errors["product of 1 rows"] < 1e-5 and errors["product of 5 rows"] > 1e-4


def test_tf32_excuses_no_larger_error(monkeypatch: pytest.MonkeyPatch) -> None:
    product = mx.matmul
    monkeypatch.setenv(arithmetic.TF32, "1")
    for factor in (1.01, float("nan")):
        monkeypatch.setattr(mx, "matmul", lambda a, b, factor=factor: product(a, b) * factor)
        found = arithmetic.float32(SHIPPED)
        assert found.status == "failed"
        assert "of its largest value, more than TF32 explains; MLX_ENABLE_TF32 is 1" in found.reason


def test_logits_in_tf32_are_let_through_where_it_was_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = T5Session.step
    monkeypatch.setattr(T5Session, "step", lambda *args: in_tf32(step(*args)))
    for variable, tolerance in (("0", 2e-4), ("1", 0.01)):
        monkeypatch.setenv(arithmetic.TF32, variable)
        found = arithmetic.logits(SHIPPED)
        assert found.status == ("failed" if variable == "0" else "ok")
        assert ("t5 in float32" in found.reason and "in steps" in found.reason) == (variable == "0")
        assert found.details["tolerances"] == {"float32": tolerance}


def test_a_stale_row_of_the_cache_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    tolerances = {mx.float32: 2e-4, mx.bfloat16: 0.08}
    monkeypatch.setattr(arithmetic, "LOGIT_TOLERANCES", tolerances)

    def keep_one_more(cache: KVCache, lengths: list[int]) -> None:
        pairs = zip(lengths, cache.lengths, strict=True)
        cache.lengths = [min(length + (length > 12), old) for length, old in pairs]

    monkeypatch.setattr(KVCache, "truncate", keep_one_more)
    found = arithmetic.logits(SHIPPED)
    assert found.status == "failed"
    for dtype, tolerance in tolerances.items():
        errors = found.details["errors"][dtype_name(dtype)]
        bad = {name for name, error in errors.items() if error > tolerance}
        assert "t5, steps" in bad and "t5, whole sequences" not in bad
    assert found.details["errors"]["float32"]["t5gemma, steps"] > tolerances[mx.float32]


def unlike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the first row of a pass over several tokens be rounded differently from the rest."""

    def changed(x: mx.array) -> mx.array:
        shape = (1, x.shape[1], 1)
        rounded = x.astype(mx.bfloat16).astype(x.dtype) * (1 - 2**-7)
        return mx.where(mx.arange(x.shape[1]).reshape(shape) == 0, rounded + 2**-7, x)

    real = T5.score
    monkeypatch.setattr(
        T5,
        "score",
        lambda self, kind, x, *rest: real(self, kind, changed(x) if x.shape[1] > 1 else x, *rest),
    )


def test_unlike_rows_are_seen(tiny_subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    unlike(monkeypatch)
    monkeypatch.setattr(arithmetic, "promises_equal_rows", lambda model: False)
    found = arithmetic.rows(tiny_subject)
    assert found.status == "ok", "single tokens are steady, only slow"
    assert "slow in float32, float16, bfloat16" in found.reason
    assert "float32: steady mode takes one token a pass, and gains nothing" in found.notes
    assert found.details["bfloat16"]["unlike_rows"] == [5, 6]
    assert "rows alike except in passes over 5, 6" in found.notes[0]


@pytest.mark.parametrize("width", [6, 1])
def test_steady_passes_that_are_not_steady_are_seen(
    width: int, tiny_subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arithmetic, "rows_are_alike", lambda *_: True)
    monkeypatch.setattr(arithmetic, "steady_width", lambda model, length: width)
    monkeypatch.setattr(arithmetic, "DTYPES", {"float32": mx.float32})
    unlike(monkeypatch)
    if width == 1:  # or no pass would have several rows
        start = T5.start
        monkeypatch.setattr(T5, "start", lambda model, prompts, width=None: start(model, prompts))
    found = arithmetic.rows(tiny_subject)
    assert found.status == "failed"
    assert "in float32 steady logits depend on how the tokens before were fed" in found.reason


def test_greedy_sees_rows_that_are_unlike(
    tiny_subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steady, "rows_are_alike", lambda *_: True)
    monkeypatch.setattr(outputs, "NUM_TIES", 4)
    unlike(monkeypatch)
    found = outputs.greedy(tiny_subject)
    assert found.status == "failed"
    assert "depend on the draft in steady mode (near-ties, float32" in found.reason
    (ties,) = (c for c in found.details["compared"] if c["name"] == "near-ties, bfloat16")
    assert ties["steady"] and ties["count"] == 4
    assert outputs.TIES_TOKENS > SMALLEST_CAPACITY, "passes on both sides of where a cache grows"


def test_other_bits_than_single_tokens_fail_only_where_they_are_promised(
    tiny_subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arithmetic, "DTYPES", {"float32": mx.float32})
    unlike(monkeypatch)
    monkeypatch.setattr(arithmetic, "rows_are_alike", lambda *_: True)
    for promised in (True, False):
        monkeypatch.setattr(arithmetic, "promises_equal_rows", lambda model, p=promised: p)
        found = arithmetic.rows(tiny_subject)
        assert "with other bits than single tokens at 5, 6" in found.notes[0]
        assert ("passes over 5, 6 tokens differ" in found.reason) == promised


def test_greedy_sees_a_draft_that_changes_outputs(
    tiny_subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = SpeculativeDecoder.generate

    def drafted(self: SpeculativeDecoder, prompt: Any, **options: Any) -> Any:
        out = real(self, prompt, **options)
        wrong = options.get("speculative", True) and not self.is_steady
        return replace(out, tokens=[5, *out.tokens]) if wrong else out

    monkeypatch.setattr(SpeculativeDecoder, "generate", drafted)
    monkeypatch.setattr(outputs, "promises_equal_rows", lambda model: False)
    found = outputs.greedy(tiny_subject)
    assert found.status == "ok" and "in plain mode 0 of 2 are" in found.reason
    for compared in found.details["compared"]:
        fault = outputs.Compared(**compared | {"exact": True}).fault
        assert fault and "outputs depend on the draft in plain mode" in fault


def test_an_inexact_rule_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_the_target(draft: Any, probs: mx.array, ratios: mx.array, count: mx.array) -> mx.array:
        return mx.take_along_axis(probs, count[:, None, None], axis=1)[:, 0]

    monkeypatch.setattr("speculative_t5.decoding.rules.residual", of_the_target)
    found = outputs.sampling(SHIPPED)
    assert found.status == "failed" and "not distributed as the target's own" in found.reason
    values = found.details["p_values"]
    coupled = values.pop("draft, coupled rule")  # which has no residual
    assert coupled > 0.01 and max(values.values()) < outputs.LEAST_P


def test_rare_outputs_make_one_cell() -> None:
    """It joins the smallest of the others if it is too small itself."""
    expected = {(1,): 0.5, (2,): 0.47, (3,): 0.02, (4,): 0.01}
    assert outputs.chi_square({(1,): 100, (2,): 94, (3,): 6}, expected) == (0, 2)
    assert outputs.chi_square({(1,): 80, (2,): 114, (5,): 6}, expected)[0] == pytest.approx(
        20**2 / 100 + 20**2 / 94
    )
    assert outputs.chi_square({(1,): 40, (2,): 57, (4,): 3}, expected) == (4, 1)


def test_a_thread_with_other_outputs_is_seen(
    tiny_subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = SpeculativeDecoder.generate

    def generate(*args: Any, **options: Any) -> Any:
        out = real(*args, **options)
        main = threading.current_thread() is threading.main_thread()
        return out if main else replace(out, tokens=[*out.tokens, 5])

    monkeypatch.setattr(SpeculativeDecoder, "generate", generate)
    found = outputs.threads(tiny_subject)
    assert found.status == "failed" and "8 of 8 outputs of 4 threads" in found.reason


def test_p_values_are_those_of_tables() -> None:
    table = {(18.307, 10): 0.05, (3.841, 1): 0.05, (149.449, 100): 0.001, (100, 124): 0.944}
    for (statistic, freedom), p in table.items():
        assert outputs.p_value(statistic, freedom) == pytest.approx(p, rel=0.1)


def test_the_default_type_and_a_slow_one_are_reported(
    tmp_path: Path, spiece: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = {"architecture": "applegpu_g13s", "device_name": "Apple M1 Pro", "memory_size": 2**34,
            "resource_limit": 499000}  # fmt: skip
    monkeypatch.delenv(environment.machine.DEVICE_VARIABLE)
    monkeypatch.setattr(mx, "device_info", lambda device=None: info)
    monkeypatch.setattr(environment.machine, "on_cpu", lambda: False)
    limits = environment._limits()
    found = environment.device(SHIPPED)
    assert found.reason == "MLX computes on the GPU: Apple M1 Pro, 16 GB of memory"
    assert "at most 499,000 buffers" in found.notes[0]
    assert found.notes[1] == "float16 by default: as stored"
    write_checkpoint(tmp_path, V1_1, spiece)
    for model in (tmp_path, tmp_path / "none"):
        note = environment.device(Subject(str(model))).notes[1]
        assert "bfloat16 by default: " in note and "faster on an M1" in note
        assert ("float16 overflows" in note) == (model == tmp_path)
    assert environment._limits() == limits, "reading the limits leaves them"


def test_a_process_that_crashes_or_hangs_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    for code, reason in {
        "import os; os.abort()": "the process ended with signal 6, SIGABRT",
        "import time; time.sleep(9)": "it did not end within 0.5 s",
        "raise ValueError('no weights')": "exit code 1: ValueError: no weights",
        "pass": "the process ended with exit code 0",
    }.items():
        monkeypatch.setattr(checks, "CHECK_COMMAND", (sys.executable, "-Sc", code))
        found = run_check(
            Check(outputs.threads, "", deadline=0.5 if "sleep" in code else 60), SHIPPED
        )
        assert (found.name, found.status) == ("threads", "failed") and reason in found.reason


def faked(monkeypatch: pytest.MonkeyPatch, **statuses: Any) -> list[Subject]:
    """Replace all checks: those that are named have that status, all others are ok."""
    seen: list[Subject] = []

    def run(check: Check, subject: Subject) -> Finding:
        seen.append(subject)
        status = statuses.get(check.name, "ok")
        reason = f"see {subject.model}/config.json, {'and so on ' * 9}"
        return Finding(check.name, status, reason, ("a note",), {"path": [subject.model]}, 1.0)

    monkeypatch.setattr(command, "run_check", run)
    return seen


def test_only_failures_change_the_exit_code(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    for status in ("ok", "skipped", "failed"):
        faked(monkeypatch, rows=status)
        done = call("doctor")
        assert (done.code, done.err) == (int(status == "failed"), [])
        lines = done.out.splitlines()
        assert lines[0] == "speculative_t5 doctor: correct-base, drafts by correct-small"
        assert [line.split()[0] for line in lines[2:-2] if line[:1] != " "] == NAMES
        assert f"rows      {status.ljust(7)}  see" in done.out  # the path may need another line
        assert ("1 of 10 checks failed in 0 s: rows" in lines[-1]) == (status == "failed")
        assert max(map(len, lines)) <= 80


def test_checks_are_chosen(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    faked(monkeypatch)

    def ran(*options: str) -> list[str]:
        done = call("doctor", "--json", *options)
        return [check["name"] for check in json.loads(done.out)["checks"]]

    assert ran("--only", "speed", "--only", "rows") == ["rows", "speed"]
    assert ran() == NAMES
    assert [line.split()[0] for line in call("doctor", "--list").out.splitlines()] == NAMES


def test_json_has_every_number(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the names as they were given: the folder of a draft from the Hub has a commit's."""
    seen = faked(monkeypatch, greedy="skipped", rows="failed")
    monkeypatch.setattr(command, "find_cached", lambda name: Path("weights/draft"))
    fields = {"name", "status", "reason", "notes", "details", "seconds"}
    for given, name, folder in (
        ("lookup", None, None),
        ("some/draft", "some/draft", "weights/draft"),
    ):
        done = call("doctor", "--json", "--model", "weights/target", "--draft-model", given)
        (result,) = done.records
        assert done.code == 1
        assert result.keys() == {"model", "draft", "dtype", "checks", "failed", "seconds"}
        assert (result["model"], result["draft"], result["dtype"]) == ("weights/target", name, None)
        assert result["failed"] == ["rows"]
        assert all(check.keys() == fields for check in result["checks"])
        assert seen[-1].draft == folder


def test_the_home_folder_is_not_in_the_report(
    place: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(place))
    faked(monkeypatch)
    for option in ((), ("--json",)):
        done = call("doctor", *option, "--model", str(place / "weights" / "target"))
        assert str(place) not in done.out and "~/weights/target/config.json" in done.out


def test_the_home_folder_is_found_however_it_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    monkeypatch.setenv("HOME", str(link))
    home = tmp_path.resolve()
    assert command.without_home(f"{link}/x {home}/x {home}x") == f"~/x ~/x {home}x"
    monkeypatch.setenv("HOME", "/")
    assert command.without_home("/ and /x") == "/ and /x"
    monkeypatch.setattr(Path, "home", Mock(side_effect=RuntimeError("no home directory")))
    assert command.without_home("/x ~") == "/x ~"


def test_models_that_do_not_fit_are_refused_before_any_check(call: Call, place: Path) -> None:
    for model, draft, found in (
        (str(place / "bert"), None, "this is a bert"),
        ("weights/target", "weights/other", "the draft weights/other does not fit the target"),
    ):
        done = call("doctor", "--model", model, *(["--draft-model", draft] if draft else []))
        assert (done.code, done.out) == (2, "") and found in done.err[-1]
        check_message(done.err[-1].removeprefix("error: "))
        assert call("doctor", "--only", "versions", "--model", draft or model).code == 0
    assert "the target's tokenizer has 220 pieces" in done.err[-1]
    Subject(str(place / "weights" / "other"), str(place / "weights" / "other")).check()


def test_a_terminal_shows_which_check_runs(place: Path) -> None:
    """The check runs in a process of its own, and finds what it finds in this one."""
    shown = on_a_terminal(
        place, "-m", "speculative_t5", "doctor", "--only", "versions", "--model", "weights/target"
    )
    reason = environment.versions(SHIPPED).reason
    assert "versions (1 of 1) ..." in shown and "\rversions  ok " in shown
    assert reason in " ".join(shown.split())
