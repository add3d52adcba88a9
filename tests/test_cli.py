"""The commands as a user runs them: text, JSON, models, help."""

import ast
import re
import shutil
import subprocess
import sys
import time
from functools import cache
from importlib import import_module, metadata
from pathlib import Path

from speculative_t5 import __version__
from speculative_t5.cli import generate
from speculative_t5.cli.main import COMMANDS
from speculative_t5.documents import splitting
from speculative_t5.kernels import native_parts

import pytest
from commands import Call, in_a_shell, on_a_terminal
from conftest import REPOSITORY

# Outputs of commands are compared with those of others.
pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("loaded_once")]
PAIR = ("--model", "target", "--draft-model", "draft", "--max-tokens", "12")
OLD_MAN = (*PAIR, "--prompt", "The old man.")
ACCEPTED, BONUS = "\x1b[32m", "\x1b[4;36m"


@pytest.fixture(scope="module")
def here(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the models and the checkpoint of `place`."""
    here = tmp_path_factory.mktemp("cli")
    (here / "weights").mkdir()
    for name in ("weights/target", "weights/draft", "checkpoint"):
        (here / name).symlink_to(place / name)
    return here


def test_text_goes_to_standard_output_and_statistics_to_standard_error(call: Call) -> None:
    done = call(*OLD_MAN, "--show-drafts")
    assert done.code == 0, done.err
    result = call(*OLD_MAN, "--json")
    assert done.out == result.records[0]["text"] + "\n" and not result.err
    assert set(result.records[0]) == {"text", "tokens", "finish_reason", "stats"}
    first, again = (call(*OLD_MAN, "--json", "--temperature", "1").records[0] for _ in range(2))
    assert first["stats"]["drafted"] > 0 and again["tokens"] == first["tokens"]
    (footer,) = done.err
    counts = r"\d+ tok/s - 12 tokens - \d+ % of drafts accepted - \d\.\d tokens per round"
    assert re.fullmatch(f"{counts} - cut at --max-tokens 12", footer)


def test_a_terminal_shows_drafts_in_colour(call: Call, here: Path) -> None:
    command = ("-m", "speculative_t5", *OLD_MAN)
    meanings, *text, _ = on_a_terminal(here, *command, "--show-drafts").splitlines()
    assert f"{ACCEPTED}accepted" in meanings and f"{BONUS}bonus" in meanings
    assert any(ACCEPTED in line for line in text) and any(BONUS in line for line in text)
    plain = call(*OLD_MAN).out
    assert re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(text)) + "\n" == plain
    assert "\x1b" not in plain and "accepted drafted" not in plain


def test_the_version_names_the_parts(call: Call) -> None:
    versions, *parts = call("--version").out.splitlines()
    assert versions == f"speculative_t5 {__version__}, mlx {metadata.version('mlx')}"
    assert parts == [f"{part}: {state}" for part, state in native_parts().items()]


def test_plain_decoding_and_lookups_give_the_same_tokens(call: Call) -> None:
    options = (("--regular-decode", "--lookup"), ("--draft-model", "lookup"), ("--lookup",))
    prompt = ("--prompt", "I like this like this.", "--json")  # to the shipped pair
    plain, alone, both = (call(*prompt, *option).records[0] for option in options)
    assert alone["tokens"] == both["tokens"] == plain["tokens"]
    assert plain["stats"]["drafted"] == 0 < min(alone["stats"]["drafted"], both["stats"]["drafted"])


def test_the_prompt_may_come_from_standard_input(call: Call) -> None:
    piped = call(*PAIR, stdin="The old man.\n")
    dashed = call(*PAIR, "--prompt", "-", stdin="The old man.\n")
    assert piped.out == dashed.out == call(*OLD_MAN).out != ""


@pytest.mark.parametrize(
    ("options", "is_guarded"),
    [
        ((), True),
        (("--regular-decode",), True),
        (("--no-guard",), False),
        (("--show-drafts",), False),
        (("--max-tokens", "60"), False),
        (("--max-tokens", "256"), False),
        (("--guard",), True),
        (("--temperature", "0.01"), False),
        (("--delta", "0.01"), False),
        (("--prefix", "correct: "), False),
        (("--truncate",), False),
    ],
)
def test_a_text_is_corrected_as_correct_does_it_unless_asked_otherwise(
    call: Call, options: tuple[str, ...], is_guarded: bool
) -> None:
    text = "He  go   home.\n"  # whose blanks the model does not keep
    own = call("--prompt", text.strip(), "--json").records[0]["text"] + "\n"
    done = call("--prompt", text.strip(), *options)
    assert done.code == 0 and re.search(r"\d+ tok/s", done.err[-1])
    guarded = call("correct", text.strip()).out
    assert guarded == text.replace("go", "goes") != own
    assert done.out == (guarded if is_guarded else own)
    if is_guarded:
        assert call("--prompt", f"correct: {text.strip()}", *options).out == guarded


def test_reading_what_tells_languages_apart_is_no_part_of_the_rate(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, clock, passed = splitting.identifier(), time.perf_counter, [0.0]

    def read_slowly() -> object:
        passed[0] += 1000
        return read

    monkeypatch.setattr(splitting, "_read_identifier", cache(read_slowly))
    monkeypatch.setattr(generate, "read_identifier_ahead", lambda: None)
    monkeypatch.setattr(generate.time, "perf_counter", lambda: clock() + passed[0])
    done = call("--prompt", "He go home.")
    assert passed == [1000] and int(done.err[-1].split()[0].replace(",", "")) > 0, done.err


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (("--json",), "and --json asks for its own"),
        (("--max-tokens", "256"), "and --max-tokens asks for its own"),
        (("--prefix", "correct: "), "and --prefix asks for its own"),
    ],
)
def test_a_guard_that_would_do_nothing_is_refused(
    call: Call, options: tuple[str, ...], found: str
) -> None:
    call("--prompt", "He go home.", "--guard", *options).check_error(found)


def test_standard_streams_may_be_closed(call: Call) -> None:
    done = call(*OLD_MAN, "--show-drafts", closed="stdout")
    assert done.code == 0 and "12 tokens" in done.err[0]
    call("--prompt", "-", "--model", "target", closed="stdin").check_error("the prompt is empty")
    assert call("repl", "--model", "target", closed="stdin").out == ""


@pytest.mark.parametrize("options", ["", "--num-beams 2"])
def test_a_pipe_gets_statistics_last_and_reads_utf8_in_any_locale(here: Path, options: str) -> None:
    environment = "unset FORCE_COLOR PYTHONUNBUFFERED; LC_ALL=C"
    spoken = f"$P --model target --max-tokens 4 --prompt 'Caf\u00e9.' {options}"
    done = in_a_shell(here, f"{environment} {spoken} 2>&1")
    assert done.returncode == 0, done.stdout
    assert re.match(r"[0-9,]+ tok/s - 4 tokens", done.stdout.decode().splitlines()[-1])


def test_models_lists_what_can_be_loaded_and_what_cannot(call: Call, here: Path) -> None:
    torn = here / "weights" / "torn"
    torn.mkdir()
    (torn / "weights.npz").write_bytes(b"no archive")
    (torn / "config.json").write_text("{}")
    found = {Path(record["folder"]).name: record for record in call("models", "--json").records}
    lines = call("models").out.splitlines()
    shutil.rmtree(torn)
    base, target = (found[name] for name in ("correct-base", "target"))
    assert target["family"] == "T5 v1.0" and target["stored"] == ["float32"]
    assert base["drafts"] == ["correct-draft", "correct-small"]
    assert found["correct-draft"]["draft_for"] == "correct-base"
    assert target["error"] is None and found["torn"]["error"]
    because = "the CPU's libraries have no faster type"
    assert base["default_type"] == {"dtype": "float32", "reason": because}
    assert found["correct-draft"]["default_type"] is None and f"float32: {because}" in lines
    assert any(line.startswith("correct-base") and "26.1 M" in line for line in lines)
    assert any(line.startswith("torn") and "cannot be loaded: " in line for line in lines)


BEAMS = {"--scores", "--num-beams", "--length-penalty", "--early-stopping"}


def test_help_groups_options(call: Call) -> None:
    text = call("--help").out
    assert "correct-base" in text and "[default: 256]" in text
    groups = ["Models", "Prompts", "Drafting", "Sampling", "Constraints", "Beam search", "Output"]
    assert set(re.findall(r"─ ([\w ]+) ─", text)) == {*groups, "Options", "Commands"}
    assert "Usage: python -m speculative_t5 convert " in call("convert", "--help").out


@pytest.mark.parametrize(
    ("command", "missing"),
    [
        ("batch", set()),
        ("repl", BEAMS | {"--num-return-sequences", "--regular-decode"}),
        ("serve", BEAMS),
    ],
)
def test_help_shows_only_what_a_command_takes(command: str, missing: set[str], call: Call) -> None:
    text = call(command, "-h").out
    assert f"Usage: python -m speculative_t5 {command} " in text
    shown = set(re.findall(r"--[\w-]+", text))
    all_of_them = BEAMS | {"--num-return-sequences", "--regular-decode", "--max-tokens"}
    assert all_of_them & shown == all_of_them - missing
    assert ("Beam search" in text) == (not missing)
    if missing:
        assert "scores" in call(command, "--scores").err[-1], "it is refused all the same"


def test_help_of_the_server_has_words_of_its_own(call: Call) -> None:
    text = call("serve", "-h").out
    seed = " ".join(text.replace("│", " ").partition("--seed")[2].split())
    assert seed.startswith("<int> Seed of requests that give none. [default: (a new one for each")


def test_only_an_installed_program_sets_up_completion(call: Call) -> None:
    assert "--install-completion" not in call("--help").out
    installed = call("--help", program="speculative-t5").out
    assert "Usage: speculative-t5 [OPTIONS]" in installed and "--install-completion" in installed


@pytest.mark.parametrize(
    ("arguments", "called"), [(["--help"], set()), (["models"], {"cli.models"})]
)
def test_only_the_command_that_is_called_is_imported(
    arguments: list[str], called: set[str]
) -> None:
    code = f"""
import sys
from speculative_t5.cli import main
sys.argv[1:] = {arguments}
try:
    main()
finally:
    print([name.partition(".")[2] for name in sys.modules if name.startswith("speculative_t5.")])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = set(ast.literal_eval(done.stdout.splitlines()[-1]))
    others = {f"cli.{name}" for name in (*COMMANDS, "job")} | {
        "measure",
        "distill",
        "doctor",
        "serve",
    }
    assert found & others == called


def test_help_of_all_commands_says_what_that_of_each_begins_with(call: Call) -> None:
    for name, summary in COMMANDS.items():
        function = getattr(import_module(f"speculative_t5.cli.{name}"), name)
        first, *_ = function.__doc__.split("\n\n")
        assert " ".join(first.split()) == summary
        assert summary in " ".join(call(name, "--help").out.split())


def test_a_shell_completes(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_SPECULATIVE_T5_COMPLETE", "complete_bash")
    for typed, offered in (
        ("speculative-t5 --model corr", {"correct-base", "correct-small"}),
        ("speculative-t5 --verify ", {"auto", "coupled", "token", "block"}),
        ("speculative-t5 mod", {"models"}),
        ("speculative-t5 batch --draft-model l", {"lookup"}),
    ):
        monkeypatch.setenv("COMP_WORDS", typed)
        monkeypatch.setenv("COMP_CWORD", str(len(typed.split(" ")) - 1))
        assert set(call(program="speculative-t5").out.split()) == offered


def test_convert_writes_under_weights_and_says_so(call: Call, here: Path) -> None:
    shown = on_a_terminal(
        here, str(REPOSITORY / "convert.py"), "--model", "checkpoint", "--dtype", "float16"
    )
    assert re.search(r"converting: .*\| [0-9.]+k?/[0-9.]+k? \[00:00<.*B/s\]", shown), shown
    assert shown.splitlines()[-1].startswith("weights/checkpoint (")
    # The name means the conversion, although a folder of that name is in the current one.
    assert "no draft" in call("--model", "checkpoint", "--prompt", "Hello.").err[0]


def test_inspecting_prints_and_writes_nothing(call: Call, here: Path) -> None:
    """By the command and by the script, which are one."""
    before = sorted(here.rglob("*"))
    done = call("--model", "checkpoint", "--inspect", program="convert.py")
    for part in ("checkpoint\n", "family      T5 v1.0", "stored as float32", "drafts"):
        assert part in done.out, done.out
    assert done == call("convert", "checkpoint", "--inspect")
    assert not done.err and sorted(here.rglob("*")) == before


def test_a_decoder_only_model_is_refused_in_a_line(call: Call, here: Path) -> None:
    folder = here / "gpt2"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "gpt2", "n_embd": 24}')
    (folder / "model.safetensors").write_bytes(b"not read")
    message = "gpt2: this is a gpt2 (model_type in config.json), which seems to be a decoder-only"
    for arguments in (
        ("convert", "gpt2"),
        ("convert", "gpt2", "--inspect"),
        ("doctor", "--only", "greedy", "--model", "gpt2"),
    ):
        done = call(*arguments, stdin="x\n")
        done.check_error(message)
        assert done.err[0].endswith("use it as it is, or quantize it with mlx_lm.convert")
    shutil.rmtree(folder)


def test_a_t5_takes_no_chat(call: Call) -> None:
    done = call("--model", "correct-small", "--chat", "--prompt", "x")
    done.check_error("a chat needs a tokenizer with a chat template")
