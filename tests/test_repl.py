"""The prompt loop: what it shows, and what it makes of each line."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import signal
import time
from dataclasses import asdict
from pathlib import Path
from unittest.mock import Mock

from speculative_t5 import SpeculativeDecoder, load
from speculative_t5.cli import terminal
from speculative_t5.cli.options import DecoderOptions
from speculative_t5.cli.repl import Conversation
from speculative_t5.decoding import Stats, total
from speculative_t5.generation import GenerationOptions

import pytest
from commands import Call, read_to_end, start
from conftest import REPOSITORY
from rich.console import Console

pytestmark = pytest.mark.cpu  # outputs of commands are compared with those of others
PROMPT = "The old man."


@pytest.fixture(scope="module")
def first(place: Path) -> SpeculativeDecoder:
    """A decoder whose draft is the same model."""
    (model, tokenizer), (draft, _) = (load(place / "weights" / n) for n in ("target", "draft"))
    return SpeculativeDecoder(model, draft, tokenizer)


class Screen:
    """A conversation with tiny models, and what it has shown."""

    def __init__(self, first: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
        self.console = Console(
            record=True, file=io.StringIO(), force_terminal=True, color_system="standard",
            width=100, highlight=False, markup=False, soft_wrap=True,
        )  # fmt: skip
        monkeypatch.setattr(terminal, "console", lambda stderr=False: self.console)
        settings = DecoderOptions(prefix="").keywords | asdict(GenerationOptions(max_tokens=12))
        self.repl = Conversation(first, settings | {"show_drafts": True})

    def say(self, line: str) -> list[str]:
        assert self.repl.handle(line)
        return self.console.export_text(styles=False).splitlines()


@pytest.fixture
def screen(first: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch) -> Screen:
    return Screen(first, monkeypatch)


def test_options_are_set_by_name(screen: Screen) -> None:
    for line, shown in (("/set num_draft 8", "num_draft = 8"), ("/set --delta 0.2", "delta = 0.2"),
                        ("/set top-k=5", "top_k = 5"), ("/set num_draft auto", "num_draft = auto"),
                        ("/set num_draft 2", "num_draft = 2")):  # fmt: skip
        assert screen.say(line) == [shown]
    screen.say(PROMPT)
    assert max(screen.repl.done[-1].num_draft) == 2
    assert {"num_draft = 2", "top_k = 5", "prefix = ''"} <= {*screen.say("/set")}


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
        ("/compare", "there is nothing to compare yet: give a prompt"),
    ],
)
def test_a_bad_line_changes_nothing(screen: Screen, line: str, message: str) -> None:
    before, decoder = screen.repl.settings, screen.repl.decoder
    with pytest.raises(ValueError) as error:
        screen.repl.handle(line)
    assert message in str(error.value)
    assert screen.repl.settings == before and screen.repl.decoder is decoder


def test_the_prefix_goes_before_each_prompt(screen: Screen) -> None:
    screen.say("/set show_drafts off")
    bare = screen.say(PROMPT)
    assert screen.say("/prefix summarize:") == ["prefix = 'summarize: '"]
    with_prefix = screen.say(PROMPT)
    alone = SpeculativeDecoder(screen.repl.decoder.model, None, screen.repl.decoder.tokenizer)
    expected = alone.generate(f"summarize: {PROMPT}", max_tokens=12).text
    assert "\n".join(with_prefix) == expected != "\n".join(bare)
    assert screen.say(f"summarize: {PROMPT}") == with_prefix, "it is there already"
    assert screen.say("/prefix") == ["prefix = ''"]
    assert screen.say(PROMPT) == bare


def test_a_person_may_leave_out_the_slash(screen: Screen) -> None:
    screen.say("/set show_drafts off")
    for word in ("exit", "quit", "help"):
        assert screen.say(word) and screen.repl.prompt == word, "it may come from a file"
    screen.repl.typed = True
    for word in ("exit", "quit", "help"):
        for line, prompt in ((f" {word}", word), (f"//{word}", f"/{word}"), (f"{word} it",) * 2):
            assert screen.say(line) and screen.repl.prompt == prompt
    text = screen.say("help ")
    assert text == screen.say("/help")
    for command in ("/set", "/prefix", "/stats", "/compare", "/help", "/quit"):
        assert command in "\n".join(text)
    expected = screen.repl.decoder.generate("/quit", max_tokens=12).text
    assert "\n".join(screen.say("//quit")) == expected
    assert not any(screen.repl.handle(line) for line in ("exit", "quit", "/exit", "/quit"))
    assert screen.repl.prompt == "/quit"


def test_compare_decodes_the_last_prompt_both_ways(screen: Screen) -> None:
    screen.say(PROMPT)
    plain, text, speculative, again, verdict = screen.say("/compare")
    assert text == again == screen.repl.decoder.generate(PROMPT, max_tokens=12).text
    assert re.fullmatch("plain: .*- no draft( - cut at --max-tokens 12)?", plain)
    ended = screen.repl.decoder.generate(PROMPT, max_tokens=12).finish_reason == "eos"
    assert ["cut at" in line for line in (plain, speculative)] == [not ended] * 2
    assert re.match("speculative: .*of drafts accepted", speculative)
    assert re.fullmatch(r"speculative is [0-9.]+x plain; the outputs are the same", verdict)
    assert len(screen.repl.done) == 1, "a comparison does not count as an output"
    screen.say("/set temperature 1.5")
    lines = screen.say("/compare Another text.")
    assert screen.repl.prompt == "Another text."
    assert lines[-1].endswith("the outputs differ, as samples do")


def test_stats_cover_the_last_output_and_all(screen: Screen) -> None:
    screen.say(PROMPT)
    screen.say("/set num_draft 3")
    screen.say("The new man.")
    first, places, everything = screen.say("/stats")
    assert first == f"last: {screen.repl.done[-1].summary()}" and places.count("%") == 3
    assert everything == f"all 2: {total(screen.repl.done).summary()}"
    one, other = Stats((3,), (3,), (1,), 2, 0.5), Stats((3, 3), (3, 2), (2, 2), 6, 0.25)
    assert total([one, other]) == Stats((3, 3, 3), (3, 3, 2), (1, 2, 2), 8, 0.75)


def test_an_interrupted_output_leaves_the_session_as_it_was(
    screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    # While an output is shown, while "auto" is calibrated before it, and while two are compared.
    for module, name, line in (
        (terminal, "show", PROMPT), (SpeculativeDecoder, "stream", PROMPT),
        (SpeculativeDecoder, "generate", f"/compare {PROMPT}"),
    ):  # fmt: skip
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(module, name, Mock(side_effect=KeyboardInterrupt))
            screen.repl.handle(line)
    assert screen.repl.done == []
    screen.say(PROMPT)
    assert len(screen.repl.done) == 1


MODELS = ("--model", "target", "--draft-model", "draft", "--max-tokens", "8")


def test_a_pipe_of_lines_is_answered_line_by_line(call: Call) -> None:
    lines = "The old man.\n\n/set num_draft 2\n/stats\nThe new man.\n/quit\nnever read\n"
    done = call("repl", *MODELS, stdin=lines)
    assert done.code == 0, done.err
    text = call(*MODELS, "--prompt", "The old man.").out
    assert done.out.startswith(text + "num_draft = 2\nlast: ")
    assert "\x1b" not in done.out and "\n> " not in done.out


def test_an_error_on_a_pipe_costs_one_line_and_changes_the_exit_code(call: Call) -> None:
    done = call("repl", *MODELS, stdin=b"Hello.\ncaf\xe9\n/set delta 9\nHello.\n")
    assert done.code == 3
    assert "error: the prompt is not UTF-8: byte 0xe9 at character 3; give it" in "".join(done.err)
    assert "error: delta must be between 0 and 1, got 9.0" in done.err
    first, second = done.out.splitlines()
    assert first == second


def test_a_failure_costs_one_line(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Conversation, "handle", Mock(side_effect=[True, MemoryError, True]))
    done = call("repl", *MODELS, stdin="one\nfail\ntwo\n")
    assert done.code == 3
    (line,) = done.err
    assert line.startswith("error: failed while running: MemoryError; run it")


class Person:
    """A person at a terminal, who starts a session and types."""

    def __init__(self, place: Path, *arguments: str) -> None:
        self.screen, self.end = pty.openpty()
        self.process = start(
            place, "repl", *MODELS, *arguments, stdin=self.end, stdout=self.end, stderr=self.end,
            env=os.environ | {"PYTHONPATH": str(REPOSITORY), "TERM": "xterm"},
            start_new_session=True,
        )  # fmt: skip
        self.seen = ""

    def type(self, keys: str, *answers: str) -> str:
        """Type, and return what is shown until these texts have come."""
        os.write(self.screen, keys.encode())
        return "".join([self._wait_for(text) for text in answers])

    def interrupt(self, *answers: str) -> None:
        time.sleep(0.5)  # Python loses a signal between two waits of the line editor
        self.process.send_signal(signal.SIGINT)
        self.type("", *answers)

    def leave(self) -> None:
        os.write(self.screen, b"\x04")
        read_to_end(self.screen, self.process)
        assert self.process.returncode == 0
        os.close(self.screen)
        os.close(self.end)

    def _wait_for(self, text: str) -> str:
        deadline = time.monotonic() + 60
        while text not in self.seen:
            ready, _, _ = select.select([self.screen], [], [], deadline - time.monotonic())
            assert ready, f"no {text!r} in {self.seen!r}"
            self.seen += os.read(self.screen, 10_000).decode(errors="replace")
        before, _, self.seen = self.seen.partition(text)
        return before


def test_a_person_types_stops_and_finds_lines_again(place: Path) -> None:
    """Prompts, Ctrl-C in an output and at the prompt, the arrow keys, Ctrl-D."""
    models = ("--model", "weights/target", "--draft-model", "weights/draft")  # shown by name
    person = Person(place, *models, "--max-tokens", "100000", "--history", "kept")
    greeting = person.type("", "> ")
    assert "\ntarget, draft drafts" in f"\n{greeting}" and "/help" in greeting
    person.type("The old man.\n", "bonus")  # the legend: the output has begun
    person.interrupt("stopped", "> ")
    person.type("half a li", "half a li")
    person.interrupt("> ")
    person.type("/set max_tokens 8\n", "max_tokens = 8", "> ")
    shown = person.type("\x1b[A\x1b[A\n", "tok/s - 8 tokens")  # two lines up
    assert "The old man." in shown and "\x1b[32m" in shown
    person.type("", "> ")
    person.leave()
    kept = (place / "kept").read_text()
    kept = kept.replace("\\040", " ").splitlines()  # as libedit, a Mac's readline, writes spaces
    assert "The old man." in kept and "/set max_tokens 8" in kept


def test_prompts_are_kept_nowhere_unless_asked_for(
    call: Call, place: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(terminal, "is_terminal", lambda stream: True)
    monkeypatch.setattr("builtins.input", Mock(side_effect=["/set seed 8", EOFError]))
    assert call("repl", *MODELS).out == "seed = 8\n"
    assert not [*tmp_path.rglob("*")] and not (place / "cache" / "speculative_t5").exists()
