"""Decoder-only pairs by the commands and the server, as their users type them."""

import json
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from speculative_t5 import SpeculativeDecoder
from speculative_t5.checkpoints import ModelFolder, read_tokenizer
from speculative_t5.serve import Models, Service
from speculative_t5.serve import Served as Model

import pytest
from checkpoints import POST_NORM, write_causal
from commands import Call
from conftest import edit_json
from serving import Served, serving, wait_until

pytest.importorskip("mlx_lm")
PAIRS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # kind, target's and draft's
    "gpt2-xl": ("gpt2", {}, {"n_layer": 1}),
    "opt-350m": ("opt", POST_NORM, {"num_hidden_layers": 1}),
    "Qwen3-4B": ("qwen3", {}, {"num_hidden_layers": 1}),
}
POSITIONS = 128
DRAFTS = {"gpt2-xl": "gpt2", "opt-350m": "opt-125m", "Qwen3-4B": "Qwen3-0.6B"}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random models in a folder, by the names of published ones."""
    root = tmp_path_factory.mktemp("pairs")
    for name, (kind, large, small) in PAIRS.items():
        size = {"n_positions" if kind == "gpt2" else "max_position_embeddings": POSITIONS}
        write_causal(root / name, kind, **size | large)
        write_causal(root / DRAFTS[name], kind, seed=1, **size | small)
    path = root / "opt-125m" / "tokenizer.json"
    shutil.copytree(root / "opt-125m", root / "other")
    (root / "other" / "tokenizer.json").write_text(path.read_text().replace("<|user|>", "<|he|>"))
    write_causal(root / "plain")
    edit_json(root / "plain" / "tokenizer_config.json", chat_template=None)
    return root


@pytest.fixture(autouse=True)
def weights(pairs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECULATIVE_T5_WEIGHTS", str(pairs))


def decoder_of(pairs: Path, name: str, **options: Any) -> SpeculativeDecoder:
    return SpeculativeDecoder.from_pretrained(pairs / name, pairs / DRAFTS[name], **options)


def test_options_have_the_names_of_other_programs(call: Call, pairs: Path) -> None:
    """Underscores are hyphens; --gamma and --max_new_tokens are names of other programs."""
    given = ("--model", "gpt2-xl", "--draft_model", "gpt2", "--prompt", "He go")
    decoder = decoder_of(pairs, "gpt2-xl", num_draft=5)
    for temperature in (0.3, 0.0):
        done = call(*given, "--temperature", str(temperature), "--gamma", "5", "--max_new_tokens=9")
        assert done.code == 0, done.err
        out = decoder.generate("He go", max_tokens=9, temperature=temperature)
        assert done.out == f"{out.text}\n"
        same = call(*given, "--temperature", str(temperature), "--num-draft=5", "--max-tokens", "9")
        assert same.out == done.out
    shown = call("--help").out
    assert "gamma" not in shown and "draft_model" not in shown


def test_the_footer_says_where_an_output_was_cut(call: Call) -> None:
    given = ("--model", "gpt2-xl", "--prompt", "He go")
    ends = {"9": "at --max-tokens 9", "500": "where the model's context ends"}
    for search in ((), ("--num-beams", "2")):
        for tokens, where in ends.items():
            done = call(*given, *search, "--min-tokens", tokens, "--max-tokens", tokens)
            assert done.err[-1].endswith(f" - cut {where}")


def test_a_sampled_pair_by_a_rule_for_tokens(call: Call, pairs: Path) -> None:
    done = call(
        *("--model", "opt-350m", "--draft-model", "opt-125m", "--verify", "token"),
        *("--temperature", "1", "--top-k", "20", "--seed", "3", "--prompt", "She is"),
    )
    options: Any = {"temperature": 1.0, "top_k": 20, "seed": 3}
    out = decoder_of(pairs, "opt-350m", verify="token").generate("She is", **options)
    assert done.code == 0 and done.out == f"{out.text}\n"
    assert any("accepted" in line for line in done.err)


def test_a_batch_of_ragged_prompts_gives_ids_alpha_and_statistics(pairs: Path) -> None:
    decoder = decoder_of(pairs, "Qwen3-4B", num_draft=4, verify="token")
    prompts = ["He", "She go to the", "It is a long, long way that", "A"]
    options: Any = {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "max_tokens": 20}
    outputs = decoder.generate_batch(prompts, batch_size=3, **options)
    for index, (prompt, out) in enumerate(zip(prompts, outputs, strict=True)):
        assert out.tokens and 0 <= out.stats.acceptance_rate <= 1 and out.stats.rounds > 0
        if index == 0:
            assert out.tokens == decoder.generate(prompt, **options).tokens


def test_a_file_of_prompts(call: Call, pairs: Path) -> None:
    done = call("batch", "-", "--model", "Qwen3-4B", "--max-tokens", "8", stdin="He go\nShe\n")
    assert done.code == 0
    decoder = SpeculativeDecoder.from_pretrained(pairs / "Qwen3-4B")
    texts = [decoder.generate(text, max_tokens=8).text for text in ("He go", "She")]
    assert [record["text"] for record in done.records] == texts


def test_prompts_one_after_another(call: Call, pairs: Path) -> None:
    decoder = SpeculativeDecoder.from_pretrained(pairs / "gpt2-xl", "lookup")
    done = call(
        *("repl", "--model", "gpt2-xl", "--draft-model", "lookup", "--max-tokens", "6"),
        stdin="He go\nShe\n",
    )
    assert done.code == 0
    for text in ("He go", "She"):
        assert decoder.generate(text, max_tokens=6).text in done.out


def test_a_table_of_draft_lengths(call: Call) -> None:
    done = call(
        *("bench", "--model", "gpt2-xl", "--draft-model", "gpt2", "--num-draft", "1-3", "--json"),
        *("--turns", "1", "--max-tokens", "12"),
    )
    assert done.code == 0, done.err
    rows = {row["name"]: row for row in json.loads(done.out)["rows"]}
    assert [*rows] == ["regular", "K = 1", "K = 2", "K = 3", "auto", "lookup"]
    assert all(row["same"] == row["outputs"] for row in rows.values())
    assert rows["K = 3"]["forwards"] >= 1 and rows["K = 3"]["speedup"] > 0


def test_what_does_not_fit_is_refused_in_a_line(call: Call, pairs: Path) -> None:
    prompt = ("--prompt", "He go")
    for arguments, message in (
        (("--model", "gpt2-xl", "--draft-model", "other", *prompt), "must share a tokenizer"),
        (("--model", "gpt2-xl", "--prompt", "He go " * 99), "more than the 128 that the model"),
        (("--model", "plain", "--chat", *prompt), "has no chat template"),
        (("--model", "gpt2-xl", "--truncate", *prompt), "which a decoder-only model goes on from"),
        (("convert", str(pairs / "gpt2-xl"), "-o", "new"), "quantize it with mlx_lm.convert"),
        (("convert", str(pairs / "gpt2-xl"), "--inspect"), "which seems to be a decoder-only"),
        (("doctor", "--only", "greedy", "--model", "gpt2-xl"), "which seems to be a decoder-only"),
        (
            ("distill", "--data", "prompts.txt", "--model", "gpt2-xl"),
            "distill makes drafts that share",
        ),
    ):
        Path("prompts.txt").write_text("He go\n")
        done = call(*arguments)
        assert any(message in line for line in done.err), (arguments, done)
        done.check_error("")


@pytest.fixture(scope="module")
def served(pairs: Path) -> Iterator[Served]:
    def make() -> SpeculativeDecoder:
        return decoder_of(pairs, "Qwen3-4B")

    service = partial(Service, make, batch_size=4, max_queue=8)
    model = Model("Qwen3-4B", service, lambda: read_tokenizer(ModelFolder(pairs / "Qwen3-4B")))
    with serving(Models([model])) as running:
        wait_until(lambda: running.client.get("/health").status_code == 200)
        yield running


def test_a_server_continues_prompts_and_answers_chats(pairs: Path, served: Served) -> None:
    decoder = decoder_of(pairs, "Qwen3-4B")
    options: Any = {"max_tokens": 8, "temperature": 0}
    found = served.post(prompt="He go", **options).json()["choices"][0]
    assert found["text"] == decoder.generate("He go", **options).text
    said: Any = [{"role": "user", "content": "He go"}]
    answer = served.post("/v1/chat/completions", messages=said, **options).json()
    content = answer["choices"][0]["message"]["content"]
    assert content == decoder.generate(said, **options).text != found["text"]
    events = served.events(prompt="He go", **options)
    assert (
        "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1]) == found["text"]
    )
