"""The page of the server: what it is made of, and, in a browser, what it does."""

import asyncio
import base64
import hashlib
import json
import operator
import os
import re
import select
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from speculative_t5.decoding import FinishReason
from speculative_t5.decoding.results import Tally
from speculative_t5.generation import MEANINGS, ORIGIN_STYLES, Chunk, GenerationOptions
from speculative_t5.serve import DecodingFailed
from speculative_t5.serve.page import CSP, PAGE

import pytest
from serving import PATIENCE, FakeCall, FakeService, Served, is_there, serving, wait_until

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
SECONDS = 60  # for anything that is waited for
KEYS = {"Enter": 13, "Escape": 27, "Tab": 9, "Space": 32}
CTRL = 2
needs_browser = pytest.mark.skipif(BROWSER is None, reason="needs Chromium or Chrome")
Colour = tuple[float, ...]
ENOUGH = 4.5  # the contrast of text that WCAG 2 asks for


def contrast(*colours: Colour) -> float:
    """Return the contrast of two opaque colours that WCAG 2 defines."""
    lights = []
    for colour in colours:
        parts = [c / 255 for c in colour]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        lights.append(sum(map(operator.mul, (0.2126, 0.7152, 0.0722), linear)))
    return (max(lights) + 0.05) / (min(lights) + 0.05)


def palette(*, dark: bool) -> dict[str, Colour]:
    rules = re.findall(r":root \{([^}]*--page[^}]*)\}", PAGE)[dark]
    return {n: tuple(bytes.fromhex(c)) for n, c in re.findall(r"--(\w+): #(\w{6})", rules)}


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_all_text_stands_out(dark: bool) -> None:
    colours = palette(dark=dark)
    for name in ("ink", "faint", "wrong"):
        assert contrast(colours[name], colours["page"]) >= ENOUGH, name
    assert contrast(colours["line"], colours["page"]) >= 3  # borders of fields
    for kind, style in ORIGIN_STYLES.items():
        if shade := re.search(r"background:rgba\((.*?)\)", style):
            *above, alpha = map(float, shade[1].split(","))
            mixed = [
                alpha * a + (1 - alpha) * p for a, p in zip(above, colours["page"], strict=True)
            ]
            assert contrast(colours["ink"], tuple(mixed)) >= ENOUGH, kind


def test_colours_and_legend_are_those_of_notebooks() -> None:
    for kind, style in ORIGIN_STYLES.items():
        assert (f".{kind} {{ {style};" in PAGE) == bool(style)
        assert f'<b class="{kind}">{kind}</b> {MEANINGS[kind].replace(chr(39), "&#x27;")}' in PAGE


