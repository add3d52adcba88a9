"""The commands as a user runs them: output, exit codes, one line for each error."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import termios
from importlib import metadata
from pathlib import Path
from typing import Any

from speculative_t5 import __version__, device
from speculative_t5.checkpoints import inspection, places
from speculative_t5.cli import models as models_command

import pytest
from conftest import REPOSITORY, edit_json, run
from messages import check_message

PAIR = ("--model", "target", "--draft-model", "draft", "--max-tokens", "12")


def test_the_text_streams_and_a_footer_follows(place: Path) -> None:
    done = run(place, *PAIR, "--prompt", "The old man.")
    assert done.returncode == 0, done.stderr
    out = json.loads(run(place, *PAIR, "--prompt", "The old man.", "--json").stdout)
    assert done.stdout.decode() == out["text"] + "\n"
    footer = done.stderr.decode().splitlines()[0]
    assert re.fullmatch(
        r"\d+ tok/s - 12 tokens - \d+ % of drafts accepted - \d\.\d tokens per round - "
        r"cut at --max-tokens 12",
        footer,
    )


def on_a_terminal(place: Path, *arguments: str, **environment: str) -> str:
    """What a person sees of a command."""
    screen, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    bare = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    process = subprocess.Popen(
        [sys.executable, "-m", "speculative_t5", *arguments],
        cwd=place, stdin=subprocess.DEVNULL, stdout=end, stderr=end,
        env=bare | {"PYTHONPATH": str(REPOSITORY), "TERM": "xterm-256color"} | environment,
    )  # fmt: skip
    os.close(end)
    shown = b""
    with contextlib.suppress(OSError):  # how Linux tells that the other end is closed
        while part := os.read(screen, 10_000):
            shown += part
    os.close(screen)
    assert process.wait() == 0, shown
    return shown.decode().replace("\r\n", "\n")


ACCEPTED, BONUS = "\x1b[32m", "\x1b[4;36m"


def test_drafts_are_shown_on_a_terminal(place: Path) -> None:
    shown = on_a_terminal(place, *PAIR, "--prompt", "The old man.", "--show-drafts")
    meanings, *text, footer = shown.splitlines()
    assert f"{ACCEPTED}accepted" in meanings and f"{BONUS}bonus" in meanings
    assert any(ACCEPTED in line for line in text) and any(BONUS in line for line in text)
    plain = run(place, *PAIR, "--prompt", "The old man.").stdout.decode()
    assert re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(text)) + "\n" == plain
    assert re.search(
        r" tokens per round - \d+\.\dx regular \(estimated\) - cut at --max-tokens 12$", footer
    )


def test_no_color_is_respected(place: Path) -> None:
    shown = on_a_terminal(place, *PAIR, "--prompt", "The old man.", "--show-drafts", NO_COLOR="1")
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", shown)
    assert "accepted drafted" in shown


def test_a_terminal_gets_no_colours_unless_asked(place: Path) -> None:
    shown = on_a_terminal(place, *PAIR, "--prompt", "The old man.")
    assert "\x1b" not in shown and "accepted drafted" not in shown


def test_a_pipe_is_quiet(place: Path) -> None:
    done = run(place, *PAIR, "--prompt", "The old man.", "--show-drafts")
    assert done.stdout == run(place, *PAIR, "--prompt", "The old man.").stdout
    assert b"\x1b" not in done.stdout + done.stderr
    assert b"estimated" not in done.stderr, "nobody waits for an estimate"


def test_the_version_is_told(place: Path) -> None:
    done = run(place, "--version")
    assert done.returncode == 0
    versions, *parts = done.stdout.decode().splitlines()
    assert versions == f"speculative_t5 {__version__}, mlx {metadata.version('mlx')}"
    assert parts == [f"{part}: {state}" for part, state in device.parts.items()]


def test_models_that_cannot_be_read_harm_no_others(
    tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folders without weights, of another tokenizer, and of the same name as another."""
    weights, again = tmp_path / "weights", tmp_path / "again"
    shutil.copytree(place / "weights" / "target", weights / "target")
    shutil.copytree(place / "weights" / "target", again / "target")
    shutil.copytree(place / "weights" / "target", weights / "empty")
    (weights / "empty" / "weights.npz").write_bytes(b"")
    shutil.copytree(place / "weights" / "target", weights / "wide")
    edit_json(weights / "wide" / "config.json", feed_forward_proj="[/relu]")
    monkeypatch.setattr(places, "weights_folders", lambda: [weights, again])
    found = {model.folder.name: model for model in inspection.list_models()}
    assert found.keys() == {"target", "empty", "wide"}
    assert found["target"].folder == weights / "target" and found["target"].drafts == ()
    assert found["target"].error is None
    for name in ("empty", "wide"):
        assert found[name].error and found[name].family is None


