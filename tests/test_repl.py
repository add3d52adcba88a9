"""The prompt loop: what it shows, and what it makes of each line."""

import signal
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import Mock

from speculative_t5 import SpeculativeDecoder
from speculative_t5.cli import terminal
from speculative_t5.cli.options import DecoderOptions
from speculative_t5.cli.repl import ReplSession
from speculative_t5.decoding import Stats, total
from speculative_t5.generation import GenerationOptions

import pytest
from commands import Call, Terminal, recording

# Outputs of commands are compared with those of others.
pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("loaded_once")]
PROMPT = "The old man."
Say = Callable[[str], list[str]]


@pytest.fixture
def repl(place: Path) -> ReplSession:
    """A conversation with a tiny model, which is its own draft."""
    models = (place / "weights" / name for name in ("target", "draft"))
    settings = DecoderOptions(prefix="").keywords | asdict(GenerationOptions(max_tokens=12))
    first = SpeculativeDecoder.from_pretrained(*models)
    return ReplSession(first, settings | {"show_drafts": True})


@pytest.fixture
def say(repl: ReplSession, monkeypatch: pytest.MonkeyPatch) -> Say:
    """Let the conversation handle a line; return what it has shown."""
    console = recording(monkeypatch)

    def say(line: str) -> list[str]:
        assert repl.handle(line)
        return console.export_text(styles=False).splitlines()

    return say


def test_options_are_set_by_name(repl: ReplSession, say: Say) -> None:
    for line, shown in (
        ("num_draft 8", "num_draft = 8"),
        ("--delta 0.2", "delta = 0.2"),
        ("top-k=5", "top_k = 5"),
        ("num_draft auto", "num_draft = auto"),
        ("num_draft 2", "num_draft = 2"),
    ):
        assert say(f"/set {line}") == [shown]
    say(PROMPT)
    assert max(repl.done[-1].num_draft) == 2
    assert {"num_draft = 2", "top_k = 5", "prefix = ''"} <= {*say("/set")}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/set num_draft x", "num_draft must be an integer of at least 1 or auto, got 'x'"),
        ("/set delta 9", "delta must be between 0 and 1, got 9.0"),
        ("/set delta much", "delta must be a number, got 'much'"),
        ("/set colour red", "there is no setting named 'colour': choose from num_draft"),
        ("/set prefix x", "use /prefix TEXT"),
        ("/set num_draft", "/set takes a name and a value, got 'num_draft'"),
        ("/frobnicate", "there is no command '/frobnicate': use /set"),
        ("/stats", "there are no statistics yet: give a prompt first"),
    ],
)
def test_a_bad_line_changes_nothing(repl: ReplSession, line: str, message: str) -> None:
    before, decoder = repl.settings, repl.decoder
    with pytest.raises(ValueError) as error:
        repl.handle(line)
    assert message in str(error.value)
    assert repl.settings == before and repl.decoder is decoder


def test_the_prefix_goes_before_each_prompt(repl: ReplSession, say: Say) -> None:
    say("/set show_drafts off")
    bare = say(PROMPT)
    assert say("/prefix summarize:") == ["prefix = 'summarize: '"]
    with_prefix = say(PROMPT)
    alone = SpeculativeDecoder(repl.decoder.model, None, repl.decoder.tokenizer)
    expected = alone.generate(f"summarize: {PROMPT}", max_tokens=12).text
    assert "\n".join(with_prefix) == expected != "\n".join(bare)
    assert say(f"summarize: {PROMPT}") == with_prefix, "it is there already"
    assert say("/prefix") == ["prefix = ''"]
    assert say(PROMPT) == bare


