"""The page of the server: what it is made of, and, in a browser, what it does.

The browser is Chromium or Chrome, and Playwright drives it (pip install playwright).
"""

import asyncio
import base64
import hashlib
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

from speculative_t5.decoding import FinishReason
from speculative_t5.decoding.results import Tally
from speculative_t5.generation import ORIGIN_CSS, ORIGIN_MEANINGS, Chunk, GenerationOptions
from speculative_t5.serve.page import CONTENT_POLICY, PAGE_HTML
from speculative_t5.serve.requests import Refused

import pytest
from browsing import needs_browser, text, wait_for
from serving import (
    PATIENCE,
    FakeCall,
    FakeService,
    Served,
    is_there,
    serving,
    wait_until,
)


def test_colours_and_legend_are_those_of_notebooks() -> None:
    for kind, style in ORIGIN_CSS.items():
        assert (f".{kind} {{ {style};" in PAGE_HTML) == bool(style)
        meaning = ORIGIN_MEANINGS[kind].replace("'", "&#x27;")
        assert f'<b class="{kind}">{kind}</b> {meaning}' in PAGE_HTML


def test_the_page_loads_nothing_and_its_policy_allows_nothing_else(server: Served) -> None:
    response = server.client.get("/")
    assert response.headers["content-type"].startswith("text/html") and response.text == PAGE_HTML
    assert response.headers["content-security-policy"] == CONTENT_POLICY
    assert not re.search(r"https?:|//\w|url\(|@import|\bsrc=|<iframe|<object", PAGE_HTML)
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", PAGE_HTML
    )
    assert not re.search(r"localStorage|sessionStorage|indexedDB|cookie", PAGE_HTML)
    policy = dict(part.split(" ", 1) for part in CONTENT_POLICY.split("; "))
    assert policy["default-src"] == "'none'" and policy["connect-src"] == "'self'"
    for tag, rule in (("script", "script-src"), ("style", "style-src")):
        ((inside),) = re.findall(f"<{tag}>(.*?)</{tag}>", PAGE_HTML, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert policy[rule] == f"'sha256-{digest}'"


def test_fields_have_labels_and_nothing_is_inline() -> None:
    fields = re.findall(r'<(?:input|textarea|select)[^>]* id="(\w+)"', PAGE_HTML)
    assert fields == [
        "mode_correct",
        "mode_translate",
        "mode_try",
        "prompt",
        "file",
        "models",
        "language",
        "from",
        "to",
        "live",
        "max_tokens",
        "temperature",
        "speculative",
        "key",
    ]
    labels = re.findall(r"<label.*?</label>", PAGE_HTML, re.DOTALL)
    for field in fields:
        assert any(f'for="{field}"' in each or f'id="{field}"' in each for each in labels), field
    assert not re.search(
        r"<[^>]+ (style|on\w+)=", re.sub(r"<script>.*</script>", "", PAGE_HTML, flags=re.S)
    )


# Pieces of rounds, text beyond theirs, and tokens drafted, accepted and emitted.
SPECULATIVE = [
    (["He", " <b>is</b>", " &"], "", (5, 2, 3)),
    ([" here", "", " \u2603"], "", (2, 2, 3)),
    (["\n<img src=x onerror=alert(1)>"], ".", (1, 1, 2)),
]
PLAIN = [
    (["He <b>is</b>"], "", (0, 0, 1)),
    ([" & here \u2603"], "", (0, 0, 1)),
    (["\n<img src=x onerror=alert(1)>"], ".", (0, 0, 1)),
]
TEXT = "He <b>is</b> & here \u2603\n<img src=x onerror=alert(1)>."
REFUSAL = "max_tokens must be at least 1, got 0"
FAILURE = "decoding failed: generate it again"


class PageCall(FakeCall):
    """A prompt says what happens: "fail", "break" or "wait" after the first round, or no such."""

    async def chunks(self, patience: float | None = None) -> AsyncIterator[tuple[int, Chunk]]:
        tally, (prompt,) = Tally(), self.prompts
        rounds = SPECULATIVE if self.options.speculative else PLAIN
        for pieces, rest, (drafted, accepted, emitted) in rounds:
            tally.add(drafted, drafted, accepted, emitted)
            stats = tally.stats(0.25 * tally.rounds)
            last: FinishReason | None = "eos" if rest else None
            text = "".join(pieces) + rest
            self.left -= last is not None
            yield 0, Chunk(text, [5] * len(pieces), accepted, stats, last, tuple(pieces))
            if prompt == "fail":
                raise Refused(500, FAILURE)
            if prompt == "break":
                return
            if prompt == "wait":
                self.stalled.set()
                await asyncio.Event().wait()


class PageService(FakeService):
    """A service of scripted outputs; it refuses the prompt "refuse"."""

    makes = PageCall

    def submit(self, prompts: Any, options: GenerationOptions, field: str = "prompt") -> FakeCall:
        if prompts == ["refuse"]:
            raise ValueError(REFUSAL)
        return super().submit(prompts, options, field)


@pytest.fixture
def server() -> Iterator[Served]:
    with serving(PageService(), model="correct-base") as made:
        yield made


def open_page(page: Any, server: Served) -> None:
    page.goto(f"{server.url}/")
    page.check("#mode_try")


def type_and_generate(page: Any, prompt: str) -> None:
    page.fill("#prompt", prompt)
    page.press("#prompt", "Control+Enter")


@needs_browser
def test_output_arrives_shaded_by_origin(page: Any, logged: list[str], server: Served) -> None:
    open_page(page, server)
    assert page.input_value("#prompt").startswith("my sister"), "an example for this model"
    page.fill("#max_tokens", "0")
    type_and_generate(page, "He are here")
    assert page.evaluate("document.activeElement.id") == "max_tokens", "nothing is sent"
    page.fill("#max_tokens", "7")
    page.fill("#temperature", "0.5")
    page.keyboard.press("Control+Enter")
    wait_for(page, "status", "Done: 8 tokens")
    (call,) = server.service.calls
    assert call.prompts == ["He are here"]
    assert call.options == GenerationOptions(max_tokens=7, temperature=0.5)
    assert text(page, "output") == TEXT
    shown = page.evaluate(
        "[...by('output').children].map(e => {"
        "const style = getComputedStyle(e);"
        "return [e.tagName, e.textContent, e.className, e.title, style.backgroundColor]})"
    )
    assert [span[:3] for span in shown] == [
        ["SPAN", "He", "accepted"],
        ["SPAN", " <b>is</b>", "accepted"],
        ["SPAN", " &", "recovered"],
        ["SPAN", " here", "accepted"],
        ["SPAN", " \u2603", "bonus"],
        ["SPAN", "\n<img src=x onerror=alert(1)>", "accepted"],
    ]
    assert shown[2][3] == "pass 1: recovered" and shown[-1][3] == "pass 3: accepted"
    assert len({span[4] for span in shown}) == 3
    assert [text(page, id) for id in ("acceptance", "per_pass", "speed")] == [
        "63 %",
        "2.67",
        "11",
    ]
    assert not logged


@needs_browser
def test_events_are_read_wherever_the_stream_is_cut(page: Any, server: Served) -> None:
    open_page(page, server)
    stream = 'data: {"text": "\u2603"}\n\n: ping\n\ndata:[DONE]\n\n'
    found = page.evaluate(
        "async stream => { const found = [], body = new ReadableStream({ start(to) {"
        "for (const byte of new TextEncoder().encode(stream)) to.enqueue(Uint8Array.of(byte));"
        "to.close(); } });"
        "for await (const data of events(new Response(body))) found.push(data);"
        "return found }",
        stream,
    )
    assert found == ['{"text": "\u2603"}', "[DONE]"]


@needs_browser
def test_runs_of_both_kinds_are_kept_and_compared(
    page: Any, logged: list[str], server: Served
) -> None:
    open_page(page, server)
    type_and_generate(page, "He are here")
    wait_for(page, "status", "Done")
    assert text(page, "comparison") == ""
    page.press("#speculative", "Space")
    page.press("#generate", "Enter")
    wait_for(page, "status", "Done: 3 tokens")
    assert server.service.calls[1].options == GenerationOptions(speculative=False)
    rows = page.evaluate(
        "[...document.querySelectorAll('#runs tr')].map(r => [...r.cells].map(c => c.textContent))"
    )
    assert rows == [
        ["speculative", "8", "3", "2.67", "63 %", "0.750", "11"],
        ["plain", "3", "3", "1.00", "\u2013", "0.750", "4"],
    ]
    assert text(page, "comparison") == (
        "Speculative decoding was 2.7 times as fast; the outputs are the same."
    )
    assert text(page, "output") == TEXT
    type_and_generate(page, "Another text")
    wait_for(page, "comparison", "The two runs had different texts")
    assert not logged


@needs_browser
@pytest.mark.parametrize("way", ["Escape", "stop"])
def test_stopping_closes_the_connection(
    page: Any, logged: list[str], server: Served, way: str
) -> None:
    open_page(page, server)
    page.fill("#prompt", "wait")
    page.click("#generate")
    wait_for(page, "output", "He <b>is</b> &")
    call = server.service.last_call()
    assert call.stalled.is_set() and not call.cancelled.is_set()
    assert page.evaluate("document.activeElement.id") == "stop"
    assert page.get_attribute("#output", "aria-busy") == "true"
    page.keyboard.press("Control+Enter")  # one run at a time
    if way == "Escape":
        page.keyboard.press("Escape")
    else:
        page.click("#stop")
    wait_for(page, "status", "Stopped")
    assert call.cancelled.wait(PATIENCE) and server.service.calls == [call]
    assert page.evaluate("document.activeElement.id") == "generate"
    assert text(page, "runs") == text(page, "error") == "" and not logged
    type_and_generate(page, "He are here")
    wait_for(page, "status", "Done")


@needs_browser
def test_errors_are_the_servers_one_line(page: Any, server: Served) -> None:
    open_page(page, server)
    type_and_generate(page, "refuse")
    wait_for(page, "error", REFUSAL)
    type_and_generate(page, "fail")
    wait_for(page, "error", FAILURE)
    assert text(page, "output") == "He <b>is</b> &"
    type_and_generate(page, "break")
    wait_for(page, "error", "the output broke off: generate it again")
    server.server.should_exit = True
    server.service.let_go()
    wait_until(lambda: not is_there(server.client))
    type_and_generate(page, "He are here")
    wait_for(page, "error", "no usable answer (Failed to fetch): check that the server")
    assert text(page, "runs") == text(page, "status") == ""


@needs_browser
def test_a_key_is_asked_for_where_the_server_wants_one(page: Any) -> None:
    with serving(PageService(), model="some-model", api_keys=["abc"]) as server:
        page.goto(f"{server.url}/")
        wait_for(page, "error", "the API key is missing")
        page.wait_for_selector("#key:focus")
        page.fill("#prompt", "He are here")
        page.fill("#key", "abc")
        page.press("#key", "Enter")
        wait_for(page, "model", "some-model")
        page.check("#mode_try")
        page.click("#generate")
        wait_for(page, "status", "Done")
    assert text(page, "error") == ""
    kept = page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]")
    assert kept == [0, 0, ""]
