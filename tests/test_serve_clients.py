"""OpenAI's own client against the server, synchronous and asynchronous."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from serving import FAIL, PATIENCE, STALL, FakeService, Served, serving

CHAT: Any = [{"role": "user", "content": "a b c"}]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(api_keys=["right"], max_body=10_000) as running:
        yield running


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with connected(served) as made:
        yield made


def connected(served: Served, key: str = "right", retries: int = 0) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{served.url}/v1", api_key=key, max_retries=retries, timeout=PATIENCE
    )


def test_completions(client: openai.OpenAI, served: Served) -> None:
    more = {"top_k": 5, "repetition_penalty": 1.5, "speculative": False, "speculative_t5": True}
    done = client.completions.create(model="tiny", prompt="a b c", extra_body=more)
    assert done.choices[0].text == "A B C" and done.choices[0].finish_reason == "stop"
    assert done.usage is not None and done.usage.completion_tokens == 4
    extra = done.choices[0].model_extra
    assert extra is not None and extra["speculative_t5"]["stats"]["emitted"] == 4
    options = served.service.calls[-1].options
    assert (options.top_k, options.repetition_penalty, options.speculative) == (5, 1.5, False)
    many = client.completions.create(model="tiny", prompt=[[1, 2], [3]], n=2, temperature=1, seed=3)
    assert [choice.text for choice in many.choices] == ["1 2", "1 2 AGAIN", "3", "3 AGAIN"]


def test_streams(client: openai.OpenAI) -> None:
    usage: Any = {"include_usage": True}
    parts = list(
        client.completions.create(model="tiny", prompt="a b c", stream=True, stream_options=usage)
    )
    assert "".join(part.choices[0].text for part in parts[:-1]) == "A B C"
    assert parts[-1].usage is not None and parts[-1].usage.total_tokens == 8
    chat = client.chat.completions.create(
        model="tiny", messages=CHAT, stream=True, stream_options=usage
    )
    *said, last = chat
    assert "".join(part.choices[0].delta.content or "" for part in said) == "A B C"
    assert said[0].choices[0].delta.role == "assistant"
    assert said[-1].choices[0].finish_reason == "stop"
    assert last.choices == [] and last.usage is not None


def test_chats(client: openai.OpenAI) -> None:
    done = client.chat.completions.create(model="tiny", messages=CHAT, max_completion_tokens=2)
    assert done.choices[0].message.content == "A B"
    assert done.choices[0].finish_reason == "length"
    with client.chat.completions.stream(model="tiny", messages=CHAT) as stream:
        assert stream.get_final_completion().choices[0].message.content == "A B C"


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "speculative_t5"
    with pytest.raises(openai.NotFoundError, match="there is no model 'large' here"):
        client.models.retrieve("large")


@pytest.mark.parametrize(
    ("error", "fields"),
    [
        (openai.BadRequestError, {"prompt": ""}),
        (openai.BadRequestError, {"logprobs": 2}),
        (openai.NotFoundError, {"model": "gpt-4"}),
        (openai.InternalServerError, {"prompt": FAIL}),
        (openai.APIStatusError, {"prompt": "a" * 1_000_000}),  # more than sockets hold
    ],
)
def test_errors_are_those_of_the_client(
    client: openai.OpenAI, error: type[openai.APIStatusError], fields: dict[str, Any]
) -> None:
    with pytest.raises(error) as found:
        client.completions.create(**{"model": "tiny", "prompt": "a"} | fields)
    assert isinstance(found.value.body, dict) and found.value.body["message"]


def test_a_wrong_key_is_an_authentication_error(served: Served) -> None:
    with connected(served, "wrong") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_an_error_within_a_stream_is_raised(client: openai.OpenAI) -> None:
    stream = client.completions.create(model="tiny", prompt=f"a b {FAIL}", stream=True)
    assert next(stream).choices[0].text == "A B"
    with pytest.raises(openai.APIError, match="decoding has failed"):
        next(stream)


def test_a_full_queue_is_tried_again() -> None:
    with serving(FakeService(busy=1)) as served, connected(served, retries=1) as client:
        assert client.completions.create(model="tiny", prompt="a").choices[0].text == "A"
        served.service.busy = 2
        with pytest.raises(openai.RateLimitError, match="the queue is full"):
            client.completions.create(model="tiny", prompt="a")


def test_the_asynchronous_client(served: Served) -> None:
    """Several requests at once; cancelling a task frees its rows."""

    async def one(client: openai.AsyncOpenAI, number: int) -> str:
        prompt = f"n {number} x"
        if number % 2:
            done = await client.completions.create(model="tiny", prompt=prompt)
            return done.choices[0].text
        stream = await client.completions.create(model="tiny", prompt=prompt, stream=True)
        return "".join([part.choices[0].text async for part in stream])

    async def test() -> None:
        async with openai.AsyncOpenAI(
            base_url=f"{served.url}/v1", api_key="right", max_retries=0, timeout=PATIENCE
        ) as client:
            found = await asyncio.gather(*(one(client, number) for number in range(10)))
            assert found == [f"N {number} X" for number in range(10)]
            served.service.forget_calls()
            asking = asyncio.create_task(client.completions.create(model="tiny", prompt=STALL))
            call = await asyncio.to_thread(served.service.last_call)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            assert await asyncio.to_thread(call.cancelled.wait, PATIENCE)

    asyncio.run(test())


def test_langchain_sends_lists_and_nulls(served: Served) -> None:
    """Its requests, without its packages: importing them takes seconds."""
    fields = {
        "model": "tiny", "frequency_penalty": 0, "logprobs": None, "max_tokens": 2, "n": 1,
        "presence_penalty": 0, "seed": None, "temperature": 0.0, "top_p": 1,
    }  # fmt: skip
    served.client.headers["authorization"] = "Bearer right"
    done = served.post(prompt=["a b c", "d"], **fields).json()
    assert [choice["text"] for choice in done["choices"]] == ["A B", "D"]
    assert len(served.events(prompt="a b c", **fields)) == 3
    messages = [{"content": "a b c", "role": "user"}]
    done = served.post("/v1/chat/completions", model="tiny", stream=False, messages=messages).json()
    assert done["choices"][0]["message"]["content"] == "A B C"
