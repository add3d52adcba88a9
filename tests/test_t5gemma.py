"""T5Gemma and T5Gemma 2 compute what transformers computes, and are stored as it stores them."""

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock

from speculative_t5 import SpeculativeDecoder, load
from speculative_t5.checkpoints.conversion import convert
from speculative_t5.checkpoints.inspection import inspect
from speculative_t5.models import SharingConfig, SharingDraft, T5Gemma, copy_layers
from speculative_t5.models.config import T5GEMMA_TYPES
from speculative_t5.models.t5gemma_config import T5GemmaConfig
from speculative_t5.tokenizers import TransformersTokenizer

import mlx.core as mx
import numpy as np
import pytest
from checkpoints import refused
from conftest import edit_json, tiny_gemma, tiny_sharing
from families import STACK, assert_close, reference_logits, write_gemma, write_tokenizer
from serving import started, wait_until

UNBALANCED = {"encoder": {"hidden_size": 36, "num_hidden_layers": 4}}
NO_CAPS = {"final_logit_softcapping": None, "attn_logit_softcapping": None}
CAPS = {"final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0}
PERIODS = {  # of five layers to one, as published, and positions that are scaled
    "num_hidden_layers": 6,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 3000.0, "factor": 4.0},
    },
}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "1": (1, {"encoder": CAPS, "decoder": CAPS}),
    "1, unbalanced": (1, {"encoder": UNBALANCED["encoder"] | NO_CAPS, "decoder": NO_CAPS}),
    "1, another window": (1, {"encoder": {"sliding_window": 4}, "decoder": {"sliding_window": 1}}),
    "2": (2, {}),
    "2, another window": (2, {"encoder": {"sliding_window": 4}, "decoder": {"sliding_window": 1}}),
    "2, scaled": (2, {"encoder": PERIODS, "decoder": PERIODS}),
}


