"""Training the decoder-only pair, and correct-base further: what is read, learned and written."""

import itertools
import json
import lzma
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from speculative_t5 import load
from speculative_t5.checkpoints import convert

import documents
import further_training
import mlx.core as mx
import numpy as np
import pytest
import torch
import train_causal
import train_correct
import train_gpt2
from conftest import REPOSITORY, edit_json, write_checkpoint
from families import TEXT
from further_training import Run, mix, start, train_further
from mlx.utils import tree_flatten
from train_causal import END, HELD_OUT_FILE
from train_correct import Example

SIZES = train_gpt2.SIZES
NARROW = {"n_embd": 32, "n_layer": 2, "n_head": 2}
Corpus = tuple[Any, np.ndarray, np.ndarray]  # tokenizer, ids to train on, ids held out
PAGES = [REPOSITORY / "docs" / name for name in ("design.md", "how-it-works.md", "exactness.md")]


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return documents.read_documents(PAGES)


@pytest.fixture(scope="module")
def prepared(texts: list[str]) -> Corpus:
    return train_causal.prepare(texts)[:3]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> Path:
    """A pair after a few steps."""
    folder = tmp_path_factory.mktemp("pair") / "new" / "pair"
    train_causal.train_pair(texts, folder, 4, seed=0)
    return folder