def test_models_are_listed(place: Path) -> None:
    (place / "weights" / "torn").mkdir(exist_ok=True)
    (place / "weights" / "torn" / "weights.npz").write_bytes(b"no archive")
    (place / "weights" / "torn" / "config.json").write_text("{}")
    try:
        records = [json.loads(line) for line in run(place, "models", "--json").stdout.splitlines()]
        lines = run(place, "models").stdout.decode().splitlines()
    finally:
        shutil.rmtree(place / "weights" / "torn")
    found = {Path(record["folder"]).name: record for record in records}
    assert found["target"]["family"] == "T5 v1.0" and found["target"]["stored"] == ["float32"]
    assert found["correct-base"]["drafts"] == ["correct-small"]
    assert "cannot" not in found["target"] and found["torn"]["error"]
    (row,) = [line for line in lines if line.startswith("correct-base")]
    assert row.split() == (
        ["correct-base", "T5", "v1.0", "26.0", "M", "float16"]
        + [f"{found['correct-base']['size'] / 1e6:.1f}", "MB", "correct-small,", "lookup"]
    )
    assert any(line.startswith("torn") and "cannot be loaded: " in line for line in lines)


def test_a_folder_without_models_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(models_command, "list_models", list)
    models_command.models()
    captured = capsys.readouterr()
    assert captured.out == "" and "python convert.py --model" in captured.err


def installed(place: Path, *arguments: str, **environment: str) -> str:
    """What the program that an installation makes prints."""
    code = "import sys; sys.argv[0] = 'speculative-t5'; from speculative_t5.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=place, check=True, capture_output=True,
        text=True, env=os.environ | {"PYTHONPATH": str(REPOSITORY)} | environment,
    ).stdout  # fmt: skip


def test_the_installed_program_goes_by_its_name(place: Path) -> None:
    assert "Usage: speculative-t5 [OPTIONS]" in installed(place, "--help")
    assert "--install-completion" in installed(place, "--help")
    assert "--install-completion" not in run(place, "--help").stdout.decode()


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("speculative-t5 --mo", {"--model"}),
        ("speculative-t5 --model corr", {"correct-base", "correct-small"}),
        ("speculative-t5 --draft-model l", {"lookup"}),
        ("speculative-t5 --dtype b", {"bfloat16"}),
        ("speculative-t5 --verify ", {"auto", "token", "block"}),
        ("speculative-t5 mod", {"models"}),
        ("speculative-t5 batch --draft-model tar", {"target"}),
    ],
)
def test_a_shell_completes(place: Path, typed: str, offered: set[str]) -> None:
    words = installed(
        place, **{"_SPECULATIVE_T5_COMPLETE": "complete_bash", "COMP_WORDS": typed,
                  "COMP_CWORD": str(len(typed.split(" ")) - 1)},
    )  # fmt: skip
    assert set(words.split()) == offered


def test_json_is_one_object_of_the_whole_result(place: Path) -> None:
    done = run(place, *PAIR, "--prompt", "The old man.", "--json", "--temperature", "1")
    out = json.loads(done.stdout)
    assert set(out) == {"text", "tokens", "finish_reason", "stats"}
    assert out["stats"]["drafted"] > 0
    again = json.loads(
        run(place, *PAIR, "--prompt", "The old man.", "--json", "--temperature", "1").stdout
    )
    assert again["tokens"] == out["tokens"]


def test_regular_decoding_gives_the_same_text(place: Path) -> None:
    one = run(place, *PAIR, "--prompt", "The old man.")
    other = run(place, *PAIR, "--prompt", "The old man.", "--regular-decode")
    assert one.stdout == other.stdout
    assert b"no draft" in other.stderr


def test_lookups_draft_without_a_model_and_with_one(place: Path) -> None:
    prompt = ("--prompt", "The old man. The old man.", "--json")
    regular = json.loads(run(place, *PAIR, *prompt, "--regular-decode").stdout)
    alone = json.loads(run(place, *PAIR[:2], *PAIR[4:], "--draft-model", "lookup", *prompt).stdout)
    both = json.loads(run(place, *PAIR, "--lookup", *prompt).stdout)
    assert alone["tokens"] == both["tokens"] == regular["tokens"]
    assert both["stats"]["drafted"] >= 5
    assert regular["stats"]["drafted"] == 0 < both["stats"]["drafted"]


def test_the_draft_length_may_be_left_to_the_program(place: Path) -> None:
    arguments = (*PAIR, "--prompt", "The old man.", "--num-draft", "auto", "--temperature", "1")
    first = json.loads(run(place, *arguments, "--json").stdout)
    kept = list((place / "cache").rglob("*.json"))
    assert len(kept) == 1
    again = json.loads(run(place, *arguments, "--json").stdout)
    assert again["tokens"] == first["tokens"]
    assert list((place / "cache").rglob("*.json")) == kept


