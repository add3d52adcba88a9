"""What the server answers, also to OpenAI's own client."""

import asyncio
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from speculative_t5.generation import GenerationOptions
from speculative_t5.serve import Settings, make_app
from speculative_t5.serve.completions import as_event

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving import FAIL, PATIENCE, STALL, FakeService, Served, served_as, serving

pytestmark = pytest.mark.anyio
MESSAGES: Any = [{"role": "user", "content": "a b c"}]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as running:
        yield running


def texts(served: Served, **fields: Any) -> list[str]:
    """The texts of the choices, whose numbers must be in order."""
    response = served.post(**fields)
    assert response.status_code == 200, response.text
    choices = response.json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(len(choices)))
    return [choice["text"] for choice in choices]


def test_a_completion_has_the_protocols_fields(served: Served) -> None:
    found = served.post(model="tiny", prompt="one two three").json()
    assert found.pop("id").startswith("cmpl-") and found.pop("created") > 1_700_000_000
    assert found == {
        "object": "text_completion",
        "model": "tiny",
        "choices": [
            {"index": 0, "text": "ONE TWO THREE", "logprobs": None, "finish_reason": "stop"}
        ],
        # Four tokens are emitted: EOS is one.
        "usage": {"prompt_tokens": 4, "completion_tokens": 4, "total_tokens": 8},
    }


def test_prompts_are_text_or_ids_one_or_several(served: Served) -> None:
    """The samples of a prompt come after one another."""
    assert texts(served, prompt="one two") == ["ONE TWO"]
    assert texts(served, prompt=[1, 2]) == ["1 2"]
    assert texts(served, prompt=[[1, 2], [3]]) == ["1 2", "3"]
    found = texts(served, prompt=["one", "two"], n=2, temperature=0.5)
    assert found == ["ONE", "ONE AGAIN", "TWO", "TWO AGAIN"]
    for fields, reason in (({}, "stop"), ({"max_tokens": 1}, "length"), ({"stop": "B"}, "stop")):
        (choice,) = served.post(prompt="a b", **fields).json()["choices"]
        assert choice["finish_reason"] == reason


def test_options_reach_the_service(served: Served) -> None:
    fields = {
        "max_tokens": 9, "temperature": 0.5, "top_k": 3, "top_p": 0.5, "seed": 2**40, "n": 2,
        "stop": "X", "stop_token_ids": [5], "logit_bias": {"17": -100}, "repetition_penalty": 1.5,
        "no_repeat_ngram_size": 3, "min_tokens": 1, "suppress_tokens": [4],
        "bad_words": ["a", [1, 2]], "forced_tokens": [7], "speculative": False,
    }  # fmt: skip
    assert served.post(prompt="a", **fields).status_code == 200
    renamed = {**fields, "num_return_sequences": fields.pop("n")}
    renamed.pop("n")
    expected = GenerationOptions(**renamed | {"logit_bias": {17: -100.0}})
    assert served.service.calls[-1].options == expected
    assert served.post(prompt="a", top_k=-1).status_code == 200
    assert served.service.calls[-1].options == GenerationOptions()


def test_nulls_and_what_has_no_effect_are_left_out(served: Served) -> None:
    names = (
        "model max_tokens temperature top_p n stream stop seed logit_bias logprobs echo suffix "
        "best_of presence_penalty frequency_penalty user stream_options tools speculative_t5"
    ).split()
    harmless = {
        "best_of": 1, "echo": False, "presence_penalty": 0.0, "user": "me", "metadata": {"a": "b"},
        "store": True, "stream_options": {"include_usage": None, "more": 1}, "tool_choice": "none",
        "response_format": {"type": "text"}, "logprobs": False,
    }  # fmt: skip
    for fields in (dict.fromkeys(names), harmless):
        assert texts(served, prompt="a", **fields) == ["A"]
        assert served.service.calls[-1].options == GenerationOptions()


def test_the_servers_options_are_the_defaults() -> None:
    """Several outputs are for sampling only."""
    defaults = GenerationOptions(max_tokens=2, temperature=0.5, seed=3, num_return_sequences=3)
    with serving(defaults=defaults) as served:
        assert texts(served, prompt="a b c") == ["A B"] * 3
        assert texts(served, prompt="a b c", n=2, best_of=2) == ["A B"] * 2
        assert texts(served, prompt="a b c", max_tokens=1, temperature=0) == ["A"]
        first, _, last = (call.options for call in served.service.calls)
        assert (first, last) == (defaults, GenerationOptions(max_tokens=1, seed=3))
    with serving(draw_seeds=True) as served:
        for fields in ({}, {}, {"seed": 5}):
            served.post(prompt="a", temperature=1, **fields)
        drawn, again, given = (call.options.seed for call in served.service.calls)
        assert drawn != again and given == 5


