"""Several models on a server: which are loaded, how they make room, and what fails."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from speculative_t5.generation import GenerationOptions, SpeculativeDecoder
from speculative_t5.serve import Models, Served, Service, models
from speculative_t5.serve.requests import Refused

import pytest
import swap_models
from messages import check_message
from serving import PATIENCE, serving, started, wait_until
from test_languages import make_translator

SMALL = GenerationOptions(max_tokens=4)


@dataclass(eq=False)
class Instant:
    """Has a Service's interface; it is loaded, or fails, after some seconds."""

    seconds: float = 0.02
    failure: BaseException | None = None
    error: BaseException | None = None
    state: str = "loading"

    def start(self) -> None:
        asyncio.get_running_loop().call_later(self.seconds, self._end)

    def _end(self) -> None:
        self.failure = self.error
        self.state = "failed" if self.error else "ready"

    def figures(self) -> dict[str, float]:
        return {"emitted": 1, "queued": 5}

    @property
    def is_running(self) -> bool:
        return False

    async def stop(self, seconds: float, hurried: Callable[[], bool] = lambda: False) -> None:
        self.state = "stopped"


@dataclass
class Made:
    """Models of size 60 with room for one; by name, why each cannot be loaded."""

    names: str = "large small"
    broken: dict[str, str] = field(default_factory=dict)
    memory: float | None = 100

    def __post_init__(self) -> None:
        each = [Served(n, partial(self._make, n), lambda: None, 60) for n in self.names.split()]
        self.models = Models(each, self.memory)

    def _make(self, name: str) -> Any:
        return Instant(error=ValueError(self.broken[name]) if name in self.broken else None)

    def loaded(self) -> list[str]:
        return [name for name, each in self.models.models.items() if each.service]

    @asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[Any]:
        async with self.models.use(self.models.models[name]) as service:
            yield service


def run(made: Made, work: Callable[[Made], Awaitable[None]]) -> None:
    """Do something with models in an event loop, once the first is loaded."""

    async def all_of_it() -> None:
        made.models.start()
        async with asyncio.timeout(PATIENCE):
            while made.models.state == "loading":
                await asyncio.sleep(0.01)
            await work(made)
        await made.models.stop(0)

    asyncio.run(all_of_it())


