"""scripts/decoder_only.py: models of mlx-lm in the loop, against its own decoding."""

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

from speculative_t5 import SpeculativeDecoder

import decoder_only
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from checkpoints import SHAPES, refused, write_causal
from conftest import EOS, GREEDY, POSITIONS, REPOSITORY, VARIED, edit_json, tiny_causal, tiny_draft
from decoder_only import ClampedPositions, DecoderOnlyModel

pytest.importorskip("mlx_lm")
CAUSAL = ("gpt2", "qwen3")
TOKENS = [[5, 17, 260, 3, 99, 1, 42, 8, 8, 310], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]]


@pytest.fixture(scope="module", params=CAUSAL)
def target(request: Any) -> DecoderOnlyModel:
    return tiny_causal(request.param, vocab_size=20, layers=2, seed=VARIED[request.param])


@pytest.fixture(scope="module")
def qwen() -> DecoderOnlyModel:
    """For rules that do not depend on the architecture."""
    return tiny_causal("qwen3", vocab_size=20, layers=2, seed=VARIED["qwen3"])


def prompts(count: int, longest: int = 30) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(2, 20, rng.integers(1, longest)).tolist() for _ in range(count)]


def test_greedy_outputs_are_those_of_mlx_lm(target: DecoderOnlyModel) -> None:
    from mlx_lm.generate import generate_step

    decoder = SpeculativeDecoder(target, tiny_draft(target), num_draft=4)
    for prompt in prompts(2):
        steps = generate_step(mx.array(prompt), target.model, max_tokens=30)
        tokens = (int(token) for token, _ in steps)
        expected = [*itertools.takewhile(lambda token: token != EOS, tokens)]
        for speculative in (True, False):
            out = decoder.generate(prompt, max_tokens=30, speculative=speculative)
            assert out.tokens == expected