def test_a_stream_has_rounds_then_the_end_then_usage(served: Served) -> None:
    *parts, usage, done = served.events(prompt="a b c", stream_options={"include_usage": True})
    assert done == "[DONE]"
    found = [json.loads(part) for part in parts]
    assert {(part["object"], part["model"]) for part in found} == {("text_completion", "tiny")}
    assert len({part["id"] for part in found}) == 1
    choices = [choice for part in found for choice in part["choices"]]
    assert [(each["text"], each["finish_reason"]) for each in choices] == [
        ("A B", None),
        (" C", None),
        ("", "stop"),
    ]
    last = json.loads(usage)
    assert last["choices"] == []
    assert last["usage"] == {"prompt_tokens": 4, "completion_tokens": 4, "total_tokens": 8}
    assert all("usage" not in part for part in found)


def test_a_stream_of_several_outputs_names_each(served: Served) -> None:
    *parts, done = map(str, served.events(prompt=["a b c", "d"], n=2, temperature=1))
    ends = {0: "", 1: "", 2: "", 3: ""}
    for part in parts:
        (choice,) = json.loads(part)["choices"]
        ends[choice["index"]] += choice["text"]
    assert ends == {0: "A B C", 1: "A B C AGAIN", 2: "D", 3: "D AGAIN"} and done == "[DONE]"


def test_origins_and_statistics_come_if_asked_for(served: Served) -> None:
    first, *_ = served.events(prompt="a b c", speculative_t5=True)
    assert json.loads(first)["choices"][0]["speculative_t5"] == {
        "tokens": [{"text": "A", "origin": "accepted"}, {"text": " B", "origin": "bonus"}],
        "stats": {"rounds": 1, "drafted": 1, "accepted": 1, "emitted": 2, "seconds": 0.01},
    }
    whole = served.post(prompt="a b c", speculative_t5=True).json()["choices"][0]
    assert [token["text"] for token in whole["speculative_t5"]["tokens"]] == ["A", " B", " C"]
    assert whole["speculative_t5"]["stats"]["emitted"] == 4


def test_a_stream_that_waits_gets_pings() -> None:
    with serving(ping_seconds=0.01) as served:
        fields = {"prompt": f"a b {STALL}", "stream": True}
        with served.client.stream("POST", "/v1/completions", json=fields) as response:
            lines = response.iter_lines()
            assert next(line for line in lines if line.startswith(":")) == ": ping"
            served.service.let_go()
            assert [line for line in lines if line][-1] == "data: [DONE]"


async def test_the_last_events_come_with_the_end() -> None:
    """One write instead of several, for the last round, its reason and the end."""
    bodies: list[tuple[bytes, bool]] = []
    asked = [b'{"prompt": "a b c", "stream": true}']

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            bodies.append((message["body"], message["more_body"]))

    async def receive() -> Any:
        if asked:
            return {"type": "http.request", "body": asked.pop(), "more_body": False}
        await asyncio.Event().wait()

    service, others = FakeService(), asyncio.all_tasks()

    models = served_as("tiny", service)
    models.start()
    app = make_app(models, Settings(GenerationOptions()))
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    await app(scope, receive, send)
    assert service.calls[0].cancelled.is_set() and asyncio.all_tasks() == others
    (first, more), (last, no_more) = bodies
    assert b"A B" in first and b'" C"' in last and b'"stop"' in last and b"[DONE]" in last
    assert more and not no_more


def test_a_t5_answers_the_last_message_of_the_user(served: Served) -> None:
    parts = [{"type": "text", "text": "how "}, {"type": "text", "text": "now"}]
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "last"},
    ]
    path = "/v1/chat/completions"
    found = served.post(path, messages=messages, max_tokens=9, max_completion_tokens=1).json()
    assert found["object"] == "chat.completion" and found["id"].startswith("chatcmpl-")
    message = {"role": "assistant", "content": "HOW", "refusal": None}
    (choice,) = found["choices"]
    assert choice["message"] == message and choice["finish_reason"] == "length"
    *parts_found, done = served.events(path, messages=messages)
    deltas = [json.loads(part)["choices"][0]["delta"] for part in parts_found]
    assert deltas == [
        {"role": "assistant", "content": ""},
        {"content": "HOW NOW"},
        {},
    ]
    assert json.loads(parts_found[0])["object"] == "chat.completion.chunk" and done == "[DONE]"