def random_ids(rows: int, length: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(6, 300, (rows, length))


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    """Windows are shorter than prompts and outputs, and one prompt is padded."""
    generation, changes = CASES[case]
    reference = write_gemma(tmp_path, generation, **changes)
    model, _ = load(tmp_path, dtype=mx.float32)
    for length in (1, 3, 24, 300):
        source, target = random_ids(3, length, length), random_ids(3, 30, 0)
        source[1, (length + 1) // 2 :] = 0
        target[:, 0] = 2
        expected = reference_logits(reference, source, target)
        assert_close(model(mx.array(source), mx.array(target)), expected)


@pytest.mark.parametrize("generation", [1, 2])
@pytest.mark.parametrize("num_beams", [1, 3])
def test_greedy_outputs_and_beams_are_those_of_transformers(
    generation: int, num_beams: int, tmp_path: Path
) -> None:
    import torch

    reference = write_gemma(tmp_path, generation, decoder={"tie_word_embeddings": False})
    decoder = SpeculativeDecoder.from_pretrained(tmp_path, "lookup", dtype=mx.float32)
    count = 100 if num_beams == 1 else 50
    prompts = [random_ids(1, 1 + i % 17, i)[0].tolist() for i in range(count)]
    options = {"max_tokens": 12, "num_beams": num_beams, "speculative": num_beams == 1}
    outputs = decoder.generate_batch(prompts, **options)
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor([prompt])
        found = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=12,
            do_sample=False,
            num_beams=num_beams,
            decoder_start_token_id=2,
        )[0, 1:].tolist()
        assert output.tokens == [token for token in found if token > 1], prompt


@dataclass(frozen=True)
class Converted:
    """A checkpoint of a generation, and the folders that it was converted to."""

    generation: int
    reference: Any  # the model (torch)
    source: Path
    folders: list[Path]
    notes: list[str]


@pytest.fixture(scope="module", params=[1, 2], ids=["first", "second"])
def converted(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Converted:
    """A checkpoint in shards and in one file, both converted."""
    place = tmp_path_factory.mktemp("converted")
    reference = write_gemma(place / "source", request.param, shard_size="30KB")
    write_gemma(place / "whole", request.param)
    assert len([*(place / "source").glob("*.safetensors")]) > 1
    notes: list[str] = []
    folders = [
        convert(str(place / name), place / f"{name}-out", note=notes.append)
        for name in ("source", "whole")
    ]
    return Converted(request.param, reference, place / "source", folders, notes)


def test_a_checkpoint_in_shards_and_one_file_become_the_same_bytes(converted: Converted) -> None:
    first, second = ((folder / "weights.npz").read_bytes() for folder in converted.folders)
    assert first == second


def test_weights_of_images_are_left_out_with_a_note(converted: Converted) -> None:
    assert all("tensors for images" in note for note in converted.notes)
    assert len(converted.notes) == (2 if converted.generation == 2 else 0)


def test_a_checkpoint_is_inspected(converted: Converted) -> None:
    found = inspect(str(converted.source))
    assert found.family == ("T5Gemma" if converted.generation == 1 else "T5Gemma 2")
    images = ("vision_tower", "multi_modal", "eoi_embedding")
    named = dict(converted.reference.named_parameters())  # each once
    text = {name: each for name, each in named.items() if not any(i in name for i in images)}
    assert found.num_parameters == sum(each.numel() for each in text.values())


def test_a_checkpoint_loads_as_what_it_is_converted_to(converted: Converted) -> None:
    folders = (converted.source, converted.folders[0])
    (a, tokenizer), (b, _) = (load(folder, dtype=mx.float32) for folder in folders)
    assert a.config == b.config
    for x, y in zip(*(each.parameters()["decoder"]["layers"] for each in (a, b)), strict=True):
        assert mx.array_equal(x["self_norm"]["weight"], y["self_norm"]["weight"])
    ids = tokenizer.encode("The old man sat.")
    assert ids[0] == 2 and ids[-1] != 1 and tokenizer.decode(ids) == "The old man sat."


def test_chats_are_read_by_the_template_that_was_converted(converted: Converted) -> None:
    decoder = SpeculativeDecoder.from_pretrained(converted.folders[0], "lookup", dtype=mx.float32)
    chat = decoder.encode([{"role": "user", "content": "A dog."}])
    assert chat[:2] == [2, 4] and decoder.tokenizer
    assert chat[-1] == decoder.tokenizer.encode("model ")[-1]


@pytest.mark.parametrize("generation", [1, 2])
def test_a_chat_is_served_as_it_is_decoded(generation: int, tmp_path: Path) -> None:
    """By the command, with the model's own template."""
    write_gemma(tmp_path / "gemma-it", generation)
    chat = [{"role": "user", "content": "A dog."}]
    decoder = SpeculativeDecoder.from_pretrained(tmp_path / "gemma-it", None)
    expected = decoder.generate(chat, max_tokens=20)
    options = ("--model", "gemma-it", "--draft-model", "lookup")
    with started(tmp_path, *options, change="") as (_, client):
        fields = {"messages": chat, "max_tokens": 20, "speculative_t5": True}
        wait_until(lambda: client.get("/health").status_code == 200)
        done = client.post("/v1/chat/completions", json=fields).json()
        assert done["choices"][0]["message"]["content"] == expected.text
        assert done["usage"]["prompt_tokens"] == len(decoder.encode(chat))
        assert done["choices"][0]["speculative_t5"]["stats"]["emitted"] == expected.stats.emitted
        assert client.get("/v1/models").json()["data"][0]["id"] == "gemma-it"


@pytest.mark.parametrize("generation", [1, 2])
@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_models_stay_close(
    generation: int, bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECULATIVE_T5_KEEP_QUANTIZED", "1")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16}
    write_gemma(tmp_path / "source", generation, encoder=sizes, decoder=sizes)
    folder = convert(str(tmp_path / "source"), tmp_path / "out", quantize=bits, group_size=32)
    plain, packed = (load(each, dtype=mx.float32)[0] for each in (tmp_path / "source", folder))
    source, target = mx.array(random_ids(2, 9, 0)), mx.array(random_ids(2, 9, 1))
    x, y = plain(source, target), packed(source, target)
    error = mx.abs(x - y).max() / mx.abs(x).max()
    assert 0 < error.item() < (0.7 if bits == 4 else 0.1)


def test_several_ids_may_end_an_output(tmp_path: Path) -> None:
    write_gemma(tmp_path / "source", 1)
    path = tmp_path / "source" / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": [1, 5]}))
    folder = convert(str(tmp_path / "source"), tmp_path / "out")
    for each in (tmp_path / "source", folder):
        assert load(each)[0].info.eos_token_ids == {1, 5}


def test_what_a_checkpoint_says_of_itself_is_not_said_of_what_is_made_of_it(tmp_path: Path) -> None:
    write_gemma(tmp_path / "source", 1)
    path = tmp_path / "source" / "config.json"
    said = {
        "converted_from": {"repository": "other"},
        "draft": "small",
        "dtype": "float32",
    }
    path.write_text(json.dumps(json.loads(path.read_text()) | said))
    folder = convert(str(tmp_path / "source"), tmp_path / "out", dtype="bfloat16")
    found = json.loads((folder / "config.json").read_text())
    assert "converted_from" not in found and "dtype" not in found
    assert found["draft"] == "small" and found["tie_word_embeddings"] is True


def config_json(generation: int, **changes: Any) -> dict[str, Any]:
    kind = next(name for name, each in T5GEMMA_TYPES.items() if each == generation)
    return {"model_type": kind, "encoder": STACK, "decoder": STACK} | changes


def test_only_the_first_generation_has_cross_attention_of_its_own() -> None:
    for generation in (1, 2):
        config = T5GemmaConfig.from_dict(config_json(generation, eos_token_id=[1, 106]))
        assert {name for name, _ in T5Gemma(config).named_modules() if "cross" in name} == (
            set()
            if generation == 2
            else {
                f"decoder.layers.{i}.{part}"
                for i in range(3)
                for part in (
                    "cross_norm",
                    "cross_attention",
                    "cross_post_norm",
                    "cross_attention.q",
                    "cross_attention.kv",
                    "cross_attention.out",
                )
            }
        )


@pytest.mark.parametrize(
    ("generation", "changes", "message"),
    [
        (1, {"encoder": None}, "encoder in config.json is missing, expected an object"),
        (1, {"decoder": STACK | {"num_key_value_heads": 3}}, "expected a divisor of"),
        (1, {"decoder": STACK | {"head_dim": 7}}, "head_dim in config.json is 7, expected an even"),
        (1, {"decoder": STACK | {"hidden_activation": "silu"}}, "'silu', expected gelu_pytorch"),
        (2, {"decoder": STACK | {"layer_types": ["chunked"] * 3}}, "expected 3 times one of"),
        (2, {"decoder": STACK | {"hidden_size": 32}}, "expected the same in both stacks"),
        (2, {"encoder": STACK | {"attention_bias": True}}, "attention_bias .* expected false"),
        (2, {"encoder": STACK | {"rope_scaling": {"rope_type": "yarn"}}}, "'yarn', expected"),
        (2, {"encoder": STACK | {"layer_types": [[]] * 3}}, "expected 3 times one of"),
        (2, {"encoder": STACK | {"sliding_window_pattern": "6"}}, "'6', expected a positive int"),
        (2, {"decoder": STACK | {"rope_parameters": [1]}}, "expected an object"),
        (2, {"decoder": STACK | {"rope_theta": "x"}}, "'x', expected a number above 0"),
        (1, {"decoder": STACK | {"rms_norm_eps": math.inf}}, "inf, expected a number above 0"),
        (1, {"eos_token_id": [1, 320]}, "expected an id from 0 to 319"),
        (1, {"architectures": ["T5GemmaForTokenClassification"]}, "expected one that generates"),
    ],
)
def test_a_config_that_is_not_a_t5gemma_is_refused(
    generation: int, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        T5GemmaConfig.from_dict(config_json(generation, **changes))


@pytest.mark.parametrize("kind", T5GEMMA_TYPES)
def test_a_sharing_draft_of_all_layers_is_its_target(kind: str) -> None:
    """Its layers have the windows of those that they are copied from."""
    target = tiny_gemma(kind, vocab_size=20, layers=3)
    decoder = SpeculativeDecoder(target, tiny_sharing(target, noise=0.0), num_draft=4)
    output = decoder.generate([5, 6, 7, 1], max_tokens=30, min_tokens=20)
    stats = output.stats
    assert len(output.tokens) >= 20 and stats.num_accepted == stats.num_drafted
    half = SharingDraft(target, SharingConfig(2, 16))
    copy_layers(half)
    for layer, number in zip(half.decoder.layers, (0, 2), strict=True):
        assert layer.layer_type == target.decoder.layers[number].layer_type
        assert mx.array_equal(
            layer.self_norm.weight, target.decoder.layers[number].self_norm.weight
        )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The files of a tokenizer."""
    write_tokenizer(tmp_path / "gemma", "gemma")
    return tmp_path / "gemma"


def test_the_begin_token_is_not_doubled(folder: Path) -> None:
    tokenizer = TransformersTokenizer(folder)
    plain = tokenizer.encode("He go")
    assert plain[0] == 2 and plain.count(2) == 1
    assert tokenizer.encode("<bos>He go") == plain
    assert tokenizer.decode([*plain, 1, 310]) == "He go", "control tokens and padding have no text"


def test_tokenizers_that_cannot_be_made_are_refused(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    with refused("no tokenizer can be made of", folder):
        TransformersTokenizer(folder)
    (folder / "tokenizer.json").unlink()
    with refused("no tokenizer in .*: expected one of", folder):
        TransformersTokenizer(folder)


def test_no_code_of_a_folder_is_run(folder: Path) -> None:
    (folder / "evil.py").write_text(f"open({str(folder / 'pwned')!r}, 'w')\nclass Evil: pass\n")
    auto_map = {"AutoTokenizer": ["evil.Evil", None]}
    edit_json(folder / "tokenizer_config.json", tokenizer_class="Evil", auto_map=auto_map)
    with refused("no tokenizer can be made of", folder):
        TransformersTokenizer(folder)
    assert not (folder / "pwned").exists()


def test_missing_packages_are_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    def lack(*_: Any, **__: Any) -> None:
        raise ImportError("\nLlamaConverter requires the protobuf library\nbut it was not found")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lack)
    install = r"run pip install 'transformers>=5' 'protobuf>=4'$"
    with refused(rf"\(LlamaConverter requires the protobuf library\): {install}", folder):
        TransformersTokenizer(folder)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with refused(install, folder):
        TransformersTokenizer(folder)


SAID = {"role": "user", "content": "He go home"}


def test_malformed_messages_and_bad_templates_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_gemma("t5gemma", vocab_size=320)

    def encode(*messages: Any, chat: bool = False) -> list[int]:
        tokenizer = TransformersTokenizer(folder)
        return SpeculativeDecoder(model, None, tokenizer, chat=chat).encode([*messages])

    answered = [SAID, {"role": "assistant", "content": "OK"}, SAID]
    assert encode(*answered)[-len(encode(SAID)) + 1 :] == encode(SAID)[1:]
    bad: dict[str, Any] = {"str for role, int for content": SAID | {"content": 3}, "str": "y"}
    for found, message in (bad | {"nothing": {}}).items():
        with refused(f"a message must be .*, got {found}$", found):
            encode(SAID, message)
    with refused("the content of a message is not UTF-8"):
        encode({"role": "user", "content": "\udc80"})
    with monkeypatch.context() as lacking:
        lack = Mock(side_effect=ImportError("no jinja2"))
        lacking.setattr(type(TransformersTokenizer(folder)._backend), "apply_chat_template", lack)
        with refused("run pip install 'jinja2>=3.1.6'$"):
            encode(SAID)
    template = folder / "chat_template.jinja"
    template.write_text("{{ raise_exception('no\nusers') }}")
    with refused(r"refuses these messages \(no\)"):
        encode(SAID)
    template.unlink()
    for chat in (False, True):
        with refused("no chat template"):
            encode(SAID, chat=chat)
