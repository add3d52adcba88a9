"""Tokenizers of decoder-only models: texts, chats, and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from speculative_t5 import SpeculativeDecoder, load
from speculative_t5.tokenizers import DecoderOnlyTokenizer

import pytest
from checkpoints import refused, write_causal, write_tokenizer
from conftest import edit_json, tiny_causal

SAID = {"role": "user", "content": "He go home"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path)
    return tmp_path


def decoder(folder: Path, **options: Any) -> SpeculativeDecoder:
    model = tiny_causal("qwen3", vocab_size=300)
    return SpeculativeDecoder(model, None, DecoderOnlyTokenizer(folder), **options)


def test_the_begin_token_is_not_doubled(folder: Path) -> None:
    raw = json.loads((folder / "tokenizer.json").read_text())
    special = {"<|user|>": {"id": "<|user|>", "ids": [1], "tokens": ["<|user|>"]}}
    begin = {"SpecialToken": {"id": "<|user|>", "type_id": 0}}
    a, b = ({"Sequence": {"id": name, "type_id": i}} for i, name in enumerate("AB"))
    raw["post_processor"] = {
        "type": "TemplateProcessing", "single": [begin, a], "pair": [begin, a, b],
        "special_tokens": special,
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    edit_json(folder / "tokenizer_config.json", bos_token="<|user|>")
    tokenizer = DecoderOnlyTokenizer(folder)
    plain = tokenizer.encode("He go")
    assert plain[0] == 1 and plain.count(1) == 1
    assert tokenizer.encode("<|user|>He go") == plain


def test_opts_texts_begin_with_its_own_token(tmp_path: Path) -> None:
    """As published: no tokenizer.json, and </s> before every text."""
    write_causal(tmp_path, "opt", eos_token_id=2, bos_token_id=2, pad_token_id=1)
    whole = json.loads((tmp_path / "tokenizer.json").read_text())["model"]
    (tmp_path / "tokenizer.json").unlink()
    named = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}
    pieces = [piece for piece in whole["vocab"] if not piece.startswith("<|")]
    vocab = named | {piece: 4 + i for i, piece in enumerate(pieces)}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in whole["merges"]]
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    edit_json(
        tmp_path / "tokenizer_config.json", tokenizer_class="GPT2Tokenizer", add_bos_token=True,
        bos_token="</s>", eos_token="</s>", unk_token="</s>", pad_token="<pad>",
    )  # fmt: skip
    model, tokenizer = load(tmp_path)
    ids = tokenizer.encode("He goes home.")
    assert ids[0] == 2 and 2 not in ids[1:]
    assert tokenizer.decode([*ids, 318]) == "He goes home." and model.eos_token_ids == {2}


def test_chats_are_formatted_by_the_models_template(folder: Path) -> None:
    expected = DecoderOnlyTokenizer(folder).encode("<|user|>He go home\n<|assistant|>")
    assert decoder(folder, chat=True).encode("He go home") == expected
    plain = decoder(folder)
    assert plain.encode([SAID]) == expected != plain.encode("He go home")
    answered = [SAID, {"role": "assistant", "content": "OK"}, SAID]
    assert plain.encode(answered)[-len(expected) :] == expected
    assert plain.generate([SAID], max_tokens=3).stats.emitted


@pytest.mark.parametrize(
    ("message", "found"),
    [
        ({"role": "user", "content": 3}, "str for role, int for content"),
        ({}, "nothing"),
        ("y", "str"),
    ],
)
def test_malformed_messages_are_refused(folder: Path, message: Any, found: str) -> None:
    with refused(f"a message must be .*, got {found}$", found):
        decoder(folder).encode([SAID, message])
    with refused("the content of a message is not UTF-8"):
        DecoderOnlyTokenizer(folder).encode_chat([{"role": "user", "content": "\udc80"}])


def test_a_missing_or_refusing_template_is_named(folder: Path) -> None:
    edit_json(folder / "tokenizer_config.json", chat_template="{{ raise_exception('no\nusers') }}")
    with refused(r"refuses these messages \(no\)"):
        decoder(folder).encode([SAID])
    edit_json(folder / "tokenizer_config.json", chat_template=None)
    for chat in (False, True):
        with refused("no chat template"):
            decoder(folder, chat=chat).encode([SAID])


def test_missing_packages_are_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    def lack(*_: Any, **__: Any) -> None:
        raise ImportError("\nLlamaConverter requires the protobuf library\nbut it was not found")

    tokenizer = DecoderOnlyTokenizer(folder)
    monkeypatch.setattr(type(tokenizer._backend), "apply_chat_template", lack)
    with refused(r"library\): run pip install 'jinja2>=3.1.6'$"):
        tokenizer.encode_chat([SAID])
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lack)
    install = r"run pip install 'transformers>=5' 'protobuf>=4'$"
    with refused(rf"\(LlamaConverter requires the protobuf library\): {install}", folder):
        DecoderOnlyTokenizer(folder)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with refused(install, folder):
        DecoderOnlyTokenizer(folder)


def test_no_code_of_a_folder_is_run(folder: Path) -> None:
    (folder / "evil.py").write_text(f"open({str(folder / 'pwned')!r}, 'w')\nclass Evil: pass\n")
    auto_map = {"AutoTokenizer": ["evil.Evil", None]}
    edit_json(folder / "tokenizer_config.json", tokenizer_class="Evil", auto_map=auto_map)
    with refused("no tokenizer can be made of", folder):
        DecoderOnlyTokenizer(folder)
    assert not (folder / "pwned").exists()