def test_a_model_that_cannot_be_loaded_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is loaded again by itself; the broken one says why each time."""

    async def work(made: Made) -> None:
        for retry in (30.0, 0.0):
            monkeypatch.setattr(models, "RELOAD_SECONDS", retry)
            for _ in range(3):
                with pytest.raises(Refused, match="small cannot be used .no weights.: choose"):
                    async with made.use("small"):
                        pass
                while made.models.state != "ready":
                    await asyncio.sleep(0.01)
                assert made.loaded() == ["large"] and not made.models.failure
                async with made.use("large") as service:
                    assert service.state == "ready"
        del made.broken["small"]
        async with made.use("small") as service:
            assert service.state == "ready" and made.loaded() == ["small"]

    run(Made(broken={"small": "no weights"}), work)


def test_a_server_that_can_serve_nothing_says_why() -> None:
    async def work(made: Made) -> None:
        made.broken["large"] = "its disk is gone"
        with pytest.raises(Refused):
            async with made.use("small"):
                pass
        while made.models.failure is None:
            await asyncio.sleep(0.01)
        assert str(made.models.failure) == "no model can be loaded any more: its disk is gone"
        assert made.models.state == "failed"

    run(Made(broken={"small": "no weights"}), work)


def test_another_model_is_loaded_where_the_first_cannot_be() -> None:
    async def work(made: Made) -> None:
        async with made.use("small"):
            pass
        made.broken["large"] = "its disk is gone"
        with pytest.raises(Refused, match="large cannot be used .its disk is gone."):
            async with made.use("large"):
                pass
        while made.models.state != "ready":
            await asyncio.sleep(0.01)
        assert made.loaded() == ["small"] and not made.models.failure

    run(Made(names="large small"), work)


def test_a_model_has_its_turn_beside_one_that_is_always_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """None is refused; both are loaded again and again, and each time for some of its users."""
    monkeypatch.setattr(models, "STAY_SECONDS", 0.1)
    served: Counter[str] = Counter()

    async def ask(made: Made, name: str, seconds: float, until: float) -> None:
        while time.monotonic() < until:
            async with made.use(name) as service:
                assert service.state == "ready"
                served[name] += 1
                await asyncio.sleep(seconds)

    async def work(made: Made) -> None:
        until = time.monotonic() + 2
        large = [ask(made, "large", 0.05, until) for _ in range(8)]
        small = [ask(made, "small", 0.01, until) for _ in range(2)]
        await asyncio.gather(*large, *small)
        assert min(served.values()) > 8, served
        swaps = made.models.models["small"].loads
        assert 2 < swaps < 20 and served["large"] / swaps > 4, "they stay for a time"

    run(Made(), work)


def test_who_gets_no_room_in_time_is_told_when_to_come_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(models, "STAY_SECONDS", 0.1)
    monkeypatch.setattr(models, "ROOM_SECONDS", 0.3)

    async def work(made: Made) -> None:
        async with made.use("large"):
            began = time.monotonic()
            with pytest.raises(Refused, match="no memory for small beside the models") as refused:
                async with made.use("small"):
                    pass
            assert time.monotonic() - began >= 0.3
            check_message(str(refused.value))
            assert refused.value.status == 503 and refused.value.headers == {"Retry-After": "5"}
            async with made.use("large"):  # it lets others in again
                pass
        async with made.use("small"):
            assert made.loaded() == ["small"]

    run(Made(), work)


def test_models_without_a_bound_stay() -> None:
    async def work(made: Made) -> None:
        async with made.use("b"), made.use("c"), made.use("a"):
            assert made.loaded() == ["a", "b", "c"]
        assert made.models.figures()["emitted"] == 3

    run(Made(names="a b c", memory=None), work)


def test_the_longest_unused_makes_room() -> None:
    async def work(made: Made) -> None:
        for name, loaded in (("b", "ab"), ("a", "ab"), ("c", "ac"), ("b", "bc")):
            async with made.use(name):
                pass
            assert "".join(made.loaded()) == loaded, name
        assert made.models.figures()["emitted"] == 4, "also of those that made room"

    run(Made(names="a b c", memory=130), work)


def test_nobody_waits_for_a_server_that_stops() -> None:
    async def work(made: Made) -> None:
        async with made.use("large"):
            waiting = asyncio.create_task(made.use("small").__aenter__())
            await asyncio.sleep(0.1)
            await made.models.stop(0)
            with pytest.raises(Refused, match="the server is stopping"):
                await waiting

    run(Made(), work)


# With models that decode:


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(make_translator(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def served(folder: Path) -> Iterator[Models]:
    def load() -> SpeculativeDecoder:
        return SpeculativeDecoder.from_pretrained(folder)

    def fail() -> SpeculativeDecoder:
        raise ValueError("its weights are missing: download it again")

    tokenizer = swap_models.served(str(folder)).read_tokenizer
    yield Models(
        [
            Served("first", partial(Service, load), tokenizer, 60),
            Served("second", partial(Service, load), tokenizer, 60),
            Served("broken", partial(Service, fail), tokenizer, 60),
        ],
        memory=100,
    )


def test_models_make_room_for_one_another(served: Models) -> None:
    """One has room beside nothing else; what cannot be loaded is said over HTTP, too."""
    first, second, _ = served.models.values()
    with serving(served) as server:
        wait_until(lambda: served.state == "ready")
        for model in (second, first, second, first):
            found = server.post(model=model.name, prompt="Guten Tag.", max_tokens=4)
            assert found.status_code == 200 and model.service and model.service.state == "ready"
            assert (first if model is second else second).service is None
            assert server.client.get("/health").status_code == 200
        assert served.figures()["emitted"] == 4 * 4
        for _ in range(3):
            failed = server.post(model="broken", prompt="a")
            assert failed.status_code == 503
            assert "broken cannot be used (its weights are missing: download" in failed.text
            wait_until(lambda: served.state == "ready")
            assert server.client.get("/health").status_code == 200
            done = server.post(model="first", prompt="Guten Tag.", max_tokens=4)
            assert done.status_code == 200


def test_what_models_do_is_said_while_they_are_loaded(served: Models) -> None:
    slow = served.models["second"]
    load = slow.make()._load

    def loading() -> Any:
        time.sleep(1.0)
        return load()

    slow.make = partial(Service, loading)
    served.first.make = partial(Service, loading)
    with serving(served) as server:
        for ready in (False, True):
            assert (served.state == "ready") == ready
            for path in ("/v1/models", "/v1/models/second", "/languages", "/v2/languages"):
                response = server.client.get(path)
                assert response.status_code == 200, path
            wait_until(lambda: served.state == "ready")
        listed = server.client.get("/v1/models").json()["data"]
        assert [each["loaded"] for each in listed] == [True, False, False]
        assert {each["code"] for each in listed[0]["translates"]} == {"de", "fr"}


@pytest.mark.parametrize("fault", ["slow", "broken"])
def test_a_model_whose_tokenizer_cannot_be_had_keeps_no_text_from_the_others(
    served: Models, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    ended = threading.Event()
    tries = []

    def read() -> Any:
        tries.append(fault)
        if fault == "slow":
            ended.wait(60)
        raise ValueError("its tokenizer is missing: download it again")

    served.models["second"].read_tokenizer = read
    monkeypatch.setattr(models, "READING_SECONDS", 0.2)
    with serving(served) as server:
        wait_until(lambda: served.state == "ready")
        for form in ({"model": "first"}, {}, {}):
            fields = {"q": "Good day.", "source": "en", "target": "de"} | form
            assert server.client.post("/translate", json=fields).status_code == 200
        for path in ("/languages", "/v2/languages", "/v1/models", "/v1/models/first"):
            assert server.client.get(path).status_code == 200, path
        listed = {e["id"]: e for e in server.client.get("/v1/models").json()["data"]}
        assert listed["first"]["translates"] and listed["second"]["translates"] == []
        refused = server.client.get("/v1/models/second")
        assert refused.status_code == 503
        why = "downloaded or read" if fault == "slow" else "its tokenizer is missing"
        assert why in refused.json()["error"]["message"]
        ended.set()
    assert len(tries) == 1


def test_models_that_take_turns_take_no_more_memory(folder: Path, tmp_path: Path) -> None:
    """A sample of `scripts/checks/swap_models.py`, with a tiny model."""
    (tmp_path / "other").symlink_to(folder)
    names = [str(folder), str(tmp_path / "other")]
    _, first, *_, last = asyncio.run(swap_models.swapped(names, 12, 4))
    assert last.threads == first.threads and last.active <= first.active + 0.1
    assert "| 12 | " in [*swap_models.lines([last])][2]


def test_a_server_with_nothing_to_serve_exits(tmp_path: Path) -> None:
    """Its second model cannot be loaded, and the first not again."""
    change = """
from speculative_t5.generation import SpeculativeDecoder
load, loads = SpeculativeDecoder.from_pretrained.__func__, []
def loaded(kind, model, *given, **options):
    if loads:
        raise ValueError(f"{model} is gone: bring it back")
    loads.append(model)
    return load(kind, model, *given, **options)
SpeculativeDecoder.from_pretrained = classmethod(loaded)
"""
    names = ("--model", "correct-base", "--model", "correct-small", "--memory", "0.06")
    with started(tmp_path, *names, change=change) as (process, client):
        refused = client.post("/v1/completions", json={"model": "correct-small", "prompt": "a"})
        assert refused.status_code == 503
        assert "correct-small cannot be used (correct-small is gone" in refused.text
        assert process.wait(PATIENCE) == 1
        assert (
            process.stderr
            and b"any more: correct-base is gone: bring it back" in process.stderr.read()
        )
