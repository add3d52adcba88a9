"""Outputs of sentences that a server keeps: by what, for whom, and how many."""

import contextlib
import pickle
import random
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from speculative_t5 import SpeculativeDecoder
from speculative_t5.cli.options import DecoderOptions
from speculative_t5.cli.serve import _to_serve
from speculative_t5.decoding import Logprob, Stats
from speculative_t5.generation import Generation, GenerationOptions
from speculative_t5.serve import Models, Service
from speculative_t5.serve import Served as Model
from speculative_t5.serve.sentences import KeptOutputs, SentenceCache, key_of_sentence, size_of

import language_tool_python
import pytest
from libretranslatepy import LibreTranslateAPI  # type: ignore[import-untyped]
from serving import Served, serving, wait_until
from test_languages import make_translator
from test_serve_texts import LEARNERS

OPTIONS = GenerationOptions(max_tokens=64, logprobs=0)


def output_of(text: str, *, judged: bool = True) -> Generation:
    tokens = [1000 + len(word) for word in text.split()]
    logprobs = tuple(Logprob(-0.1 * token, {}) for token in tokens)
    counts = (2,) * max(len(tokens), 1)
    stats = Stats(counts, tuple(counts), tuple(counts), len(tokens) + 1, 0.5)
    return Generation(text, tokens, "eos", stats, logprobs=logprobs if judged else None)


def test_a_key_has_all_that_an_output_depends_on() -> None:
    key = key_of_sentence(("a", 0), OPTIONS, [5, 6, 1])
    same = GenerationOptions(max_tokens=64, logprobs=0)
    assert key == key_of_sentence(("a", 0), same, (5, 6, 1))
    others = [
        key_of_sentence(("b", 0), OPTIONS, [5, 6, 1]),
        key_of_sentence(("a", 1), OPTIONS, [5, 6, 1]),  # loaded again
        key_of_sentence(("a", 0), OPTIONS, [5, 6]),
    ]
    for change in ({"max_tokens": 65}, {"seed": 1}, {"logprobs": None}, {"speculative": False}):
        others.append(key_of_sentence(("a", 0), replace(OPTIONS, **change), [5, 6, 1]))
    assert len({key, *others}) == 1 + len(others)


