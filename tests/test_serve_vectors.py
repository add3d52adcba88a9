"""Embeddings and rankings over HTTP, as OpenAI's and Cohere's clients ask for them."""

import base64
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from speculative_t5 import Encoder, SpeculativeDecoder, rank
from speculative_t5.serve import Service
from speculative_t5.serve.vectors import MOST_PART, parts_of_rows

import cohere
import httpx
import numpy as np
import openai
import pytest
from conftest import V1_0, write_checkpoint
from serving import PATIENCE, Served, served_as, serving, wait_until

TEXTS = ["1, 2, 3", "one two", "a b c d e f g h", "3", "4, 5, 6, 7, 8, 9"]
WORDS = {"positive": "1", "negative": "a"}


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory, spiece: bytes) -> SpeculativeDecoder:
    folder = tmp_path_factory.mktemp("vectors") / "tiny"
    write_checkpoint(folder, V1_0, spiece)
    return SpeculativeDecoder.from_pretrained(folder, dtype="float32")


@pytest.fixture(scope="module")
def server(decoder: SpeculativeDecoder) -> Iterator[Served]:
    models = served_as("tiny", Service(lambda: decoder))
    with serving(models) as found:
        wait_until(lambda: models.state == "ready")
        yield found


@pytest.fixture
def client(server: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_openais_client_gets_the_encoders_vectors(
    client: openai.OpenAI, decoder: SpeculativeDecoder
) -> None:
    """By base64, which it asks for itself, and as numbers; several texts, one, or ids."""
    expected = np.array(Encoder.of(decoder).embed(TEXTS))
    for form in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
        options: Any = form
        done = client.embeddings.create(model="tiny", input=TEXTS, **options)
        assert [each.index for each in done.data] == [*range(len(TEXTS))]
        vectors: Any = [each.embedding for each in done.data]
        if form.get("encoding_format") == "base64":
            vectors = [np.frombuffer(base64.b64decode(each), "<f4") for each in vectors]
        np.testing.assert_allclose(np.array(vectors), expected, atol=1e-5)
    ids = [decoder.encode(text) for text in TEXTS]
    assert done.usage.prompt_tokens == done.usage.total_tokens == sum(map(len, ids))
    for asked in (TEXTS[0], ids[0], [ids[0]]):
        (one,) = client.embeddings.create(model="tiny", input=asked).data
        np.testing.assert_allclose(one.embedding, expected[0], atol=1e-5)


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank"])
def test_documents_are_ranked(path: str, server: Served, decoder: SpeculativeDecoder) -> None:
    expected = rank(decoder, "3", TEXTS, **WORDS)
    done = server.post(path, model="tiny", query="3", documents=TEXTS, **WORDS)
    assert done.status_code == 200, done.text
    results = done.json()["results"]
    assert [each["index"] for each in results] == [each.index for each in expected]
    for found, each in zip(results, expected, strict=True):
        assert abs(found["relevance_score"] - each.score) < 1e-5 and "document" not in found
    documents = [{"text": text} for text in TEXTS]
    asked: dict[str, Any] = {"documents": documents, "top_n": 2, "return_documents": True}
    results = server.post(path, query="3", **asked, **WORDS).json()["results"]
    assert [each["document"]["text"] for each in results] == [e.document for e in expected[:2]]


def test_coheres_client_gets_them(server: Served, decoder: SpeculativeDecoder) -> None:
    template = "{query} {document}"
    extra: Any = {"additional_body_parameters": WORDS | {"template": template}}
    with httpx.Client(timeout=PATIENCE) as http:
        client = cohere.ClientV2(api_key="none", base_url=server.url, httpx_client=http)
        done = client.rerank(
            model="tiny", query="3", documents=TEXTS, top_n=3, request_options=extra
        )
    expected = rank(decoder, "3", TEXTS, template=template, top_n=3, **WORDS)
    assert [each.index for each in done.results] == [each.index for each in expected]


BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "dimensions": ("embeddings", {"input": "1", "dimensions": 8}, "dimensions must be left out"),
    "form": ("embeddings", {"input": "1", "encoding_format": "hex"}, "must be float or base64"),
    "no input": ("embeddings", {}, "input must be a text, a list of texts, or lists of ids"),
    "a number": ("embeddings", {"input": 5}, "input must be a text, a list of texts, or lists"),
    "empty": ("embeddings", {"input": []}, "input must be from 1 to 2048 texts"),
    "mixed": ("embeddings", {"input": ["1", 2.5]}, "input must be a text, a list of texts"),
    "ids": ("embeddings", {"input": [[10**6]]}, "prompt ids must be from 0 to"),
    "long": ("embeddings", {"input": "1, 2 " * 400}, "the prompt has"),
    "many": ("embeddings", {"input": ["1"] * 2049}, "input must be from 1 to 2048 texts"),
    "field": ("embeddings", {"input": "1", "inputs": "1"}, "has no field 'inputs': leave it out"),
    "model": ("embeddings", {"input": "1", "model": "other"}, "other"),
    "query": ("rerank", {"documents": ["1"]}, "query must be text, got null"),
    "documents": ("rerank", {"query": "1", "documents": []}, "documents must be a list of 1 to"),
    "document": ("rerank", {"query": "1", "documents": [1]}, "documents must be text, got 1"),
    "top": ("rerank", {"query": "1", "documents": ["1"], "top_n": 0}, "top_n must be an integer"),
    "word": (
        "rerank",
        {"query": "1", "documents": ["1"], "positive": "1, 2"},
        "positive must be a word of one token",
    ),
    "template": (
        "rerank",
        {"query": "1", "documents": ["1"], "template": "{query}"} | WORDS,
        "template must be a text with",
    ),
    "places": (
        "rerank",
        {"query": "1", "documents": ["1"], "template": "{query}" + "{document}" * 9} | WORDS,
        "each once",
    ),
    "characters": (
        "rerank",
        {"query": "1" * 10_000, "documents": ["1"] * 1000} | WORDS,
        "documents make 10,046,000 characters, and 4,194,304 are read at a time: split",
    ),
    "long document": (
        "rerank",
        {"query": "1", "documents": ["1, 2 " * 400]} | WORDS,
        "split the text",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_said_in_a_line(case: str, server: Served) -> None:
    kind, fields, message = BAD[case]
    done = server.post(f"/v1/{kind}", **fields)
    assert done.status_code in (400, 404, 413), done.text
    error = done.json()["error"]["message"]
    assert message in error and "\n" not in error


def test_others_are_decoded_between_the_parts(server: Served) -> None:
    """A long list of texts holds nobody up."""
    texts = ["1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12"] * 600
    ends: list[str] = []

    def embed() -> None:
        assert server.post("/v1/embeddings", input=texts).status_code == 200
        ends.append("embeddings")

    thread = threading.Thread(target=embed)
    thread.start()
    assert server.post(prompt="1, 2", max_tokens=3).status_code == 200
    ends.append("completion")
    thread.join()
    assert ends == ["completion", "embeddings"]


def test_parts_hold_texts_of_similar_length() -> None:
    rows = [[0] * length for length in (5, 300, 7, 600, 200, 6)]
    parts = parts_of_rows(rows)
    assert sorted(i for part in parts for i in part) == [*range(6)]
    assert parts[0] == [0, 5, 2] and [3] in parts
    for part in parts:
        assert len(part) == 1 or len(part) * max(len(rows[i]) for i in part) <= MOST_PART


def test_keys_are_asked_for(decoder: SpeculativeDecoder, tmp_path: Path) -> None:
    with serving(api_keys=["secret"]) as served:
        for path in ("/v1/embeddings", "/v1/rerank", "/v2/rerank"):
            assert served.post(path, input="1").status_code == 401
