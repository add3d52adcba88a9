"""Encoders alone, served: T5EncoderModel and folders of sentence-transformers."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from speculative_t5 import Encoder
from speculative_t5.checkpoints import convert
from speculative_t5.cli.options import DecoderOptions
from speculative_t5.cli.serve import _size_of_files, _to_serve
from speculative_t5.serve import Models
from speculative_t5.serve.languagetool import languages_corrected
from speculative_t5.tokenizers import Languages

import numpy as np
import openai
import pytest
import torch
import transformers
from conftest import V1_0, V1_1, edit_json, write_checkpoint
from families import write_tokenizer
from messages import check_message
from serving import Served, serving, wait_until
from test_encoder import DENSE, write_sentence_folder

TEXTS = ["The sea", "The old man and the sea", "fish", "A man was old"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, spiece: bytes) -> dict[str, Path]:
    """An encoder alone, the same in 8 bits, one with the steps of sentence-t5, a whole model."""
    root = tmp_path_factory.mktemp("encoders")
    alone, bits = root / "alone", root / "bits"
    torch.manual_seed(0)
    shape = V1_1 | {"d_model": 64, "d_kv": 32, "d_ff": 64}
    config = transformers.T5Config(**shape, pad_token_id=0, eos_token_id=1)
    transformers.T5EncoderModel(config).save_pretrained(alone)
    write_tokenizer(alone, "spiece")
    convert(str(alone), bits, quantize=8)
    steps = [("Pooling", {"pooling_mode": "mean"}), DENSE, ("Normalize", {})]
    write_sentence_folder(root / "sentences", alone, steps, length=6)
    write_checkpoint(root / "whole", V1_0, spiece)
    names = ("alone", "bits", "sentences", "whole")
    return {name: root / name for name in names}


@pytest.fixture(scope="module")
def server(folders: dict[str, Path]) -> Iterator[Served]:
    served = [_to_serve(DecoderOptions(model=str(folder)), 4, 9) for folder in folders.values()]
    models = Models(served)
    with serving(models) as running:
        wait_until(lambda: models.state == "ready")
        yield running


@pytest.mark.parametrize("name", ["alone", "bits", "sentences"])
def test_openais_client_gets_the_vectors_of_an_encoder(
    name: str, server: Served, folders: dict[str, Path]
) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    texts = TEXTS[::2] if name == "sentences" else TEXTS
    done = client.embeddings.create(model=name, input=texts)
    vectors = np.array([each.embedding for each in done.data])
    expected = np.array(Encoder.from_pretrained(folders[name]).embed(texts))
    assert vectors.shape == (len(texts), 24 if name == "sentences" else 64)
    np.testing.assert_allclose(vectors, expected, atol=1e-5)


def test_encoders_do_nothing_else_and_say_so(server: Served) -> None:
    listed = {each["id"]: each for each in server.client.get("/v1/models").json()["data"]}
    for name in ("alone", "bits", "sentences"):
        assert listed[name]["corrects"] == listed[name]["translates"] == []
        for path, fields in [
            ("/v1/completions", {"prompt": "The sea"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "The sea"}]}),
            ("/v1/rerank", {"query": "The sea", "documents": ["fish"]}),
        ]:
            refused = server.post(path, model=name, **fields)
            assert refused.status_code == 400
            message = refused.json()["error"]["message"]
            assert f"{name} is an encoder alone, which generates nothing" in message
            check_message(message)
    assert listed["whole"]["corrects"]
    checked = server.post("/v2/check", text="The sea was old.", language="en")
    assert checked.status_code == 200, "by the model that generates"
    assert server.post("/detect", q="The sea was old.").status_code == 200


def test_a_prefix_goes_before_texts(folders: dict[str, Path]) -> None:
    options = DecoderOptions(model=str(folders["alone"]), prefix="query: ")
    models = Models([_to_serve(options, 4, 9)])
    with serving(models) as server:
        wait_until(lambda: models.state == "ready")
        found = server.post("/v1/embeddings", input="fish").json()["data"][0]["embedding"]
        assert server.post("/detect", q="fish").status_code == 404
    expected = np.array(Encoder.from_pretrained(folders["alone"]).embed("query: fish"))[0]
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_the_size_of_an_encoder_is_that_of_its_own_folder(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(folders["sentences"], tmp_path / "whole")
    inner = tmp_path / "whole" / "0_Transformer"
    inner.mkdir()
    for path in (tmp_path / "whole").iterdir():
        if path.is_file() and path.name != "modules.json":
            path.rename(inner / path.name)
    steps = json.loads((tmp_path / "whole" / "modules.json").read_text())
    steps[0]["path"] = "0_Transformer"
    (tmp_path / "whole" / "modules.json").write_text(json.dumps(steps))
    shutil.copy(inner / "config.json", tmp_path / "whole")
    sizes = [
        _size_of_files(DecoderOptions(model=str(each)))
        for each in (tmp_path / "whole", folders["sentences"])
    ]
    assert 0.9 * sizes[1] < sizes[0] <= sizes[1]


@pytest.mark.parametrize("truncates", [False, True])
def test_texts_are_cut_only_where_the_server_cuts_them(
    truncates: bool, folders: dict[str, Path]
) -> None:
    text = "The old man and the sea and the fish"
    options = DecoderOptions(model=str(folders["sentences"]), truncate=truncates)
    models = Models([_to_serve(options, 4, 9)])
    with serving(models) as server:
        wait_until(lambda: models.state == "ready")
        done = server.post("/v1/embeddings", input=text)
    if truncates:
        found = done.json()["data"][0]["embedding"]
        expected = Encoder.from_pretrained(folders["sentences"]).embed(text)
        np.testing.assert_allclose(found, np.array(expected)[0], atol=1e-5)
    else:
        assert done.status_code == 400
        assert "6 that max_source_length allows" in done.json()["error"]["message"]


def test_a_folder_that_says_that_texts_are_small_reads_them_so(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    own = tmp_path / "lower"
    shutil.copytree(folders["sentences"], own)
    edit_json(own / "sentence_bert_config.json", do_lower_case=True)
    models = Models([_to_serve(DecoderOptions(model=str(own)), 4, 9)])
    with serving(models) as server:
        wait_until(lambda: models.state == "ready")
        vectors: list[Any] = [
            server.post("/v1/embeddings", input=text).json()["data"][0]["embedding"]
            for text in ("THE SEA", "the sea")
        ]
    assert vectors[0] == vectors[1]


def test_a_model_that_corrects_nothing_by_its_folder_is_asked_for_nothing() -> None:
    assert languages_corrected(SimpleNamespace(corrects=[], languages=Languages())) == []
    assert languages_corrected(SimpleNamespace(corrects=None, languages=Languages()))