def test_a_model_with_a_template_reads_a_whole_chat() -> None:
    methods = dict.fromkeys(("encode", "decode", "encode_chat"), str)
    chats = SimpleNamespace(has_chat_template=True, vocabulary=None, **methods)
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "hi"}]
    path, service = "/v1/chat/completions", FakeService(tokenizer=chats)
    with serving(service) as served:
        found = served.post(path, messages=messages).json()
        assert found["choices"][0]["message"]["content"] == "BE BRIEF HI"
        assert service.calls[-1].prompts == [
            [{"role": "system", "content": "be brief"}, messages[1]]
        ]
        service.tokenizer = None
        found = served.post(path, messages=messages).json()
        assert found["choices"][0]["message"]["content"] == "HI", "the last message alone"


def test_models_are_listed_by_name() -> None:
    with serving(model="google/tiny") as served:
        listed = served.client.get("/v1/models").json()
        assert listed["object"] == "list" and [each["id"] for each in listed["data"]] == [
            "google/tiny"
        ]
        assert served.client.get("/v1/models/google/tiny").json() == listed["data"][0]
        missing = served.client.get("/v1/models/google")
        assert missing.status_code == 404 and missing.json()["error"]["code"] == "model_not_found"


def test_health_follows_the_service() -> None:
    with serving() as served:
        for state, status in (("loading", 503), ("failed", 503), ("stopping", 503), ("ready", 200)):
            served.service.state = state  # type: ignore[assignment]
            response = served.client.get("/health")
            assert (response.status_code, response.json()) == (status, {"status": state})


def test_metrics_count_requests_tokens_and_times() -> None:
    with serving() as served:
        served.post(prompt="a")
        served.events(prompt="a b c")
        served.events(prompt=f"a b {FAIL}")  # fails after its first tokens
        served.post(prompt="")
        served.client.get("/v1/models/tiny")
        served.client.get("/nothing")
        text = served.client.get("/metrics").text
    found = {
        (sample.name.removeprefix("speculative_t5_"), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    requests = {key[1:]: value for key, value in found.items() if key[0] == "requests_total"}
    assert requests == {
        ("/v1/completions", "200"): 3,
        ("/v1/completions", "400"): 1,
        ("/v1/models", "200"): 1,
        ("other", "404"): 1,
    }
    figures = {
        "ready": 1, "queued": 2, "rows": 3, "rounds_total": 40, "drafted_total": 50,
        "accepted_total": 30, "emitted_total": 90, "prompt_tokens_total": 70, "failures_total": 1,
        "seconds_since_round": 0.5, "first_token_seconds_count": 3, "request_seconds_count": 2,
    }  # fmt: skip
    assert {name: found[name,] for name in figures} == figures


def test_events_have_no_ends_of_lines_that_some_clients_see() -> None:
    event = as_event({"text": "a\u2028b\u0085c ☕"})
    assert len(event.splitlines()) == 2  # the event and the blank line after it
    assert json.loads(event.removeprefix("data: ")) == {"text": "a\u2028b\u0085c ☕"}


def connected(served: Served, key: str = "right", retries: int = 0) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{served.url}/v1", api_key=key, max_retries=retries, timeout=PATIENCE
    )


def test_openais_client_reads_completions_chats_models_and_errors(served: Served) -> None:
    with connected(served) as client:
        done = client.completions.create(
            model="tiny", prompt="a b c", extra_body={"top_k": 5, "speculative_t5": True}
        )
        assert done.choices[0].text == "A B C" and served.service.calls[-1].options.top_k == 5
        assert done.choices[0].model_extra is not None
        assert done.choices[0].model_extra["speculative_t5"]["stats"]["emitted"] == 4
        with client.chat.completions.stream(model="tiny", messages=MESSAGES) as said:
            assert said.get_final_completion().choices[0].message.content == "A B C"
        assert [model.id for model in client.models.list()] == ["tiny"]
        stream = client.completions.create(model="tiny", prompt=f"a b {FAIL}", stream=True)
        assert next(stream).choices[0].text == "A B"
        with pytest.raises(openai.APIError, match="decoding has failed"):
            next(stream)


def test_a_wrong_key_is_an_error_and_a_full_queue_is_tried_again() -> None:
    with (
        serving(api_keys=["right"]) as guarded,
        connected(guarded, "wrong") as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()
    with serving(FakeService(busy=1)) as served, connected(served, retries=1) as client:
        assert client.completions.create(model="tiny", prompt="a").choices[0].text == "A"
        served.service.busy = 2
        with pytest.raises(openai.RateLimitError, match="the queue is full"):
            client.completions.create(model="tiny", prompt="a")
