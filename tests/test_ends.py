"""What the commands say beside their outputs: how they ended, and what was not read."""

from __future__ import annotations

import json
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

from speculative_t5 import SpeculativeDecoder, load
from speculative_t5.cli import terminal, tips
from speculative_t5.cli.main import DEFAULT_PROMPT, main
from speculative_t5.cli.terminal import STILL_WORKING, footer, patience, some_of
from speculative_t5.decoding.results import Stats
from speculative_t5.generation.outputs import Chunk

import mlx.core as mx
import pytest
from conftest import REPOSITORY, V1_1, write_checkpoint
from messages import check_message

SNOW = "\u2603"


@dataclass
class Done:
    """What a command left behind."""

    code: int
    out: str
    err: list[str]


Call = Callable[..., Done]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the shipped pair."""
    here = tmp_path_factory.mktemp("ends")
    (here / "weights").symlink_to(REPOSITORY / "weights")
    return here


@pytest.fixture
def call(here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Call:
    """Runs a command in this process, with nothing or some text on its standard input."""
    monkeypatch.chdir(here)
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    monkeypatch.setenv(tips.SWITCH, "0")

    def called(*arguments: str, stdin: str | None = None) -> Done:
        (here / "stdin").write_text(stdin or "")
        typed = here / "stdin" if stdin is not None else Path("/dev/null")
        with typed.open() as stream, monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["__main__.py", *arguments])
            patch.setattr(sys, "stdin", stream)
            handlers = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGHUP)}
            with pytest.raises(SystemExit) as left:
                main()
            for number, handler in handlers.items():
                signal.signal(number, handler)
        out, err = capfd.readouterr()
        return Done(int(left.value.code or 0), out, err.splitlines())

    return called


def test_the_footer_says_whether_the_output_was_cut(call: Call) -> None:
    whole = call("--prompt", "He go home.")
    assert re.fullmatch(r"\d+ tok/s - 6 tokens - .* tokens per round", whole.err[-1])
    cut = call("--prompt", "He go home.", "--max-tokens", "3")
    assert cut.err[-1].endswith(" tokens per round - cut at --max-tokens 3")
    lines = call("repl", "--max-tokens", "3", stdin="He go home.\n/set max_tokens 9\nHe go home.\n")
    first, second = lines.err
    assert first.endswith(" - cut at --max-tokens 3") and "cut" not in second


def test_an_output_may_also_end_where_the_context_does() -> None:
    stats = Stats((0,), (0,), (0,), 7, 0.5)
    assert footer(stats, "length", 9).endswith(" - cut where the context ends")
    assert footer(stats, "length", 7).endswith(" - cut at --max-tokens 7")
    assert footer(stats, "eos", 7) == footer(stats, "eos", 9) == stats.summary()


def test_a_batch_says_how_many_outputs_were_cut(call: Call, here: Path) -> None:
    (here / "in.txt").write_text("He go home.\nYes.\nShe have an apple.\n")
    done = call("batch", "in.txt", "--max-tokens", "4")
    reasons = [json.loads(line)["finish_reason"] for line in done.out.splitlines()]
    assert reasons == ["length", "eos", "length"]
    assert done.err[-1].startswith("[3 prompts, 2 cut at --max-tokens 4, ")
    assert "cut" not in call("batch", "in.txt").err[-1]


def test_the_example_shows_its_input(call: Call) -> None:
    done = call()
    assert done.code == 0
    assert done.err[0] == f"prompt: {DEFAULT_PROMPT}"
    assert done.out == call("--prompt", DEFAULT_PROMPT).out
    assert done.out.startswith("My sister has never been to Paris. ")
    assert call("--prompt", "He go home.").err[0].startswith(tuple("0123456789"))


def test_the_example_is_for_the_shipped_model_alone(call: Call) -> None:
    done = call("--model", "correct-small")
    assert (done.code, done.out) == (2, "")
    (line,) = done.err
    check_message(line.removeprefix("error: "), "there is no prompt for correct-small")
    assert call("--model", "correct-small", stdin="He go home.").code == 0


@pytest.mark.parametrize("command", [(), ("--json",)])
def test_characters_that_the_vocabulary_lacks_are_named_once(
    call: Call, command: tuple[str, ...]
) -> None:
    done = call(*command, "--prompt", f"He {SNOW} go {SNOW} home.")
    assert done.code == 0
    said = [line for line in done.err if "vocabulary" in line]
    assert said == [f"the model's vocabulary lacks {SNOW}; it reads an unknown mark instead"]
    assert not any("vocabulary" in line for line in call(*command, "--prompt", "He go.").err)


def test_a_batch_says_in_how_many_prompts_characters_are_lacking(call: Call, here: Path) -> None:
    (here / "in.txt").write_text(f"He {SNOW} go.\nHe go.\nHe {SNOW}\u4e16 go.\n")
    done = call("batch", "in.txt")
    assert done.err[-2] == (
        f"prompts with characters that the model's vocabulary lacks: 2 ({SNOW} \u4e16); "
        "it reads an unknown mark instead"
    )
    assert "unknown" not in json.loads(done.out.splitlines()[0])
    repl = call("repl", stdin=f"He {SNOW} go.\nHe go.\n")
    assert sum("vocabulary" in line for line in repl.err) == 1


def test_only_a_few_characters_are_named() -> None:
    assert some_of("abc") == "a b c"
    assert some_of("abcdefg") == "a b c d e and 2 more"
    assert some_of("\x1b") == "\N{REPLACEMENT CHARACTER}"


LONG = "He go home. " * 300


@pytest.mark.parametrize(
    "command",
    [("--prompt", LONG), ("--json", "--prompt", LONG), ("bench", "--prompts", "long.txt")],
)
def test_a_prompt_that_is_too_long_is_one_line(
    call: Call, here: Path, command: tuple[str, ...]
) -> None:
    (here / "long.txt").write_text(LONG)
    done = call(*command)
    assert (done.code, done.out) == (2, "")
    (line,) = done.err
    found = r"the prompt has \d+ tokens, more than the 512 that the model is made for: use "
    assert re.match(f"error: {found}", line) and "(--truncate)" in line
    check_message(line.removeprefix("error: "))


def test_a_prompt_is_cut_if_asked_and_that_is_said(call: Call, here: Path) -> None:
    done = call("--prompt", LONG, "--truncate", "--max-tokens", "4")
    engine = SpeculativeDecoder.from_pretrained("correct-base", "correct-small", truncate=True)
    source = engine.fit(LONG)
    assert done.out == engine.generate(LONG, max_tokens=4).text + "\n"
    assert done.err[0] == f"the prompt was cut to 512 tokens, {source.cut} fewer than it has"
    (here / "long.txt").write_text(LONG)
    (record,) = call("batch", "long.txt", "--truncate", "--max-tokens", "4").out.splitlines()
    assert json.loads(record)["text"] + "\n" == done.out and json.loads(record)["truncated"]
    again = call("repl", "--truncate", "--max-tokens", "4", stdin=LONG)
    assert again.out.strip() == done.out.strip()
    refused = call("repl", stdin=f"{LONG}\nHe go home.\n")
    assert refused.code == 3 and "(--truncate)" in refused.err[0]
    assert refused.out == "He will go home.\n"


def test_plain_sentences_are_corrected_by_every_command(call: Call, here: Path) -> None:
    """The shipped folders name their prefix."""
    lines = "He go home.\ncorrect: He go home.\n"
    (here / "in.txt").write_text(lines)
    records = [json.loads(line) for line in call("batch", "in.txt").out.splitlines()]
    assert [record["prompt"] for record in records] == lines.splitlines()
    assert [record["text"] for record in records] == ["He will go home."] * 2
    assert call("--prompt", "He go home.").out == "He will go home.\n"
    assert call("repl", stdin=lines).out == "He will go home.\n" * 2


def test_the_prefix_may_be_another_or_none(call: Call, here: Path) -> None:
    (here / "in.txt").write_text("He go home.\n")
    for prefix in ("", "He and she "):
        engine = SpeculativeDecoder.from_pretrained("correct-base", "correct-small", prefix="")
        expected = engine.generate(f"{prefix}He go home.", max_tokens=9).text
        options = ("--prefix", prefix, "--max-tokens", "9")
        assert call("--prompt", "He go home.", *options).out == expected + "\n"
        (record,) = call("batch", "in.txt", *options).out.splitlines()
        assert json.loads(record)["text"] == expected
        assert json.loads(record)["prompt"] == "He go home."
        shown = call("repl", *options, stdin="/set\nHe go home.\n").out
        assert f"prefix = {prefix!r}\n{expected}\n" in shown


def test_a_resumed_batch_does_not_ask_for_the_prefix_in_records(call: Call, here: Path) -> None:
    (here / "in.txt").write_text("He go home.\nShe have a apple\n")
    assert call("batch", "in.txt", "--output", "out", "--force").code == 0
    whole = (here / "out").read_bytes()
    (here / "out").write_bytes(whole[: whole.index(b"\n") + 1])
    assert call("batch", "in.txt", "--output", "out", "--resume").code == 0
    assert (here / "out").read_bytes() == whole


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_types_go_by_their_names(name: str) -> None:
    folder, kind = REPOSITORY / "weights" / "correct-small", getattr(mx, name)
    assert load(folder, dtype=name)[0].dtype == load(folder, dtype=kind)[0].dtype == kind
    engine = SpeculativeDecoder.from_pretrained(folder, folder, dtype=name)
    assert engine.model.dtype == engine.draft.dtype == kind  # type: ignore


@pytest.mark.parametrize("dtype", ["int8", "", "FLOAT32", mx.int32, 3])
def test_other_types_are_refused_by_name(dtype: Any) -> None:
    for read in (load, SpeculativeDecoder.from_pretrained):
        with pytest.raises(
            ValueError, match="dtype must be float32, float16 or bfloat16, got"
        ) as e:
            read(REPOSITORY / "weights" / "correct-small", dtype=dtype)
        check_message(str(e.value))


def test_every_command_that_generates_takes_a_type(
    call: Call, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    whole = SpeculativeDecoder.__init__

    def noting(self: SpeculativeDecoder, model: Any, *rest: Any, **options: Any) -> None:
        seen.append(model.dtype)
        whole(self, model, *rest, **options)

    monkeypatch.setattr(SpeculativeDecoder, "__init__", noting)
    (here / "in.txt").write_text("He go home.\n")
    for command in (("--prompt", "He go home."), ("batch", "in.txt"), ("repl",)):
        seen.clear()
        assert call(*command, "--dtype", "bfloat16").code == 0
        assert set(seen) == {mx.bfloat16}
        refused = call(*command, "--dtype", "int8")
        assert refused.err == ["error: dtype must be float32, float16 or bfloat16, got 'int8'"]


def test_bench_takes_a_type_and_a_prefix(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def noting(first: SpeculativeDecoder, *_: Any) -> None:
        seen.append((first.model.dtype, first.prefix))  # type: ignore[attr-defined]
        raise ValueError("this is enough: leave the rest out")

    monkeypatch.setattr("speculative_t5.cli.bench._pair", noting)
    for options in (("--dtype", "bfloat16"), ("--prefix", "do: ", "--dtype", "float16")):
        assert call("bench", *options).code == 2
    assert seen == [(mx.bfloat16, "correct: "), (mx.float16, "do: ")]


def test_warnings_are_one_line(call: Call, here: Path, spiece: bytes) -> None:
    """Of the command line: Python would show where in the sources they come from."""
    write_checkpoint(here / "gated", V1_1, spiece)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        done = call("--model", "gated", "--dtype", "float16", "--prompt", "x", "--max-tokens", "2")
    assert done.code == 0
    said = [line for line in done.err if "float16" in line]
    assert said == [
        "warning: float16 overflows in the feed-forward of T5 v1.1 and flan models; use bfloat16"
    ]


class Impatient:
    """A timer that does not wait: it is over when it is started."""

    def __init__(self, seconds: float, function: Callable[..., None], arguments: list[str]) -> None:
        self.over = lambda: function(*arguments)
        self.started = self.cancelled = False
        self.daemon = False
        TIMERS.append(self)

    def start(self) -> None:
        self.started = True

    def cancel(self) -> None:
        self.cancelled = True


TIMERS: list[Impatient] = []


def test_a_slow_first_token_is_explained_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    TIMERS.clear()
    monkeypatch.setattr(terminal, "Timer", Impatient)
    chunks = [Chunk("a", [5], 0, Stats()), Chunk("b", [6], 0, Stats())]

    def generating() -> Iterator[Chunk]:
        assert TIMERS[-1].started == terminal.is_terminal(sys.stderr)
        assert not TIMERS[-1].cancelled
        if TIMERS[-1].started:
            TIMERS[-1].over()
        yield chunks[0]
        assert TIMERS[-1].cancelled, "by the first chunk"
        yield chunks[1]

    for shown in (False, True):
        monkeypatch.setattr(terminal, "is_terminal", lambda stream, shown=shown: shown)
        with patience() as watched:
            assert list(watched(generating())) == chunks
        err = capsys.readouterr().err
        assert err == (f"{STILL_WORKING}\n" if shown else "")
    with pytest.raises(ValueError), patience():
        raise ValueError("before the first chunk")
    assert TIMERS[-1].cancelled


def test_the_timer_is_a_real_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(terminal, "is_terminal", lambda stream: True)
    over = Event()
    monkeypatch.setattr(terminal, "note", lambda line: over.set())
    with patience(0.0) as watched:
        assert over.wait(30)
        assert list(watched([])) == []


@pytest.mark.parametrize("command", [("--prompt", "He go home."), ("repl",)])
def test_the_commands_that_stream_have_patience(
    call: Call, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    TIMERS.clear()
    monkeypatch.setattr(terminal, "Timer", Impatient)
    assert call(*command, stdin="He go home.\n").code == 0
    assert [timer.cancelled for timer in TIMERS] == [True]