def test_the_least_recently_used_make_room() -> None:
    one = size_of(output_of("a b"), 3)
    kept = KeptOutputs(3 * one + one // 2)
    for name in "abcd":
        kept.keep(name, output_of("a b"), 3)
        if name == "c":
            assert kept.get("a") is not None  # and so b is the oldest
    assert [kept.get(name) is not None for name in "abcd"] == [True, False, True, True]
    assert len(kept) == 3 and kept.size == 3 * one
    kept.keep("e", output_of("a b " * 10_000), 3)  # more than there is room for
    assert len(kept) == 3 and kept.get("e") is None
    kept.keep("a", output_of("another"), 3)
    assert kept.get("a") == output_of("a b") and kept.size == 3 * one
    assert KeptOutputs(0).get("a") is None


def test_what_is_kept_takes_about_the_memory_that_is_counted() -> None:
    for words, judged in [(1, True), (15, True), (15, False), (400, True)]:
        tracemalloc.start()
        kept = KeptOutputs(1e9)
        for number in range(300):
            ids = [number + 30_000 + place for place in range(words)]
            text = " ".join(f"w{number:05}{place:05}" for place in range(words))
            own = pickle.loads(pickle.dumps(OPTIONS))  # as they come from another process
            key = key_of_sentence(("model", 0), own, ids)
            kept.keep(key, output_of(text, judged=judged), len(ids))
        taken, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert len(kept) == 300
        assert 0.6 * kept.size < taken < 1.1 * kept.size, (words, judged, taken, kept.size)


def test_each_holder_of_a_key_has_room_of_their_own() -> None:
    one = size_of(output_of("a b"), 3)
    cache = SentenceCache(4 * one, ["first", "second"])
    mine, others = cache.of("first"), cache.of("second")
    assert cache.of("first") is mine and mine is not others
    mine.keep("sentence", output_of("a b"), 3)
    assert others.get("sentence") is None
    for number in range(100):  # takes none of the first one's room
        others.keep(number, output_of("a b"), 3)
    assert mine.get("sentence") is not None and len(others) == 2
    open_to_all = SentenceCache(4 * one)
    assert open_to_all.of(None) is open_to_all.of(None)


@pytest.mark.parametrize("text", ["", "a", "a b c"])
def test_an_output_comes_back_as_it_was(text: str) -> None:
    kept = KeptOutputs(1e6)
    kept.keep("key", output_of(text), 3)
    assert kept.get("key") == output_of(text)


# In a server, with the shipped pair:


def edited(text: str, draw: random.Random) -> str:
    """A text with one word of it changed, as somebody writes on."""
    words = text.split(" ")
    words[draw.randrange(len(words))] = draw.choice(["has", "very", "the", "goes,", "house"])
    return " ".join(words)


@pytest.fixture(scope="module")
def shipped() -> SpeculativeDecoder:
    return SpeculativeDecoder.from_pretrained("correct-base")


@pytest.fixture
def correcting(shipped: SpeculativeDecoder) -> Callable[..., Any]:
    """Serves the shipped pair in a server of its own, with these settings."""

    @contextlib.contextmanager
    def run(**settings: Any) -> Iterator[Served]:
        service = Service(lambda: shipped)
        own = Model("correct-base", lambda: service, lambda: shipped.tokenizer)
        with serving(Models([own]), **settings) as server:
            wait_until(lambda: server.client.get("/health").status_code == 200)
            server.service = service  # type: ignore[assignment]
            yield server

    return run


def test_an_edited_text_costs_what_has_changed(correcting: Any) -> None:
    draw, text = random.Random(3), " ".join(LEARNERS[:20])
    with correcting() as server, correcting(sentence_bytes=0) as other:
        before, first = 0.0, 0.0
        for number in range(8):
            answers = [
                each.post("/v2/check", text=text, language="en", level="picky").json()
                for each in (server, other)
            ]
            assert answers[0] == answers[1] and (number or answers[0]["matches"])
            emitted = server.service.figures()["emitted"]
            first = first or emitted
            assert number == 0 or 0 < emitted - before < first / 5
            before, text = emitted, edited(text, draw)
        assert other.service.figures()["emitted"] > 7 * first


def test_clients_get_the_same_whether_outputs_are_kept_or_not(
    correcting: Any, tmp_path: Path
) -> None:
    """Those of LanguageTool and LibreTranslate, twice each."""
    text = "My sister have never been too paris. Its expensive."
    found: list[Any] = []
    for settings in ({}, {"sentence_bytes": 0}):
        with correcting(**settings) as server:
            tool = language_tool_python.LanguageTool("en", remote_server=server.url)
            matches = [tool.check(text), tool.check(text)]
            found.append(
                [[(m.offset, m.replacements, m.message) for m in each] for each in matches]
            )
            tool.close()
    assert found[0] == found[1] and found[0][0] == found[0][1] and found[0][0]
    folder = make_translator(tmp_path)
    options = DecoderOptions(model=str(folder))
    answers: list[Any] = []
    for settings in ({}, {"sentence_bytes": 0}):
        models = Models([_to_serve(options, 4, 64)])
        with serving(models, **settings) as server:
            wait_until(lambda models=models: models.state == "ready")
            client = LibreTranslateAPI(server.url + "/")
            asked = [
                (q, to) for q in ("1, 2, 3. A b c.", "A b c. d e") for to in ("de", "fr", "de")
            ]
            answers.append([client.translate(q, "en", to) for q, to in asked])
    assert answers[0] == answers[1]
    assert len({*answers[0]}) > 1, "a language is not answered by another's"


def test_no_key_holder_is_answered_by_what_another_has_asked(correcting: Any) -> None:
    body = {"text": " ".join(LEARNERS[:5]), "language": "en"}
    costs = []
    with correcting(api_keys=["abc", "def"]) as server:
        for key in ("abc", "def", "abc", "def"):
            before = server.service.figures()["emitted"]
            answer = server.post("/v2/check", **body, apiKey=key)
            assert answer.status_code == 200
            costs.append(server.service.figures()["emitted"] - before)
        headers = {"Authorization": "Bearer abc"}
        before = server.service.figures()["emitted"]
        assert server.client.post("/v2/check", json=body, headers=headers).status_code == 200
        costs.append(server.service.figures()["emitted"] - before)
    assert costs == [costs[0], costs[0], 0, 0, 0] and costs[0] > 0