def test_the_page_loads_nothing_and_its_policy_allows_nothing_else(server: Served) -> None:
    response = server.client.get("/")
    assert response.headers["content-type"].startswith("text/html") and response.text == PAGE
    assert response.headers["content-security-policy"] == CSP
    assert not re.search(r"https?:|//\w|url\(|@import|\bsrc=|<iframe|<object", PAGE)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", PAGE)
    assert not re.search(r"localStorage|sessionStorage|indexedDB|cookie", PAGE)
    policy = dict(part.split(" ", 1) for part in CSP.split("; "))
    assert policy["default-src"] == "'none'" and policy["connect-src"] == "'self'"
    for tag, rule in (("script", "script-src"), ("style", "style-src")):
        ((inside),) = re.findall(f"<{tag}>(.*?)</{tag}>", PAGE, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert policy[rule] == f"'sha256-{digest}'"


def test_fields_have_labels_and_nothing_is_inline() -> None:
    fields = re.findall(r'<(?:input|textarea)[^>]* id="(\w+)"', PAGE)
    assert fields == ["prompt", "max_tokens", "temperature", "speculative", "key"]
    labels = re.findall(r"<label.*?</label>", PAGE, re.DOTALL)
    for field in fields:
        assert any(f'for="{field}"' in each or f'id="{field}"' in each for each in labels), field
    assert not re.search(
        r"<[^>]+ (style|on\w+)=", re.sub(r"<script>.*</script>", "", PAGE, flags=re.S)
    )


class Browser:
    """A tab of Chromium, which takes commands from a pipe.

    `console` has what the page has logged, errors and violated policies included.
    """

    def __init__(self, folder: Path) -> None:
        assert BROWSER is not None
        reads, self._out = os.pipe()
        self._in, writes = os.pipe()
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{reads} 4>&{writes}', "bash", BROWSER, "--headless",
             "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run",
             f"--user-data-dir={folder}/home", "--window-size=900,900", "about:blank"],
            pass_fds=(reads, writes), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(reads)
        os.close(writes)
        self._unread = b""
        self._sent = 0
        self._session: str | None = None
        self.console: list[str] = []
        pages = self.call("Target.getTargets")["targetInfos"]
        target = next(page["targetId"] for page in pages if page["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        self._session = None
        self.call("Browser.close")
        self._process.wait(SECONDS)
        os.close(self._in)
        os.close(self._out)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command, and return its result."""
        self._sent += 1
        number = self._sent
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            found = self._receive()
            if found.get("id") == number:
                assert "error" not in found, f"{method}: {found['error']}"
                result: dict[str, Any] = found["result"]
                return result

    def _receive(self) -> dict[str, Any]:
        """Return the next message, and keep what it says of the console."""
        while b"\0" not in self._unread:
            assert select.select([self._in], [], [], SECONDS)[0], "the browser does not answer"
            more = os.read(self._in, 2**20)
            assert more, f"the browser has ended with {self._process.wait(SECONDS)}"
            self._unread += more
        line, _, self._unread = self._unread.partition(b"\0")
        found: dict[str, Any] = json.loads(line)
        match found.get("method"):
            case "Runtime.exceptionThrown":
                self.console.append(json.dumps(found["params"]["exceptionDetails"]))
            case "Runtime.consoleAPICalled":
                self.console.append(json.dumps(found["params"]["args"]))
            case "Log.entryAdded" if found["params"]["entry"]["level"] in ("warning", "error"):
                self.console.append(found["params"]["entry"]["text"])
        return found

    def open(self, address: str, *, dark: bool = False) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=address)
        self.wait(f"location.href == {json.dumps(address)} && document.readyState == 'complete'")

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression in JavaScript, of a promise the one it resolves to."""
        found = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, expression: str) -> None:
        """Wait until an expression is true; it is looked at as each frame is drawn."""
        until = time.monotonic() + SECONDS
        while not self.evaluate(expression):
            assert time.monotonic() < until, f"{expression} stays false: {self.console}"
            self.evaluate("new Promise(done => setTimeout(done, 10))")

    def press(self, key: str, modifiers: int = 0) -> None:
        """Press and release a key."""
        text = {"Enter": "\r", "Space": " "}.get(key, "") if not modifiers else ""
        named = {
            "key": " " if key == "Space" else key, "code": key,
            "windowsVirtualKeyCode": KEYS[key], "modifiers": modifiers,
        }  # fmt: skip
        down = {"type": "keyDown", "text": text} if text else {"type": "rawKeyDown"}
        self.call("Input.dispatchKeyEvent", **down, **named)
        self.call("Input.dispatchKeyEvent", type="keyUp", **named)

    def write(self, text: str) -> None:
        """Put a text in where the focus is."""
        self.call("Input.insertText", text=text)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    made = Browser(tmp_path_factory.mktemp("browser"))
    yield made
    made.close()


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
            yield 0, Chunk(text, [5] * len(pieces), accepted, stats, last, tuple(pieces))
            if prompt == "fail":
                raise DecodingFailed(FAILURE)
            if prompt == "break":
                return
            if prompt == "wait":
                self.stalled.set()
                await asyncio.Event().wait()


class PageService(FakeService):
    """A service of scripted outputs; it refuses the prompt "refuse"."""

    makes = PageCall

    def submit(self, prompts: Any, options: GenerationOptions) -> FakeCall:
        if prompts == ["refuse"]:
            raise ValueError(REFUSAL)
        return super().submit(prompts, options)


@pytest.fixture
def server() -> Iterator[Served]:
    with serving(PageService(), model="some-model") as made:
        yield made


def text(browser: Browser, id: str) -> str:
    return str(browser.evaluate(f"by('{id}').textContent"))  # `by` is the page's own


def open_page(browser: Browser, server: Served, *, dark: bool = False) -> None:
    browser.console.clear()
    browser.open(f"{server.url}/", dark=dark)
    browser.wait("by('model').textContent")


def type_and_generate(browser: Browser, prompt: str) -> None:
    browser.evaluate("by('prompt').focus(), by('prompt').select()")
    browser.write(prompt)
    browser.press("Enter", CTRL)


def wait_for(browser: Browser, id: str, beginning: str) -> None:
    browser.wait(f"by('{id}').textContent.startsWith('{beginning}')")


@needs_browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_output_arrives_shaded_by_origin(browser: Browser, server: Served, dark: bool) -> None:
    open_page(browser, server, dark=dark)
    type_and_generate(browser, "He are here")
    wait_for(browser, "status", "Done: 8 tokens.")
    (call,) = server.service.calls
    assert (call.prompts, call.options) == (["He are here"], GenerationOptions())
    assert text(browser, "output") == TEXT
    shown = browser.evaluate(
        "[...by('output').children].map(e => {"
        "const style = getComputedStyle(e);"
        "return [e.tagName, e.textContent, e.className, e.title, style.backgroundColor,"
        " getComputedStyle(document.body).backgroundColor]})"
    )
    assert [span[:3] for span in shown] == [
        ["SPAN", "He", "accepted"], ["SPAN", " <b>is</b>", "accepted"], ["SPAN", " &", "recovered"],
        ["SPAN", " here", "accepted"], ["SPAN", " \u2603", "bonus"],
        ["SPAN", "\n<img src=x onerror=alert(1)>", "accepted"],
    ]  # fmt: skip
    assert shown[2][3] == "pass 1: recovered" and shown[-1][3] == "pass 3: accepted"
    assert len({span[4] for span in shown}) == 3
    assert shown[0][5] == "rgb({}, {}, {})".format(*palette(dark=dark)["page"])
    assert [text(browser, id) for id in ("acceptance", "per_pass", "speed")] == [
        "63 %", "2.67", "11",
    ]  # fmt: skip
    assert not browser.console


@needs_browser
def test_events_are_read_wherever_the_stream_is_cut(browser: Browser, server: Served) -> None:
    open_page(browser, server)
    stream = 'data: {"text": "\u2603"}\n\n: ping\n\ndata:[DONE]\n\n'
    found = browser.evaluate(
        f"(async bytes => {{ const found = [], body = new ReadableStream({{ start(to) {{"
        "for (const byte of bytes) to.enqueue(Uint8Array.of(byte)); to.close(); } });"
        "for await (const data of events(new Response(body))) found.push(data);"
        f"return found }})(new TextEncoder().encode({json.dumps(stream)}))"
    )
    assert found == ['{"text": "\u2603"}', "[DONE]"]


@needs_browser
def test_runs_of_both_kinds_are_kept_and_compared(browser: Browser, server: Served) -> None:
    open_page(browser, server)
    type_and_generate(browser, "He are here")
    wait_for(browser, "status", "Done")
    assert text(browser, "comparison") == ""
    browser.evaluate("by('speculative').focus()")
    browser.press("Space")
    browser.evaluate("by('generate').focus()")
    browser.press("Enter")
    wait_for(browser, "status", "Done: 3 tokens")
    assert server.service.calls[1].options == GenerationOptions(speculative=False)
    rows = browser.evaluate(
        "[...document.querySelectorAll('#runs tr')].map(r => [...r.cells].map(c => c.textContent))"
    )
    assert rows == [
        ["speculative", "8", "3", "2.67", "63 %", "0.750", "11"],
        ["plain", "3", "3", "1.00", "\u2013", "0.750", "4"],
    ]
    assert text(browser, "comparison") == (
        "Speculative decoding was 2.7 times as fast; the outputs are the same."
    )
    assert text(browser, "output") == TEXT
    type_and_generate(browser, "Another text")
    wait_for(browser, "comparison", "The two runs had different texts")
    assert not browser.console


@needs_browser
@pytest.mark.parametrize("way", ["Escape", "stop"])
def test_stopping_closes_the_connection(browser: Browser, server: Served, way: str) -> None:
    open_page(browser, server)
    browser.write("wait")
    browser.evaluate("by('generate').focus(), by('generate').click()")
    browser.wait("by('output').textContent == 'He <b>is</b> &'")
    call = server.service.last_call()
    assert call.stalled.is_set() and not call.cancelled.is_set()
    assert browser.evaluate("document.activeElement.id") == "stop"
    assert browser.evaluate("by('output').getAttribute('aria-busy')") == "true"
    browser.press("Enter", CTRL)  # one run at a time
    if way == "Escape":
        browser.press("Escape")
    else:
        browser.evaluate("by('stop').focus(), by('stop').click()")
    wait_for(browser, "status", "Stopped.")
    assert call.cancelled.wait(PATIENCE) and server.service.calls == [call]
    assert browser.evaluate("document.activeElement.id") == "generate"
    assert text(browser, "runs") == text(browser, "error") == "" and not browser.console
    type_and_generate(browser, "He are here")
    wait_for(browser, "status", "Done")


@needs_browser
def test_tab_reaches_everything(browser: Browser) -> None:
    with serving(PageService(), model="correct-base") as server:
        open_page(browser, server)
    assert browser.evaluate("by('prompt').value").startswith("my sister")
    found = []
    for _ in range(7):
        found.append(browser.evaluate("document.activeElement.id || document.activeElement.role"))
        browser.press("Tab")
    expected = ["prompt", "max_tokens", "temperature", "speculative", "generate", "output"]
    assert found == [*expected, "region"]


@needs_browser
def test_errors_are_the_servers_one_line(browser: Browser, server: Served) -> None:
    open_page(browser, server)
    type_and_generate(browser, "refuse")
    wait_for(browser, "error", REFUSAL)
    type_and_generate(browser, "fail")
    wait_for(browser, "error", FAILURE)
    assert text(browser, "output") == "He <b>is</b> &"
    type_and_generate(browser, "break")
    wait_for(browser, "error", "the output broke off: generate it again")
    server.server.should_exit = True
    server.service.let_go()
    wait_until(lambda: not is_there(server.client))
    type_and_generate(browser, "He are here")
    wait_for(browser, "error", "no usable answer (Failed to fetch): check that the server")
    assert text(browser, "runs") == text(browser, "status") == ""


@needs_browser
def test_options_out_of_range_are_not_sent(browser: Browser, server: Served) -> None:
    open_page(browser, server)
    browser.write("He are here")
    browser.evaluate("by('max_tokens').value = '0'")
    browser.press("Enter", CTRL)
    assert browser.evaluate("document.activeElement.id") == "max_tokens"
    browser.evaluate("by('max_tokens').value = '7', by('temperature').value = '0.5'")
    browser.press("Enter", CTRL)
    wait_for(browser, "status", "Done")
    (call,) = server.service.calls
    assert (call.options.max_tokens, call.options.temperature) == (7, 0.5)


@needs_browser
def test_a_key_is_asked_for_where_the_server_wants_one(browser: Browser) -> None:
    with serving(PageService(), model="some-model", api_keys=["abc"]) as server:
        browser.console.clear()
        browser.open(f"{server.url}/")
        wait_for(browser, "error", "the API key is missing")
        browser.wait("document.activeElement.id == 'key'")
        browser.write("abc")
        browser.evaluate("by('prompt').value = 'He are here'")
        browser.press("Enter")
        wait_for(browser, "status", "Done")
        browser.wait("by('model').textContent == 'some-model'")
    assert text(browser, "error") == ""
    kept = browser.evaluate("[localStorage.length, sessionStorage.length, document.cookie]")
    assert kept == [0, 0, ""]
