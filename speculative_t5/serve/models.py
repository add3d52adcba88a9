"""The models of a server, each with a service of its own; they are loaded when they are needed."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..errors import first_line, shown
from .requests import Refused, refuse
from .service import LOADING_SECONDS, NOW, Service, State
from .workers import Workers

MODELS = "/v1/models"  # where the server says what they are


@dataclass(eq=False)
class Served:
    """One model of a server."""

    name: str  # in requests and responses
    make: Callable[[], Service]
    read_tokenizer: Callable[[], Any]  # which says what the model does, loaded or not
    size: int = 0  # of its weights, in bytes
    service: Service | None = None  # None while it is not loaded
    users: int = 0  # requests that are being answered
    loads: int = 0  # how often it has been loaded
    used: float = 0.0  # when one last began, in the time of time.monotonic

    async def tokenizer(self) -> Any:
        """Read the tokenizer in another thread, but not while loading may download the model."""
        if self.service:
            self.service.check_loaded()
        return await asyncio.to_thread(self.read_tokenizer)


class Models:
    """Models by name. The first is loaded at the start, and the server ends if it cannot be.

    The others are loaded when they are asked for. All weights together are to take at most `memory`
    bytes, if given: models that nobody uses make room, the one unused for the longest time first.
    """

    def __init__(
        self,
        models: Sequence[Served],
        memory: float | None = None,
        workers: Workers | None = None,
    ) -> None:
        self.models = {each.name: each for each in models}
        self.first = models[0]
        self.workers = workers or Workers()  # which work on whole texts
        self._memory = memory
        self._changing = asyncio.Lock()
        self._totals: Counter[str] = Counter()  # of services that have made room

    def start(self) -> None:
        """Begin to load the first model; to be called in the server's event loop."""
        self.first.service = self._initial = self.first.make()
        self._initial.start()
        self.workers.start()

    @contextlib.asynccontextmanager
    async def use(self, served: Served) -> AsyncIterator[Service]:
        """Load a model if need be, and keep it for the block.

        Raises:
            Refused: If it cannot be loaded, or has no room beside those that are in use.
        """
        served.users += 1
        try:
            served.used = time.monotonic()
            yield await self._loaded(served)
        finally:
            served.users -= 1

    async def _loaded(self, served: Served) -> Service:
        async with self._changing:
            service = served.service
            if service is None or (service.failure and service is not self._initial):
                if self.state not in ("loading", "ready"):
                    raise Refused(503, "the server is stopping: use another one")
                await self._make_room(served)
                served.service = service = served.make()
                served.loads += 1
                service.start()
        while service.state == "loading" and service is not self._initial:
            await asyncio.sleep(0.05)
        if service.failure and service is not self._initial:
            raise Refused(
                503, f"{served.name} cannot be used ({first_line(service.failure)}): choose "
                "another model",
            )  # fmt: skip
        return service

    async def _make_room(self, wanted: Served) -> None:
        """Unload models that nobody uses until another one fits."""
        loaded = [each for each in self.models.values() if each.service and each is not wanted]
        need = wanted.size + sum(each.size for each in loaded) - (self._memory or float("inf"))
        idle = [each for each in loaded if not each.users]
        if need > sum(each.size for each in idle):
            raise Refused(
                503, f"there is no memory for {wanted.name} beside the models in use: wait and "
                "send the request again", headers={"Retry-After": str(LOADING_SECONDS)},
            )  # fmt: skip
        for each in sorted(idle, key=lambda each: each.used):
            if need > 0 and each.service:
                await each.service.stop(0)
                figures = each.service.figures()
                self._totals.update({name: figures[name] for name in figures if name not in NOW})
                each.service = None
                need -= each.size
        gc.collect()
        mx.clear_cache()

    def find(self, name: object) -> Served:
        """Return the model that a request names; the first if it names none."""
        if name is None:
            return self.first
        if not isinstance(name, str):
            refuse("model", "text", name)
        if name not in self.models:
            names = " or ".join(map(shown, self.models))
            raise Refused(
                404, f"there is no model {shown(name)} here: use {names}, or leave model out",
                param="model", code="model_not_found",
            )  # fmt: skip
        return self.models[name]

    # Of all services together, as a single one has them:

    @property
    def _services(self) -> list[Service]:
        return [each.service for each in self.models.values() if each.service]

    @property
    def state(self) -> State:
        states = [service.state for service in self._services]
        return "ready" if "ready" in states or not states else states[0]

    @property
    def failure(self) -> BaseException | None:
        return self.first.service.failure if self.first.service else None

    @property
    def is_running(self) -> bool:
        return any(service.is_running for service in self._services)

    def figures(self) -> dict[str, float]:
        """Return the sums of the services' figures; the last round is the last of any."""
        found = [service.figures() for service in self._services]
        sums = Counter(self._totals)
        for figures in found:
            sums.update(figures)
        last = [f["seconds_since_round"] for f in found if "seconds_since_round" in f]
        return dict(sums) | ({"seconds_since_round": min(last)} if last else {})

    async def stop(self, seconds: float, hurried: Callable[[], bool] = lambda: False) -> None:
        """Stop all services; see `Service.stop`."""
        # Loading may take long, and no output waits for it.
        services = [
            each.stop(seconds if each.state != "loading" else 0.0, hurried)
            for each in self._services
        ]
        await asyncio.gather(self.workers.stop(seconds, hurried), *services)
