"""Bad input of any command is one line that says what to do, exit code 2, and no change."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import Call
from messages import check_message

PAIR = ("--model", "target", "--draft-model", "draft")
HELLO = ("--prompt", "Hello.")
BATCH = ("batch", "in.txt", "--output", "x")


@pytest.fixture
def here(place: Path, tmp_path: Path) -> Path:
    """A folder with models, and with files that are none."""
    for name in ("weights", "checkpoint", "bert"):
        (tmp_path / name).symlink_to(place / name)
    files = {
        "in.txt": b"The old man.\n", "old": b"precious\nthings\n", "empty.txt": b"\n\n",
        "broken/config.json": b"{", "number/config.json": b'{"prefix": 3}',
    }  # fmt: skip
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (("--nonsense",), "No such option: --nonsense"),
        (("--prompt",), "--prompt"),
        (("--max-tokens", "many"), "'--max-tokens': Input should be a valid integer, got 'many'"),
        (("in.txt",), "No such command 'in.txt' (to give a prompt, use --prompt)"),
        (("--seed", "1", "batch", "x"), "--seed comes before 'batch'"),
        ((*PAIR, "--num-draft", "0", *HELLO), "at least 1 or 'auto', got 0"),
        ((*PAIR, "--max-tokens", "0", *HELLO), "max_tokens must be an integer of at least 1"),
        ((*PAIR, "--temperature", "-1", *HELLO), "temperature must be 0 or at least"),
        ((*PAIR, "--verify", "all", *HELLO), "verify must be 'auto', 'token' or 'block'"),
        ((*PAIR, "--prompt", "-"), "the prompt is empty"),
        (("batch", "in.txt", *PAIR, "--output", "weights"), "weights: Is a directory"),
        (("batch", "in.txt", "--output", "in.txt"), "the output in.txt is the input"),
        (("--model", "absent", *HELLO), "the Hub cannot be reached"),
        (("--model", "broken", *HELLO), "broken/config.json"),
        (("--model", "./in.txt", *HELLO), "./in.txt is a file, expected a folder or a name"),
        (("--model", "number", *HELLO), "number/config.json is 3"),
        (("--model", "bert", *HELLO), "bert: this is a bert (model_type in config.json)"),
        (("--model", "correct-small"), "there is no prompt for correct-small"),
        ((*PAIR, "--draft-model", "other", *HELLO), "123 pieces"),
        ((*PAIR, "--num-draft", "some", *HELLO), "num_draft must be an integer of at least 1 or"),
        ((*PAIR, "--delta", "1.5", *HELLO), "delta must be between 0 and 1, got 1.5"),
        ((*PAIR, "--min-ngram", "0", *HELLO), "min_ngram must be an integer from 1 to 16, got 0"),
        ((*PAIR, "--verify", "block", "--delta", "0.1", *HELLO), "verify 'block' is exact and"),
        (
            ("--model", "target", "--show-drafts", "--num-beams", "2", *HELLO),
            "a beam search has no drafts",
        ),
        ((*PAIR, "--top-k", "-1", *HELLO), "top_k must be an integer of at least 0"),
        ((*PAIR, "--top-p", "0", *HELLO), "top_p must be above 0 and at most 1 (1 is off)"),
        ((*PAIR, "--suppress-tokens", "7,9999", *HELLO), "suppress_tokens has the id 9999"),
        ((*PAIR, "--stop-token-ids", "9999", *HELLO), "stop_token_ids has the id 9999"),
        ((*PAIR, "--logit-bias", "9999=1", *HELLO), "logit_bias has the id 9999"),
        ((*PAIR, "--forced-tokens", "9999", *HELLO), "forced_tokens has the id 9999"),
        ((*PAIR, "--logit-bias", "5", *HELLO), "logit_bias must be ID=BIAS, such as 17=-2.5"),
        ((*PAIR, "--suppress-tokens", "3,x", *HELLO), "'3,x'"),
        ((*BATCH, *PAIR, "--stop-token-ids", ","), "','"),
        ((*PAIR, "--logit-bias", "x=2", *HELLO), "'x=2'"),
        ((*BATCH, *PAIR, "--logit-bias", "3=nan"), "nan"),
        ((*PAIR, "--min-tokens", "-1", *HELLO), "-1"),
        ((*PAIR, "--stop", "", *HELLO), "a stop string must be text that is not empty, got ''"),
        ((*PAIR, "-n", "2", *HELLO), "greedy decoding has only one output"),
        ((*BATCH, *PAIR, "-n", "2"), "greedy decoding has only one output"),
        (("repl", *PAIR, "-n", "2", "--temperature", "1"), "got num_return_sequences 2"),
        (("repl", *PAIR, "--scores"), "a stream has no scores"),
        ((*PAIR, "--seed", "-1", *HELLO), "seed must be an integer from 0 to"),
        ((*PAIR, "--dtype", "int3", *HELLO), "'int3'"),
        ((*PAIR, "--prompt", " "), "the prompt is empty"),
        (("--prompt", "caf\udce9"), "--prompt is not UTF-8: byte 0xe9"),
        (("--prefix", "caf\udce9", *HELLO), "--prefix is not UTF-8: byte 0xe9"),
        (("batch",), "INPUT"),
        (("batch", ""), "the input must be the name of a file, or -, got ''"),
        (("batch", "in.txt", "in.txt"), "in.txt"),
        ((*BATCH, *PAIR, "--batch-size", "0"), "batch_size must be an integer from 1 to 65536"),
        (("batch", "absent.txt"), "absent.txt: No such file or directory"),
        (("batch", "weights"), "weights is a folder, expected a file of prompts"),
        (("batch", "in.txt", *PAIR, "--output", "absent/out"), "absent/out: No such file"),
        (("batch", "in.txt", "--output", "old"), "old is not empty"),
        (("batch", "in.txt", "--output", ""), "the output must be the name of a file, or -"),
        (("batch", "in.txt", "--resume"), "a file, which standard output is not"),
        (("batch", "in.txt", *PAIR, "--resume", "--output", "old"), "old, line 1, is not a record"),
        ((*BATCH, "--resume", "--force"), "--resume keeps OUTPUT"),
        ((*BATCH, "--shard", "3/2"), "a shard must be 1/N to N/N, such as 2/8, got '3/2'"),
        ((*BATCH, "--format", "csv"), "--format must be text or jsonl, got 'csv'"),
        ((*BATCH, "--format", "text", "--field", "a"), "--field 'a' is for --format jsonl"),
        ((*BATCH, *PAIR, "--max-source-length", "1"), "max_source_length must be an integer of"),
        ((*BATCH, "--chat"), "a chat needs a decoder-only model's tokenizer"),
        (("bench", *PAIR, "--prompts", "absent.txt"), "absent.txt: No such file or directory"),
        (("bench", *PAIR, "--prompts", "empty.txt"), "empty.txt has no prompts"),
        (("bench", "--num-draft", "4-2"), "'4-2'"),
        (("bench", "--turns", "0"), "got 0"),
        (("bench", "--acceptance", "2"), "got 2.0"),
        (("bench", "--random", "t5-base"), "'t5-base'"),
        (("bench", "--random", "t5-base:gpt2"), "t5-base has the vocabulary of t5, gpt2 that of"),
        (("bench", "--random", "gpt2-xl:gpt2", "--source", "1000"), "got 1000 and 128"),
        (("bench", "--plot", "absent/plot.png"), "cannot be written to absent/plot.png"),
        (
            ("bench", "--model", "target", "--plot", "a.png"),
            "nothing to plot without a draft model",
        ),
        (("bench", "--plot", "plot.xyz"), "the plot cannot be written to plot.xyz"),
        (("convert",), "convert takes one checkpoint, got 0"),
        (("convert", "checkpoint", "--model", "checkpoint"), "takes one checkpoint, got 2"),
        (("convert", "--model", "checkpoint", "--quantize", "half"), "'half'"),
        (("convert", "--model", "checkpoint", "--quantize", "8", "--output", "x"), "d_model is 24"),
        (("convert", "--model", "checkpoint", "--dtype", "int3"), "'int3'"),
        (("convert", "--model", "checkpoint", "--revision", "v2"), "checkpoint is a folder"),
        (("convert", "--model", "absent"), "no folder 'absent', it is not in the Hub's cache"),
        (("convert", "--model", "in.txt"), "in.txt is a file, expected a folder or a name"),
        (("convert", "--model", "a/b/c"), "'a/b/c'"),
        (("convert", "--model", "weights"), "weights is not a model folder"),
        (("convert", "--model", "checkpoint", "--output", "in.txt"), "in.txt exists"),
        (("convert", "--model", "checkpoint", "--output", "in.txt/out"), "cannot be written: Not"),
        (("convert", "--model", "checkpoint", "--output", "checkpoint"), "is or holds the"),
        (("convert", "--model", "checkpoint", "--output", "weights/target"), "target exists"),
    ],
)
def test_bad_input_is_one_line(
    call: Call, here: Path, arguments: tuple[str, ...], found: str
) -> None:
    before = {path: path.read_bytes() for path in here.glob("*.*") if path.is_file()}
    done = call(*arguments)
    assert (done.code, done.out) == (2, "")
    (line,) = done.err
    assert line.startswith("error: ")
    check_message(line.removeprefix("error: "), found)
    assert not (here / "x").exists() and (here / "old").read_bytes() == b"precious\nthings\n"
    assert all(path.read_bytes() == content for path, content in before.items())


def test_the_message_names_the_help_of_its_command(call: Call) -> None:
    for arguments, command in ((("--no",), ""), (("batch", "--no"), " batch"), (("no",), "")):
        (line,) = call(*arguments).err
        assert line.endswith(f"; see python -m speculative_t5{command} --help")


@pytest.mark.parametrize(
    ("stdin", "found"), [(b"", "the prompt is empty"), (b"caf\xe9", "byte 0xe9 at offset 3")]
)
def test_a_bad_pipe(call: Call, stdin: bytes, found: str) -> None:
    (line,) = call(*PAIR, stdin=stdin).err
    check_message(line.removeprefix("error: "), found)
