"""The command line with decoder-only models."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speculative_t5 import SpeculativeDecoder
from speculative_t5.cli.main import main

import mlx.core as mx
import pytest
from checkpoints import write_causal
from messages import check_message

TEXT = ("--prompt", "x")
PAIR = ("--model", "target", "--draft-model", "draft")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    here = tmp_path_factory.mktemp("causal")
    write_causal(here / "weights" / "target", vocab_size=304)
    write_causal(here / "weights" / "draft", vocab_size=320, num_hidden_layers=1)
    (here / "in.txt").write_text("He go\nShe have a apple\nThey was here\n")
    return here


@dataclass
class Done:
    """What a command left behind."""

    returncode: int
    stdout: bytes
    stderr: bytes


Run = Callable[..., Done]


@pytest.fixture
def run(
    here: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> Run:
    """Runs a command in this process: importing transformers takes seconds in each new one."""
    monkeypatch.chdir(here)
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")

    def call(*arguments: str, stdin: bytes = b"") -> Done:
        (here / "stdin").write_bytes(stdin)
        with (here / "stdin").open() as typed, monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["__main__.py", *arguments])
            patch.setattr(sys, "stdin", typed)
            handlers = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGHUP)}
            with pytest.raises(SystemExit) as left:
                main()
            for number, handler in handlers.items():
                signal.signal(number, handler)
        return Done(int(left.value.code or 0), *capfdbinary.readouterr())

    return call


def decoder(here: Path, **options: Any) -> SpeculativeDecoder:
    weights = here / "weights"
    return SpeculativeDecoder.from_pretrained(
        weights / "target", weights / "draft", dtype=mx.float32, **options
    )


def records(text: bytes | str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("chat", [(), ("--chat",)])
def test_a_prompt_is_gone_on_from(run: Run, here: Path, chat: tuple[str, ...]) -> None:
    done = run(*PAIR, *chat, "--prompt", "He go", "--max-tokens", "12", "--json")
    assert done.returncode == 0 and not done.stderr, done.stderr
    expected = decoder(here, chat=bool(chat)).generate("He go", max_tokens=12)
    (found,) = records(done.stdout)
    assert found["tokens"] == expected.tokens and found["text"] == expected.text
    assert found["stats"]["drafted"]


def test_lookups_need_no_draft(run: Run) -> None:
    done = run("--model", "target", "--draft-model", "lookup", "--prompt", "go go go", "--json")
    assert done.returncode == 0, done.stderr
    assert records(done.stdout)[0]["stats"]["drafted"]


@pytest.mark.parametrize("chat", [(), ("--chat",)])
def test_files_are_done_in_batches_with_nucleus_sampling(
    run: Run, here: Path, chat: tuple[str, ...]
) -> None:
    sampled = ("--temperature", "1", "--top-p", "0.9", "--max-tokens", "12")
    outputs = [
        run("batch", "in.txt", *PAIR, *chat, *sampled, "--batch-size", size)
        for size in ("1", "2", "3")
    ]
    assert all(done.returncode == 0 for done in outputs), outputs[0].stderr
    assert outputs[0].stdout == outputs[1].stdout == outputs[2].stdout
    texts = [
        decoder(here, chat=bool(chat))
        .generate(line, temperature=1.0, top_p=0.9, max_tokens=12)
        .text
        for line in ("He go",)
    ]
    assert [record["text"] for record in records(outputs[0].stdout)][:1] == texts


def test_prompts_beyond_the_context_are_errors_or_lose_their_beginning(
    run: Run, here: Path
) -> None:
    (here / "long.txt").write_text("He go " * 60 + "\n")
    done = run("batch", "long.txt", *PAIR)
    assert done.returncode == 3
    assert "tokens, more than the 64 that the model is made for" in records(done.stdout)[0]["error"]
    done = run("batch", "long.txt", *PAIR, "--truncate", "--max-source-length", "20")
    assert done.returncode == 0
    (found,) = records(done.stdout)
    last = decoder(here).encode("He go " * 60)[-20:]
    expected = decoder(here).generate(last)
    assert found["truncated"] and found["text"] == expected.text
    assert expected.stats.emitted <= 64 - 20 + 1
    room = ("--truncate", "--max-tokens", "15")
    done = run("batch", "long.txt", *PAIR, *room)
    (found,) = records(done.stdout)
    last = decoder(here).encode("He go " * 60)[-50:]
    assert found["text"] == decoder(here).generate(last, max_tokens=15).text
    done = run(*PAIR, "--prompt", "He go " * 60)
    check_error(done, "(--truncate) to cut it, or split it")
    done = run(*PAIR, "--prompt", "He go " * 60, "--json", *room)
    assert records(done.stdout)[0]["text"] == found["text"]


def check_error(done: Any, message: str) -> None:
    (line,) = done.stderr.decode().splitlines()
    assert done.returncode == 2 and not done.stdout
    check_message(line.removeprefix("error: "))
    assert message in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("batch", "in.txt", *PAIR, "--max-source-length", "65"),
            "max_source_length must be at most 64",
        ),
        (("batch", "in.txt", *PAIR, "--chat", "--truncate"), "leave one of them out"),
        (
            ("--model", "target", "--draft-model", "correct-small", *TEXT),
            "the target is decoder-only",
        ),
        (
            ("--draft-model", "target", *TEXT),
            "is an encoder-decoder, the draft is decoder-only",
        ),
        (("batch", "in.txt", "--chat"), "a chat needs a decoder-only model's tokenizer"),
        (("--chat", *TEXT), "a chat needs a decoder-only model's tokenizer"),
    ],
)
def test_bad_input_is_one_line(run: Run, arguments: tuple[str, ...], message: str) -> None:
    check_error(run(*arguments), message)


def test_num_draft_beyond_what_is_left_of_the_context_is_cut(here: Path) -> None:
    prompt = decoder(here).encode("He go " * 60)[-60:]
    found = decoder(here, num_draft=50).generate(prompt)
    alone = decoder(here).generate(prompt, speculative=False)
    assert found.tokens == alone.tokens
    assert max(found.stats.num_drafted) <= 4


def test_models_lists_them_with_their_drafts(run: Run) -> None:
    found = {Path(r["folder"]).name: r for r in records(run("models", "--json").stdout)}
    assert found["target"]["family"] == found["draft"]["family"] == "qwen3"
    assert found["target"]["drafts"] == ["draft"] and found["correct-base"]["drafts"]
    assert found["target"]["stored"] == ["float32"]
    assert found["target"]["num_parameters"] > found["draft"]["num_parameters"]


def test_the_repl_chats(run: Run, here: Path) -> None:
    done = run("repl", *PAIR, "--chat", "--max-tokens", "9", stdin=b"He go\n")
    assert done.returncode == 0, done.stderr
    expected = decoder(here, chat=True).generate("He go", max_tokens=9).text
    assert done.stdout.decode().strip() == expected.strip()