def test_the_prompt_also_comes_from_standard_input(place: Path) -> None:
    piped = run(place, *PAIR, stdin=b"The old man.\n")
    dashed = run(place, *PAIR, "--prompt", "-", stdin=b"The old man.\n")
    given = run(place, *PAIR, "--prompt", "The old man.")
    assert piped.stdout == dashed.stdout == given.stdout != b""


@pytest.mark.parametrize(
    ("arguments", "stdin", "message"),
    [
        (("--model", "absent"), None, "is named 'absent', and there is no folder"),
        (("--model", "absent"), None, "the Hub cannot be reached"),
        (("--model", "absent"), None, "draft, other, target"),
        (("--model", "bert"), None, "bert: this is a bert (model_type in config.json)"),
        ((*PAIR, "--draft-model", "other"), None, "must share a tokenizer"),
        ((*PAIR, "--delta", "1.5"), None, "delta must be between 0 and 1, got 1.5"),
        ((*PAIR, "--temperature", "-1"), None, "temperature must be 0 or at least"),
        ((*PAIR, "--min-ngram", "0"), None, "min_ngram must be an integer from 1 to 16, got 0"),
        ((*PAIR, "--verify", "all"), None, "verify must be 'auto', 'token' or 'block', got 'all'"),
        ((*PAIR, "--verify", "block", "--delta", "0.1"), None, "verify 'block' is exact and takes"),
        ((*PAIR, "--top-k", "-1"), None, "top_k must be an integer of at least 0"),
        ((*PAIR, "--top-p", "0"), None, "top_p must be above 0 and at most 1 (1 is off), got 0.0"),
        ((*PAIR, "--num-draft", "0"), None, "at least 1 or 'auto', got 0"),
        ((*PAIR, "--num-draft", "x"), None, "--num-draft must be an integer of at least 1 or auto"),
        ((*PAIR, "--max-tokens", "0"), None, "max_tokens must be an integer of at least 1, got 0"),
        ((*PAIR, "--prompt", " "), None, "the prompt is empty"),
        ((*PAIR, "--prompt", "-"), b"", "the prompt is empty"),
        (PAIR, b"", "the prompt is empty"),
        (PAIR, b"caf\xe9", "not UTF-8: byte 0xe9 at offset 3"),
        ((*PAIR, "--prompt", b"caf\xe9"), None, "--prompt is not UTF-8: byte 0xe9"),
        ((*PAIR, "--seed", "-1"), None, "seed must be an integer from 0 to"),
        (("--nonsense",), None, "No such option"),
        (("--seed", "1", "batch", "x"), None, "--seed stands before the word batch: put it after"),
        (("--seed", "1", "models"), None, "--seed is no option of models: leave it out"),
    ],
)
def test_bad_input_gets_one_line_and_code_2(
    place: Path, arguments: Any, stdin: bytes | None, message: str
) -> None:
    prompt = () if stdin is not None or "--prompt" in arguments else ("--prompt", "Hello.")
    done = run(place, *arguments, *prompt, stdin=stdin)
    assert done.returncode == 2
    assert done.stdout == b""
    (line,) = done.stderr.decode().splitlines()
    assert line.startswith("error: ") and message in line, line
    check_message(line.removeprefix("error: "))