def test_a_person_may_leave_out_the_slash(
    repl: ReplSession, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    fit = SpeculativeDecoder.fit

    def watched(decoder: SpeculativeDecoder, prompt: Any) -> Any:
        read.extend([prompt] if isinstance(prompt, str) else [])
        return fit(decoder, prompt)

    monkeypatch.setattr(SpeculativeDecoder, "fit", watched)
    say("/set show_drafts off")
    for word in ("exit", "quit", "help"):
        assert say(word) and read[-1] == word, "it may come from a file"
    repl.typed = True
    for word in ("exit", "quit", "help"):
        for line, prompt in ((f" {word}", word), (f"//{word}", f"/{word}"), (f"{word} it",) * 2):
            assert say(line) and read[-1] == prompt
    text = say("help ")
    assert text == say("/help")
    for command in ("/set", "/prefix", "/stats", "/help", "/quit"):
        assert command in "\n".join(text)
    expected = repl.decoder.generate("/quit", max_tokens=12).text
    assert "\n".join(say("//quit")) == expected
    assert not any(repl.handle(line) for line in ("exit", "quit", "/exit", "/quit"))
    assert read[-1] == "/quit"


def test_stats_cover_the_last_output_and_all(repl: ReplSession, say: Say) -> None:
    say(PROMPT)
    say("/set num_draft 3")
    say("The new man.")
    first, places, everything = say("/stats")
    assert first == f"last: {repl.done[-1].summary()}" and places.count("%") == 3
    assert everything == f"all 2: {total(repl.done).summary()}"
    one, other = Stats((3,), (3,), (1,), 2, 0.5), Stats((3, 3), (3, 2), (2, 2), 6, 0.25)
    assert total([one, other]) == Stats((3, 3, 3), (3, 3, 2), (1, 2, 2), 8, 0.75)


def test_an_interrupted_output_leaves_the_session_as_it_was(
    repl: ReplSession, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    # While an output is shown, and while "auto" begins before it.
    for module, name, line in (
        (terminal, "show", PROMPT),
        (SpeculativeDecoder, "stream", PROMPT),
    ):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(module, name, Mock(side_effect=KeyboardInterrupt))
            repl.handle(line)
    assert repl.done == []
    say(PROMPT)
    assert len(repl.done) == 1


MODELS = ("--model", "target", "--draft-model", "draft", "--max-tokens", "8")


def test_a_pipe_of_lines_is_answered_line_by_line(call: Call) -> None:
    lines = "The old man.\n\n/set num_draft 2\n/stats\nThe new man.\n/quit\nnever read\n"
    done = call("repl", *MODELS, stdin=lines)
    assert done.code == 0, done.err
    text = call(*MODELS, "--prompt", "The old man.").out
    assert done.out.startswith(text + "num_draft = 2\nlast: ")
    assert "\x1b" not in done.out and "\n> " not in done.out


def test_an_error_on_a_pipe_costs_one_line_and_changes_the_exit_code(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = call("repl", *MODELS, stdin=b"Hello.\ncaf\xe9\n/set delta 9\nHello.\n")
    assert done.code == 3
    assert "error: the prompt is not UTF-8: byte 0xe9 at character 3; give it" in "".join(done.err)
    assert "error: delta must be between 0 and 1, got 9.0" in done.err
    first, second = done.out.splitlines()
    assert first == second
    monkeypatch.setattr(ReplSession, "handle", Mock(side_effect=[True, MemoryError, True]))
    done = call("repl", *MODELS, stdin="one\nfail\ntwo\n")
    (line,) = done.err
    assert done.code == 3 and line.startswith("error: failed while running: MemoryError; run it")


def test_a_person_types_stops_and_finds_lines_again(place: Path) -> None:
    """Prompts, Ctrl-C in an output and at the prompt, the arrow keys, Ctrl-D."""
    models = ("--model", "weights/target", "--draft-model", "weights/draft")  # shown by name
    options = ("--max-tokens", "100000")
    person = Terminal(place, "-m", "speculative_t5", "repl", *models, *options)

    greeting = person.type("", "> ")
    assert "\ntarget, draft drafts" in f"\n{greeting}" and "/help" in greeting
    # Wait for the legend and a token: before the first pass MLX looks for a compiler, and C's
    # system() ignores Ctrl-C meanwhile.
    person.type("The old man.\n", "bonus", "\x1b[32m")
    person.process.kill(signal.SIGINT)
    person.type("", "stopped", "> ")
    person.type("half a li", "half a li")
    time.sleep(0.5)  # Python loses a signal between two waits of the line editor
    person.process.kill(signal.SIGINT)
    person.type("", "> ")
    person.type("/set max_tokens 8\n", "max_tokens = 8", "> ")
    shown = person.type("\x1b[A\x1b[A\n", "tok/s - 8 tokens")  # two lines up
    assert "The old man." in shown and "\x1b[32m" in shown
    person.type("", "> ")
    person.type("\x04")
    person.rest()


def test_prompts_are_kept_nowhere(
    call: Call, place: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(terminal, "is_terminal", lambda stream: True)
    monkeypatch.setattr("builtins.input", Mock(side_effect=["/set seed 8", EOFError]))
    before = {*place.rglob("*")}
    assert call("repl", *MODELS).out == "seed = 8\n"
    assert not [*tmp_path.rglob("*")] and {*place.rglob("*")} == before