@pytest.fixture(scope="module")
def small_gpt2(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> Path:
    """A pair of GPT-2s with few weights, after two steps."""
    folder = tmp_path_factory.mktemp("gpt2") / "pair"
    train_gpt2.train_pair(texts, folder, 2, 0, pieces=512, sizes=dict.fromkeys(SIZES, NARROW))
    return folder


@pytest.mark.parametrize("name", ["pair", "small_gpt2"])
def test_transformers_reads_a_folder_and_has_the_same_logits(
    name: str, texts: list[str], request: pytest.FixtureRequest
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = request.getfixturevalue(name) / "target"
    reference = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = load(folder)[0]
    ids = tokenizer.encode(texts[0][:400], add_special_tokens=False)
    assert tokenizer.decode(ids) == texts[0][:400]
    assert {tokenizer.eos_token_id} == model.info.eos_token_ids == {reference.config.eos_token_id}
    with torch.inference_mode():
        expected = reference(torch.tensor([ids])).logits.numpy()
    assert expected.std() > 0.1
    np.testing.assert_allclose(np.array(model(mx.array([ids]))), expected, atol=1e-4)


def test_pair_shares_a_tokenizer_and_keeps_the_end_of_the_text(
    pair: Path, texts: list[str]
) -> None:
    assert sorted(path.name for path in pair.iterdir()) == ["draft", HELD_OUT_FILE, "target"]
    assert [path.name for path in pair.parent.iterdir()] == ["pair"]
    ours, other = ((pair / name / "tokenizer.json").read_bytes() for name in ("target", "draft"))
    assert ours == other
    assert texts[-1].endswith((pair / HELD_OUT_FILE).read_text(encoding="utf-8"))
    config = json.loads((pair / "target" / "config.json").read_text())
    assert config["vocab_size"] == train_causal.PIECES


@pytest.mark.cpu  # a GPU adds up gradients in any order
def test_weights_depend_on_the_seed_alone(prepared: Corpus) -> None:
    """And training lowers the loss on the text held out."""
    found = []
    for seed in (0, 0, 1):
        model, _ = train_causal.make_model("draft", prepared[0], seed)
        train_causal.train(model, prepared[1], 3, seed)
        found.append([weight for _, weight in tree_flatten(model.parameters())])
    assert all(mx.array_equal(a, b) for a, b in zip(found[0], found[1], strict=True))
    assert not mx.array_equal(found[0][0], found[2][0])
    before = train_causal.mean_loss(model, prepared[2])
    train_causal.train(model, prepared[1], 15, seed=0)
    assert train_causal.mean_loss(model, prepared[2]) < before - 0.5


def test_a_pair_of_gpt2s_that_was_stopped_goes_on(
    tmp_path: Path, texts: list[str], small_gpt2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the weights of one that was not."""
    monkeypatch.setattr(train_gpt2, "REPORT", 1)
    loss, seen = train_gpt2.model_loss, []

    def stop(*given: Any) -> Any:
        seen.append(given)
        if len(seen) == 2:
            raise KeyboardInterrupt
        return loss(*given)

    def train() -> None:
        sizes = dict.fromkeys(SIZES, NARROW)
        train_gpt2.train_pair(texts, tmp_path, 2, 0, pieces=512, sizes=sizes)

    monkeypatch.setattr(train_gpt2, "model_loss", stop)
    with pytest.raises(KeyboardInterrupt):
        train()
    train()
    found, expected = (
        (folder / "target" / "model.safetensors").read_bytes() for folder in (tmp_path, small_gpt2)
    )
    assert found == expected
    assert not [*tmp_path.rglob(train_gpt2.PARTIAL)]


def test_end_is_held_out_and_cut_at_a_line() -> None:
    texts = ["a\nb\nc\n", "d\n", "e\nfgh\ni\n"]
    assert documents.split(texts, 0.4) == (["a\nb\nc\n", "d\n", "e\n"], ["fgh\ni\n"])
    assert documents.split(texts, 0.7) == (["a\nb\n"], ["c\n", "d\n", "e\nfgh\ni\n"])
    assert documents.split(["abcdefghij"], 0.2) == (["abcdefgh"], ["ij"])


def test_spelling_the_end_does_not_end_a_document(texts: list[str]) -> None:
    tokenizer = train_causal.train_tokenizer(texts)
    end = tokenizer.token_to_id(END)
    ids = train_causal.encode(tokenizer, ["one", f"two {END} three"]).tolist()
    assert ids.count(end) == 2 and ids[-1] == end
    assert tokenizer.decode(ids, skip_special_tokens=True) == f"onetwo {END} three"


def test_unusable_text_and_output_are_refused(tmp_path: Path) -> None:
    for name, content, output, message in (
        ("a.txt.xz", b"no archive", "pair", "error: .*a.txt.xz cannot be read as text"),
        ("a.txt", b"too little\n" * 90, "pair", "to hold out, and each has to be more than 256"),
        ("a.txt", b"", ".", "holds a.txt and is not a pair: choose another"),
        ("a.txt", b"", "a.txt", "is a file and is not a pair: choose another"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(SystemExit, match=message):
            train_causal.main(text=[tmp_path / name], output=tmp_path / output, steps=1, seed=0)
        assert [path.name for path in tmp_path.iterdir()] == [name]
        (tmp_path / name).unlink()


SHAPE = {
    "vocab_size": 128, "d_model": 16, "d_kv": 4, "num_heads": 4, "d_ff": 32, "num_layers": 2,
    "num_decoder_layers": 2, "feed_forward_proj": "relu", "tie_word_embeddings": True,
    "dropout_rate": 0.0,
}  # fmt: skip
EXAMPLE = ([5, 9, 7, 1], [6, 8, 1])


@pytest.fixture
def converted(tmp_path: Path, spiece: bytes) -> Path:
    write_checkpoint(tmp_path / "source", SHAPE, spiece)
    return convert(str(tmp_path / "source"), tmp_path / "converted")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that goes on by a second at each look, and no warm-up."""
    seconds = itertools.count(0.0)
    monkeypatch.setattr(further_training.time, "perf_counter", lambda: next(seconds))
    monkeypatch.setattr(further_training, "WARM_UP", 1)
    monkeypatch.setattr(train_correct, "POOL", 64)


def examples() -> Iterator[Example]:
    return itertools.repeat(EXAMPLE)


def write_pairs(folder: Path) -> Path:
    data = folder / "deu.txt.xz"
    with lzma.open(data, "wt", encoding="utf-8") as file:
        file.writelines(f"{line}\tGuten Tag.\n" for line in [*TEXT, *map(str, range(200))])
    return data


def make_run(model: Any, minutes: float = 0.02, state: dict[str, Any] | None = None) -> Run:
    return Run(model, rate=1e-2, minutes=minutes, autocast=False, state=state)


def test_a_converted_folder_goes_on_with_the_same_logits(converted: Path) -> None:
    ours, _ = load(converted, dtype=mx.float32)
    model = start(converted, 120).eval()
    source, target = [5, 9, 7, 1], [0, 6, 8]
    with torch.no_grad():
        output = model(input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([target]))
    expected = np.array(ours(mx.array([source]), mx.array([target])))
    np.testing.assert_allclose(
        output.logits.numpy(), expected[..., : len(expected[0, 0])], atol=1e-4
    )


def test_rows_of_new_pieces_follow_the_present_ones(converted: Path) -> None:
    before = start(converted, 120).get_input_embeddings().weight
    after = start(converted, 120 + 258).get_input_embeddings().weight
    assert after.shape == (512, 16)  # 378 pieces and 100 sentinels, in 64s
    assert torch.equal(after[:120], before[:120])
    assert len({tuple(row) for row in after[120:378].tolist()}) == 258
    assert after[120:].std() < before[3:120].std()


def test_rate_is_constant_then_falls_to_zero(converted: Path) -> None:
    run = make_run(start(converted, 120), minutes=10)
    run.step = 1000
    seconds = [0, 300, 450, 525, 600, 700]
    assert [run.rate_at(s) for s in seconds] == pytest.approx([0.01, 0.01, 0.01, 0.005, 0, 0])
    run.step = 9
    assert run.rate_at(0) == pytest.approx(0.001)


def test_a_run_ends_by_the_clock_and_resumes(
    converted: Path, tmp_path: Path, clock: None, capsys: Any
) -> None:
    checkpoint, model = tmp_path / "model.pt", start(converted, 120)
    run = make_run(model, minutes=0.5)
    run.train(examples, {"kind": [EXAMPLE]}, checkpoint, every=0.1, batch=64)
    state = torch.load(checkpoint)
    assert state["step"] == run.step == 28
    assert capsys.readouterr().out.count("held-out loss: kind ") == 5
    longer = make_run(start(converted, 120), minutes=0.6, state=state)
    assert longer.step == 28
    longer.train(examples, {}, checkpoint, every=0.1, batch=64)
    assert torch.load(checkpoint)["step"] == 28 + 5


def test_a_compiled_model_is_the_one_that_is_trained(
    converted: Path, tmp_path: Path, clock: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held-out losses are of the model itself, which would be compiled once more for them."""
    calls = []

    def compiled(model: Any, *, dynamic: bool) -> Any:
        assert dynamic

        def call(**given: Any) -> Any:
            calls.append(torch.is_grad_enabled())
            return model(**given)

        return call

    monkeypatch.setattr(torch, "compile", compiled)
    model = start(converted, 120)
    before = model.get_input_embeddings().weight.clone()
    run = Run(model, rate=1e-2, minutes=0.2, autocast=False, compiled=True, state=None)
    run.train(examples, {"kind": [EXAMPLE]}, tmp_path / "model.pt", every=0.1, batch=64)
    assert calls == [True] * run.step and run.step > 3
    assert not torch.equal(before, model.get_input_embeddings().weight)


def test_the_result_is_converted_and_trained_further(
    converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The vocabulary grows once, and the prefix stays."""
    monkeypatch.setattr(further_training, "HELD_OUT", 2)
    monkeypatch.setattr(train_correct, "POOL", 64)
    edit_json(converted / "config.json", prefix="correct: ", draft="small", min_probability=0.5)
    data, text, source = write_pairs(tmp_path), "Ünïcode ☃", converted
    for name in ("first", "second"):
        train_further(
            data,
            tmp_path / name,
            source,
            minutes=1e-4,
            rate=1e-3,
            every=1,
            tokens=200,
            autocast=False,
            caution=0.5,
            keep=0.5,
        )
        source = convert(str(tmp_path / name / source.name), tmp_path / f"{name}-converted")
        model, tokenizer = load(source)
        assert model.config.vocab_size == 640
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.prefix == "correct: "
        config = json.loads((source / "config.json").read_text())
        assert (config["draft"], config["min_probability"]) == ("small", 0.5)


def test_edited_prose_is_mixed_in_and_judged(
    converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(further_training, "HELD_OUT", 2)
    monkeypatch.setattr(train_correct, "POOL", 64)
    paragraphs, mixed = tmp_path / "technical.txt", []
    paragraphs.write_text("".join(f"Paragraph {i} is short.\n" for i in range(200)))

    def mixed_examples(*_: Any, prose: Any, **__: Any) -> Iterator[tuple[str, str]]:
        while True:
            mixed.append(prose(random.Random(0)))
            yield mixed[-1]

    monkeypatch.setattr(further_training, "mixed_examples", mixed_examples)
    train_further(
        write_pairs(tmp_path),
        tmp_path / "work",
        converted,
        minutes=1e-4,
        rate=1e-3,
        every=1,
        tokens=200,
        autocast=False,
        technical=[paragraphs],
    )
    assert "Paragraph" in mixed[0][1]
    assert re.search(r"held-out loss: old \S+, new \S+, prose \d", capsys.readouterr().out)


def test_a_model_learns_what_its_teacher_says(converted: Path, tmp_path: Path, clock: None) -> None:
    """The loss is the divergence from the teacher: 0 for itself, and it falls for another."""
    run = make_run(start(converted, 120), minutes=0.4)
    batch = torch.tensor([EXAMPLE[0]]), torch.ones(1, 4), torch.tensor([[*EXAMPLE[1], -100]])
    right = run._loss(*batch).item()
    run.teacher = start(converted, 120).eval()
    assert run._loss(*batch).item() == pytest.approx(0, abs=1e-5) != right
    torch.manual_seed(1)
    for weight in run.teacher.parameters():
        weight.data += 0.1 * torch.randn_like(weight)
    before = run._loss(*batch).item()
    run.train(examples, {}, tmp_path / "model.pt", every=1, batch=16)
    assert 0 < run._loss(*batch).item() < before / 2


@pytest.mark.parametrize("taught", [False, True])
def test_caution_asks_the_teacher_or_the_weights_before(
    converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taught: bool
) -> None:
    asked: list[Any] = []

    def caution(model: Any, *_: Any, **__: Any) -> Any:
        asked.append(model.get_input_embeddings().weight[5, 0].item())
        return lambda ids, mask, labels: labels

    monkeypatch.setattr(further_training, "HELD_OUT", 2)
    monkeypatch.setattr(train_correct, "POOL", 64)
    monkeypatch.setattr(further_training, "Caution", caution)
    teacher = start(converted, 500)  # of the size that the vocabulary grows to
    own = teacher.get_input_embeddings().weight[5, 0].item()
    with torch.no_grad():
        teacher.get_input_embeddings().weight[5, 0] = own + 1
    teacher.save_pretrained(tmp_path / "teacher")
    train_further(
        write_pairs(tmp_path),
        tmp_path / "work",
        converted,
        minutes=1e-4,
        rate=1e-3,
        every=1,
        tokens=200,
        autocast=False,
        caution=0.5,
        teacher=tmp_path / "teacher" if taught else None,
    )
    assert asked == pytest.approx([own + taught])


def test_a_cautious_run_learns_other_targets(converted: Path, tmp_path: Path, clock: None) -> None:
    run = make_run(start(converted, 120), minutes=0.4)
    ids, mask, other = torch.tensor([EXAMPLE[0]]), torch.ones(1, 4), torch.tensor([[11, 12, 1]])
    run.caution = lambda ids, *_: other.repeat(len(ids), 1)  # type: ignore[assignment]
    before = run._loss(ids, mask, other).item()
    run.train(examples, {}, tmp_path / "model.pt", every=1, batch=16)
    assert run._loss(ids, mask, other).item() < before / 2


def test_a_result_may_keep_a_share_of_the_weights_before(converted: Path) -> None:
    model, before = start(converted, 120), start(converted, 120)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 1.0
    trained = [weight.detach().clone() for weight in model.parameters()]
    mix(model, before, 0.3)
    for weight, first, last in zip(model.parameters(), before.parameters(), trained, strict=True):
        assert torch.allclose(weight, 0.3 * first + 0.7 * last, atol=1e-5)