def test_steps_of_ragged_rows_give_the_logits_of_whole_sequences(
    target: DecoderOnlyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of long prompts are read in parts."""
    monkeypatch.setattr("decoder_only.PREFILL", 7)
    sequences = prompts(5, longest=20)
    session, contexts = target.start(sequences)
    assert contexts == sequences and session.lengths == [len(s) - 1 for s in sequences]
    rng = np.random.default_rng(1)
    for width in (1, 4, 3):
        new = rng.integers(2, 20, (5, width)).tolist()
        fed = mx.array([[s[-1], *row[:-1]] for s, row in zip(sequences, new, strict=True)])
        logits = np.array(session.step(fed))
        for i, row in enumerate(new):
            whole = target(mx.array([[*sequences[i], *row[:-1]]]))[0, -width:]
            np.testing.assert_allclose(logits[i], np.array(whole), atol=2e-4)
            kept = int(rng.integers(0, width + 1))  # the rest is rejected
            sequences[i] = [*sequences[i], *row[:kept]]
        session.truncate([len(s) - 1 for s in sequences])


def test_rows_are_given_to_waiting_prompts_and_dropped(target: DecoderOnlyModel) -> None:
    first, waiting = prompts(3), [[4], *prompts(6)[4:]]
    session, _ = target.start(first)
    together, alone = session.encode(waiting[:2]), session.encode(waiting[2:])
    assert session.replace([1], together[:1]) == waiting[:1]
    assert session.replace([0, 2], [*alone, *together[1:]]) == [waiting[2], waiting[1]]
    session.select([2, 0])
    rows = [waiting[1], waiting[2]]
    logits = np.array(session.step(mx.array([row[-1:] for row in rows])))[:, 0]
    for row, found in zip(rows, logits, strict=True):
        np.testing.assert_allclose(found, np.array(target(mx.array([row])))[0, -1], atol=2e-4)


def test_outputs_end_where_the_context_does(target: DecoderOnlyModel) -> None:
    """A row near its end has neighbours that are drafted for in full."""
    long = np.random.default_rng(2).integers(2, 20, POSITIONS - 3).tolist()
    for draft in (tiny_draft(target), "lookup", None):
        decoder = SpeculativeDecoder(target, draft, num_draft=7)
        alone = decoder.generate(long, max_tokens=50)
        assert alone.stats.emitted == 4 or alone.finish_reason == "eos"
        batch = decoder.generate_batch([long, [3, 4], [5]], max_tokens=20)
        assert batch[0].tokens == alone.tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("lookup", [False, True])
def test_a_draft_of_a_shorter_context_stops_drafting_at_its_end(
    qwen: DecoderOnlyModel, lookup: bool, temperature: float
) -> None:
    """Neighbours do not notice, nor do those for which lookups follow the drafts."""
    limit = 24
    draft = DecoderOnlyModel(tiny_draft(qwen).model, eos_token_id=1, max_context=limit)
    endless = DecoderOnlyModel(qwen.model, eos_token_id=0, max_context=POSITIONS)
    decoder = SpeculativeDecoder(endless, draft, num_draft=5, lookup=lookup)
    rows, runs = [[2, 3, 4, 5] * 5, [2, 3, 4, 5] * 2, [6, 7] * 10, [8] * (limit + 3)], []
    options = {"max_tokens": 40, "temperature": temperature}
    for batch_size in (1, 2, 4):
        outputs = decoder.generate_batch(rows, batch_size=batch_size, **options)
        runs.append([(o.tokens, o.stats.num_drafted, o.stats.num_accepted) for o in outputs])
    assert runs == runs[:1] * 3
    for prompt, (_, *counts) in zip(rows, runs[0], strict=True):
        length = len(prompt)
        for drafted, accepted in zip(*counts, strict=True):
            assert lookup or drafted <= max(0, limit - length + 1)
            length += accepted + 1
    assert sum(runs[0][1][1]) > 0
    if temperature == 0:
        plain = decoder.generate_batch(rows, speculative=False, **options)
        assert [o.tokens for o in plain] == [tokens for tokens, *_ in runs[0]]


def test_a_draft_gives_no_probabilities_beyond_its_context(qwen: DecoderOnlyModel) -> None:
    draft = DecoderOnlyModel(qwen.model, eos_token_id=1, max_context=12)
    endless = DecoderOnlyModel(qwen.model, eos_token_id=99, max_context=POSITIONS)
    out = SpeculativeDecoder(endless, draft).generate([3] * 9, max_tokens=8, probabilities=True)
    known = [q is not None for _, q in out.probabilities or ()]
    assert known == [True] * 4 + [False] * 4


def test_each_of_several_eos_tokens_ends_an_output(qwen: DecoderOnlyModel) -> None:
    prompt = prompts(3)[2]
    alone = SpeculativeDecoder(qwen).generate(prompt, max_tokens=40)
    end = alone.tokens[-1]
    both = DecoderOnlyModel(qwen.model, eos_token_id=1, extra_eos_ids=[end], max_context=POSITIONS)
    assert both.info.eos_token_ids == {1, end}
    out = SpeculativeDecoder(both, tiny_draft(qwen)).generate(prompt, max_tokens=40)
    assert out.finish_reason == "eos"
    assert out.tokens == alone.tokens[: alone.tokens.index(end)]


def test_lookups_search_prompt_and_output_as_one_text(qwen: DecoderOnlyModel) -> None:
    decoder = SpeculativeDecoder(qwen, "lookup", num_draft=3)
    drafter = decoder.engine.plan().drafter
    drafter.start([[2, 3, 4, 5, 6, 3]])
    assert drafter.propose([[2, 3, 4, 5, 6, 3]], 3, GREEDY, None).tokens.tolist() == [[4, 5, 6]]
    # The latest of the longest matches, wherever it is.
    assert drafter.propose([[2, 3, 4, 5, 6, 3, 7, 3]], 3, GREEDY, None).tokens.tolist() == [[7, 3]]


def test_a_cache_that_cannot_be_rewound_is_refused() -> None:
    from mlx_lm.models.cache import KVCache, RotatingKVCache

    model = tiny_causal("qwen3").model
    model.make_cache = lambda: [KVCache(), RotatingKVCache(8)]  # type: ignore[attr-defined]
    with refused("in RotatingKVCache, which cannot be rewound"):
        DecoderOnlyModel(model, eos_token_id=1, max_context=8)


def test_positions_beyond_a_learned_table_read_its_last_row() -> None:
    plain = nn.Embedding(6, 32)
    for table in (plain, plain.to_quantized(32, 8)):
        rows = ClampedPositions(table)(mx.array([[0, 5], [6, 99]]))
        assert mx.array_equal(rows.reshape(4, 32), table(mx.array([0, 5, 5, 5])))


@pytest.mark.parametrize("kind", SHAPES)
def test_logits_match_transformers(kind: str, tmp_path: Path) -> None:
    """Of whole sequences, and of a session's steps."""
    import torch

    reference = write_causal(tmp_path, kind)
    with torch.no_grad():
        expected = reference(torch.tensor(TOKENS)).logits.numpy()
    model, tokenizer = decoder_only.load(str(tmp_path))
    session, _ = model.start([row[:4] for row in TOKENS])
    steps = [session.step(mx.array([row[a:b] for row in TOKENS])) for a, b in ((3, 6), (6, 10))]
    for ours, theirs in (
        (model(mx.array(TOKENS)), expected),
        (mx.concatenate(steps, axis=1), expected[:, 3:]),
    ):
        np.testing.assert_allclose(np.array(ours), theirs, atol=1e-4, rtol=1e-4)
    assert model.info.max_context == 64 and model.info.eos_token_ids == {0}
    assert model.info.vocabulary == tokenizer.vocabulary


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A target, a draft, one with another tokenizer, and one without a chat template."""
    root = tmp_path_factory.mktemp("models")
    for name, layers in (("target", 2), ("draft", 1), ("other", 1), ("plain", 1)):
        write_causal(root / name, num_hidden_layers=layers)
    edit_json(root / "plain" / "tokenizer_config.json", chat_template=None)
    path = root / "other" / "tokenizer.json"
    path.write_text(path.read_text().replace("<|user|>", "<|human|>"))
    return {path.name: str(path) for path in root.iterdir()}


def run(*arguments: str, model: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, str(REPOSITORY / "scripts" / "decoder_only.py"), "--model", model]
    return subprocess.run([*program, *arguments], capture_output=True, text=True, check=False)


def test_the_program_continues_or_answers(folders: dict[str, str]) -> None:
    model, tokenizer = decoder_only.load(folders["target"])
    draft, _ = decoder_only.load(folders["draft"])
    decoder = SpeculativeDecoder(model, draft, tokenizer, num_draft=4)
    expected = decoder.generate("He go", max_tokens=12)
    chat = tokenizer.encode("<|user|>He go\n<|assistant|>")
    assert tokenizer.encode_chat("He go") == chat
    options = ("--draft-model", folders["draft"], "--num-draft", "4", "--max-tokens", "12")
    done = run(*options, "--prompt", "He go", model=folders["target"])
    assert done.stdout == expected.text and "12 tokens" in done.stderr.splitlines()[-1]
    sampled: Any = {"max_tokens": 12, "temperature": 0.7}
    done = run(
        *options, "--prompt", "He go", "--chat", "--temperature", "0.7", model=folders["target"]
    )
    assert done.stdout == decoder.generate(chat, **sampled).text
    for batch_size in (1, 3):
        rows = decoder.generate_batch(["He go", chat, "She"], batch_size=batch_size, **sampled)
        assert rows[0].tokens == decoder.generate("He go", **sampled).tokens


def test_what_cannot_run_is_refused_in_a_line(
    folders: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def say(model: str, prompt: str = "He go", **options: Any) -> str:
        with pytest.raises(SystemExit) as error:
            decoder_only.main(folders.get(model, model), prompt, **options)
        return str(error.value)

    assert say("target", draft_model=folders["other"]).startswith(
        "error: target and draft must share a tokenizer"
    )
    assert "tokens, more than the 64 that the model is made for" in say("target", "He go " * 60)
    assert "has no chat template" in say("plain", chat=True)
    assert "num_draft must be an integer of at least 1" in say("target", num_draft=0)
    assert "mlx-lm cannot load absent/model (" in say("absent/model")
    monkeypatch.setitem(sys.modules, "mlx_lm", None)
    with refused(": run pip install mlx-lm$"):
        decoder_only.load(folders["target"])
    assert not capsys.readouterr().out


def test_a_text_begins_with_one_begin_token(folders: dict[str, str], tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    write_causal(tmp_path)
    backend = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.post_processor = TemplateProcessing(
        single="<|user|> $A", pair="<|user|> $A $B", special_tokens=[("<|user|>", 1)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    edit_json(tmp_path / "tokenizer_config.json", bos_token="<|user|>")
    _, tokenizer = decoder_only.load(str(tmp_path))
    plain = tokenizer.encode("He go")
    assert plain[0] == 1 and plain.count(1) == 1
    assert tokenizer.encode("<|user|>He go") == plain
    assert tokenizer.decode([*plain, 310]) == "He go"


def test_each_end_that_a_folder_names_ends_outputs(tmp_path: Path) -> None:
    write_causal(tmp_path)
    edit_json(tmp_path / "generation_config.json", eos_token_id=[7, 0])
    assert decoder_only.load(str(tmp_path))[0].info.eos_token_ids == {0, 7}
