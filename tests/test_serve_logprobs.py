"""Probabilities of tokens over HTTP, in the protocol of OpenAI, spoken by its own client."""

import json
import re
from collections.abc import Iterator
from typing import Any

from speculative_t5 import SpeculativeDecoder
from speculative_t5.serve import Service

import openai
import pytest
from serving import Served, served_as, serving, wait_until

LOGGED = "She have to apples, and he dont likes them."
CHAT: dict[str, Any] = {
    "model": "correct-base",
    "messages": [{"role": "user", "content": LOGGED}],
    "logprobs": True,
    "top_logprobs": 2,
}


@pytest.fixture(scope="module")
def shipped() -> SpeculativeDecoder:
    return SpeculativeDecoder.from_pretrained("correct-base")


@pytest.fixture(scope="module")
def server(shipped: SpeculativeDecoder) -> Iterator[Served]:
    models = served_as("correct-base", Service(lambda: shipped))
    with serving(models) as running:
        wait_until(lambda: models.state == "ready")  # or a request may be refused
        yield running


@pytest.fixture
def client(server: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")


def test_logprobs_are_those_of_the_model(
    client: openai.OpenAI, shipped: SpeculativeDecoder
) -> None:
    done = shipped.generate(LOGGED)
    wanted = shipped.log_probabilities(shipped.encode(LOGGED), done.tokens, 5)
    assert sum(value for value, _ in wanted) > -3
    about = client.completions.create(model="correct-base", prompt=LOGGED, logprobs=5).choices[0]
    assert about.text == done.text and about.logprobs
    assert about.logprobs.tokens == [*done.pieces] and "".join(done.pieces) == done.text
    assert about.logprobs.token_logprobs == pytest.approx([value for value, _ in wanted], abs=1e-4)
    assert about.logprobs.text_offset and about.logprobs.text_offset[:3] == [0, 3, 7]
    for token, top, (value, best) in zip(
        about.logprobs.tokens, about.logprobs.top_logprobs or [], wanted, strict=True
    ):
        assert [*best.values()] == sorted(best.values(), reverse=True) and len(best) == 5
        assert top[token] == pytest.approx(value, abs=1e-4) == max(best.values())


def test_logprobs_of_a_chat_have_bytes_and_as_many_tokens_as_asked(
    client: openai.OpenAI, shipped: SpeculativeDecoder
) -> None:
    chat = client.chat.completions.create(**CHAT).choices[0].logprobs
    assert chat and chat.content
    assert [token.token for token in chat.content] == [*shipped.generate(LOGGED).pieces]
    assert all(bytes(token.bytes or []).decode() == token.token for token in chat.content)
    tops = [(token.token, token.top_logprobs) for token in chat.content]
    assert all(len(top) == 2 and top[0].token == token for token, top in tops)


def test_logprobs_of_a_stream_are_those_of_the_whole(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**CHAT).choices[0].logprobs
    assert whole and whole.content
    streamed: list[Any] = []
    for event in client.chat.completions.create(**CHAT, stream=True):
        choice = event.choices[0]
        added = (choice.logprobs and choice.logprobs.content) or []
        assert "".join(each.token for each in added) == (choice.delta.content or "")
        streamed += added
    assert [t.model_dump() for t in streamed] == [t.model_dump() for t in whole.content]


def test_logprobs_come_with_the_rounds_of_a_stream() -> None:
    """Nothing is held back until the output has ended, and nothing is decoded a second time."""
    plain = SpeculativeDecoder.from_pretrained("correct-base", None)
    models = served_as("correct-base", Service(lambda: plain))
    with serving(models) as running:
        wait_until(lambda: models.state == "ready")
        fields = {"prompt": LOGGED, "stream": True, "logprobs": 1, "max_tokens": 400}
        fields |= {"min_tokens": 400, "temperature": 1.0, "seed": 1}
        with running.client.stream("POST", "/v1/completions", json=fields) as response:
            lines = (line for line in response.iter_lines() if line)
            first = json.loads(next(lines).removeprefix("data: "))
            assert first["choices"][0]["logprobs"]["token_logprobs"]
            emitted = "speculative_t5_emitted_total"
            (now,) = re.findall(rf"^{emitted} (\d+)", running.client.get("/metrics").text, re.M)
            assert int(now) < 300, "the first event is there before the output has ended"


def test_samples_have_logprobs_of_their_own_and_only_if_asked(client: openai.OpenAI) -> None:
    several = client.completions.create(
        model="correct-base", prompt=[LOGGED, "He go."], n=2, temperature=1, seed=3, logprobs=0
    ).choices
    for choice in several:
        assert choice.logprobs and "".join(choice.logprobs.tokens or []) == choice.text
        assert choice.logprobs.top_logprobs == [{}] * len(choice.logprobs.tokens or [])
    without = client.completions.create(model="correct-base", prompt=LOGGED).choices[0]
    assert without.logprobs is None