def test_convert_writes_under_weights_and_says_so(place: Path) -> None:
    done = run(place, "--model", "checkpoint", "--dtype", "float16", script=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode().startswith("weights/checkpoint (")
    # The name means the conversion, though a folder of that name is right here.
    assert b"no draft" in run(place, "--model", "checkpoint", "--prompt", "Hello.").stderr


def test_convert_refuses_in_one_line(place: Path) -> None:
    (place / "file").write_text("in the way")
    for arguments, message in (
        (
            ("--model", "absent"),
            "no folder 'absent', the Hub cannot be reached, and it is not in the cache",
        ),
        (("--model", "bert"), "this is a bert"),
        (
            ("--model", "checkpoint", "--dtype", "int3"),
            "dtype must be float32, float16 or bfloat16, got 'int3'",
        ),
        (("--model", "checkpoint", "--output", "file/out"), "file"),
        (("--model", "checkpoint", "--output", "file"), "file"),
        (("--model", "checkpoint", "--output", "checkpoint"), "is or holds the checkpoint itself"),
        ((), "Missing option '--model'"),
    ):
        done = run(place, *arguments, script=True)
        assert done.returncode == 2, done.stderr
        (line,) = done.stderr.decode().splitlines()
        assert line.startswith("error: ") and message in line
        check_message(line.removeprefix("error: "))
    assert (place / "file").read_text() == "in the way"


def test_a_full_disk_is_one_line_and_code_1(place: Path) -> None:
    """A limit on file sizes stands in for a disk that is full."""
    command = 'ulimit -f 20; exec "$0" "$@" 2>&1'  # 20 KiB
    done = subprocess.run(
        ["bash", "-c", command, sys.executable, str(REPOSITORY / "convert.py"),
         "--model", "checkpoint", "--output", "full"],
        cwd=place, env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, capture_output=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout
    assert b"full: cannot be written: File too large" in done.stdout.splitlines()[-1]
    assert not (place / "full").exists() and not list(place.glob(".full*"))


def test_ctrl_c_ends_with_130(place: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "speculative_t5", *PAIR[:4], "--prompt", "Hello.",
         "--max-tokens", "1000000"],
        cwd=place, env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        # What was started in the background of a script passes on that it ignores this signal.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.read(1), "it should be generating by now"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert errors.decode() == "error: interrupted\n"


def test_a_closed_standard_output_is_nobodys_business(place: Path) -> None:
    for more in ("", " --show-drafts"):
        command = f'"$0" -m speculative_t5 --model target --prompt Hello. --max-tokens 4{more} >&-'
        done = subprocess.run(
            ["bash", "-c", command, sys.executable], cwd=place, capture_output=True, check=False,
            env=os.environ | {"PYTHONPATH": str(REPOSITORY), "FORCE_COLOR": "1"},
        )  # fmt: skip
        assert done.returncode == 0 and b"4 tokens" in done.stderr


def test_a_closed_standard_input_is_told(place: Path) -> None:
    done = subprocess.run(
        ["bash", "-c", '"$0" -m speculative_t5 --prompt - <&-', sys.executable],
        cwd=place, env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, capture_output=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert b"standard input, which is closed" in done.stderr


def test_a_hub_out_of_reach_is_told(place: Path) -> None:
    """A port of this machine where nobody listens stands in for the Hub."""
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "convert.py"), "--model", "someone/some-t5"],
        cwd=place, capture_output=True, check=False,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY), "HF_ENDPOINT": "http://127.0.0.1:9"},
    )  # fmt: skip
    assert done.returncode == 2
    line = done.stderr.decode().splitlines()[-1]
    assert line.startswith("error: there is no folder 'someone/some-t5', the Hub cannot be reached")
    check_message(line.removeprefix("error: "))
    assert b"Traceback" not in done.stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is unwritable to root")
def test_an_unwritable_output_is_told(place: Path) -> None:
    (place / "locked").mkdir(mode=0o500)
    done = run(place, "--model", "checkpoint", "--output", "locked/out", script=True)
    assert (
        done.returncode == 2 and b"locked/out: cannot be written: Permission denied" in done.stderr
    )


def test_help_groups_options_and_names_defaults(place: Path) -> None:
    text = run(place, "--help").stdout.decode()
    assert run(place, "-h").stdout.decode() == text
    for name in ("--num-draft", "--delta", "correct-base", "[default: 256]"):
        assert name in text
    groups = re.split(r"─ (\w+) ─", text)
    options = {name: part for name, part in zip(groups[1::2], groups[2::2], strict=True)}
    for group, option in (
        ("Models", "--draft-model"), ("Drafting", "--delta"), ("Sampling", "--top-p"),
        ("Output", "--show-drafts"), ("Commands", "repl"), ("Options", "--version"),
    ):  # fmt: skip
        assert option in options[group]
    examples = re.findall(r"python -m speculative_t5 .*", text.partition("Examples:")[2])
    assert len(examples) == 2


@pytest.mark.parametrize("command", ["repl", "batch", "models", "convert", "bench"])
def test_every_command_has_help(place: Path, command: str) -> None:
    done = run(place, command, "-h")
    assert done.returncode == 0 and b"Usage: python -m speculative_t5 " in done.stdout
    assert b"--help" in done.stdout


def test_the_command_convert_is_convert_py(place: Path) -> None:
    done = run(place, "convert", "--model", "checkpoint", "--output", "by-command")
    assert done.returncode == 0, done.stderr
    run(place, "--model", "checkpoint", "--output", "by-script", script=True)
    for name in ("weights.npz", "config.json", "spiece.model"):
        one, other = (place / folder / name for folder in ("by-command", "by-script"))
        assert one.read_bytes() == other.read_bytes()


def test_a_terminal_is_shown_bytes_rate_and_time_left(place: Path) -> None:
    command = [sys.executable, str(REPOSITORY / "convert.py"), "--model", "checkpoint"]
    terminal, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    process = subprocess.Popen(
        [*command, "--output", "shown"], cwd=place, stderr=end, stdout=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    assert process.wait() == 0
    shown = os.read(terminal, 100_000).decode()
    os.close(end)
    os.close(terminal)
    assert re.search(r"converting: .*\| [0-9.]+k?/[0-9.]+k? \[00:00<.*B/s\]", shown), shown
