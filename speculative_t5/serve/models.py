"""The models of a server, each with a service of its own; they are loaded when they are needed."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx

from ..checkpoints import (
    ModelFolder,
    encoder_folder,
    encodes_alone,
    locate,
    read_tokenizer,
)
from ..errors import first_line, shown
from ..generation import Encoder, SpeculativeDecoder
from ..tokenizers import Languages
from .requests import Refused, refuse
from .service import CURRENT_FIGURES, LOADING_SECONDS, Loaded, Service, State, stopping
from .threads import SHARED_THREADS
from .workers import Workers

MODELS_PATH = "/v1/models"  # where the server says what they are
READING_SECONDS = 2.0  # to wait for a tokenizer, which a download may hold up
RELOAD_SECONDS = 30.0  # before a model that could not be loaded is tried again
STAY_SECONDS = 5.0  # that a model in use is left to its users once it has been loaded
ROOM_SECONDS = 30.0  # for the users of models to end, where another one is to take their room
WAIT_SECONDS = 120.0  # that a request waits for its model
LOADING_LOOK = 0.02  # seconds between two looks at a model that is being loaded


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
    loaded: float = 0.0  # when it had been loaded, in the same time
    waiting: int = 0  # requests that wait until it lets them in
    crowded: float = 0.0  # when it last got no room
    failed: float = 0.0  # when it could not be, in the same time
    failure: str = ""  # why it could not be when it was last tried
    is_leaving: bool = False  # whether it lets nobody in, to make room for another one
    _reading: asyncio.Future[Any] | None = field(default=None, init=False, repr=False)
    _began: float = field(default=0.0, init=False, repr=False)  # when that was
    _is_slow: bool = field(default=False, init=False, repr=False)  # it has been waited for

    async def tokenizer(self) -> Any:
        """Return the tokenizer, which another thread reads once; after a failure, again later.

        Raises:
            Refused: If it cannot be read, or is still being downloaded.
        """
        now, reading = time.monotonic(), self._reading
        has_failed = reading is not None and reading.done() and reading.exception() is not None
        if reading is None or (has_failed and now - self._began > RELOAD_SECONDS):
            self._began, self._is_slow = now, False
            self._reading = reading = asyncio.wrap_future(SHARED_THREADS.run(self.read_tokenizer))
        try:
            async with asyncio.timeout(0 if self._is_slow else READING_SECONDS):
                return await asyncio.shield(reading)
        except TimeoutError as error:
            self._is_slow = True
            raise Refused(
                503,
                f"{self.name} is still being downloaded or read: wait and send the request again",
                headers={"Retry-After": str(LOADING_SECONDS)},
            ) from error
        except (ValueError, OSError) as error:
            raise _unusable(self.name, first_line(error)) from error

    @property
    def is_wanted(self) -> bool:
        """Whether there are requests for it."""
        return bool(self.users or self.waiting)

    @property
    def is_loading(self) -> bool:
        """Whether its weights are being read."""
        return self.service is not None and self.service.state == "loading"


class ReadingOptions(Protocol):
    """What the options of a decoder say of an encoder alone, too."""

    @property
    def adapter(self) -> str | Path | None: ...

    @property
    def dtype(self) -> mx.Dtype | str | None: ...

    @property
    def max_source_length(self) -> int | None: ...

    @property
    def truncate(self) -> bool: ...

    @property
    def prefix(self) -> str | None: ...


def to_serve(
    name: str,
    model: str | Path,
    options: ReadingOptions,
    load: Callable[[], SpeculativeDecoder],
    *,
    batch_size: int,
    max_queue: int,
) -> Served:
    """Return a model for a server to load: a decoder by `load`, or an encoder alone.

    Its folder is found once, which may download it.
    """
    finding = threading.Lock()

    @cache
    def found() -> ModelFolder:
        with finding:  # whoever asks first
            return locate(model, options.adapter)

    def loaded() -> Loaded:
        return load_encoder(model, options) if encodes_alone(found()) else load()

    service = partial(Service, loaded, batch_size=batch_size, max_queue=max_queue)
    return Served(name, service, cache(lambda: tokenizer_of(found())))


def load_encoder(model: str | Path, options: ReadingOptions) -> Encoder:
    """Load an encoder alone, for texts that are refused or cut by the rules of prompts."""
    encoder = Encoder.from_pretrained(model, dtype=options.dtype, adapter=options.adapter)
    most = options.max_source_length or encoder.prompts.max_source_length
    encoder.prompts = replace(
        encoder.prompts,
        max_source_length=most,
        truncate=options.truncate,
        prefix=options.prefix or "",
    )
    return encoder


def tokenizer_of(folder: ModelFolder) -> Any:
    """Return a model's tokenizer, which says what the model does; an encoder alone, no texts."""
    if not encodes_alone(folder):
        return read_tokenizer(folder)
    tokenizer = read_tokenizer(encoder_folder(folder))
    tokenizer.corrects, tokenizer.languages = [], Languages()
    return tokenizer


class Models:
    """Models by name. The first is loaded at the start, and the server ends if it cannot be.

    The others are loaded when they are asked for. All weights together are to take at most `memory`
    bytes, if given: models that nobody uses make room, the one unused for the longest time first.
    Where all are in use, some let nobody in until their users have ended, so that those who wait
    for another model have their turn. `workers` work on whole texts.
    """

    def __init__(
        self,
        models: Sequence[Served],
        memory: float | None = None,
        workers: Workers | None = None,
    ) -> None:
        self.models = {each.name: each for each in models}
        self.first = models[0]
        self.workers = workers or Workers()
        self._memory = float("inf") if memory is None else memory
        self._initial: Service | None = None  # the first one's, as loaded at the start
        self._queue: deque[Served] = deque()  # that are to be loaded, the next one first
        self._tasks: set[asyncio.Task[None]] = set()  # that load them
        self._is_making_room = False
        self._news = asyncio.Event()  # set, and replaced, when something has changed
        self._is_stopping = False
        self._fatal: BaseException | None = None  # why no model can be used any more
        self._totals: Counter[str] = Counter()  # of services that have made room

    def start(self) -> None:
        """Begin to load the first model; to be called in the server's event loop."""
        self.first.service = self._initial = self.first.make()
        self._initial.start()
        self.workers.start()

    async def loaded(self) -> None:
        """Wait until the first model has been loaded; if it cannot be, raise why."""
        while self.state == "loading":
            await asyncio.sleep(LOADING_LOOK)
        if self.failure is not None:
            raise self.failure

    @contextlib.asynccontextmanager
    async def use(self, served: Served) -> AsyncIterator[Service]:
        """Load a model if need be, and keep it for the block.

        Raises:
            Refused: If it cannot be loaded, or has no room beside those that are in use.
        """
        served.waiting += 1
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                service = await self._let_in(served)
        except TimeoutError as error:
            raise _crowded(served) from error
        finally:
            served.waiting -= 1
        try:
            yield service
        finally:
            served.users -= 1
            if not served.users:
                self._tell()

    async def _let_in(self, served: Served) -> Service:
        """Wait until a model can be used, and count this request among its users."""
        asked, served.used = time.monotonic(), time.monotonic()
        while True:
            if self._is_stopping:
                raise stopping()
            service = served.service
            if service and service.failure and service is not self._initial:
                self._drop(served)
                continue
            if service and not served.is_leaving:
                # While the server starts, its first model refuses everybody by itself.
                if service is self._initial or not served.is_loading:
                    served.users += 1
                    return service
            elif not service:
                if served.crowded > asked:
                    raise _crowded(served)
                self._check_failed(served, asked)
                self._ask_for(served)
            await self._news.wait()

    async def tokenizers(self) -> dict[str, Any]:
        """Return the tokenizers of all models, by name, as far as they can be had now.

        Raises:
            Refused: If none can be.
        """
        names, models = [*self.models], self.models.values()
        found = await asyncio.gather(*(each.tokenizer() for each in models), return_exceptions=True)
        had = {}
        for name, each in zip(names, found, strict=True):
            if isinstance(each, BaseException) and not isinstance(each, Refused):
                raise each
            if not isinstance(each, Refused):
                had[name] = each
        if not had:
            await self.first.tokenizer()  # which says why there is none
        return had

    def _check_failed(self, served: Served, asked: float) -> None:
        """Refuse a model that could not be loaded since a request came, or a short time ago."""
        if served.failed and served.failed > asked - RELOAD_SECONDS:
            raise _unusable(served.name, served.failure)

    def _tell(self) -> None:
        """Let all look again who wait for something here."""
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _ask_for(self, served: Served) -> None:
        """Have a model loaded, once it is its turn."""
        if served not in self._queue:
            self._queue.append(served)
        if not self._is_making_room:
            self._is_making_room = True
            self._begin(self._load_queue())

    def _begin(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _load_queue(self) -> None:
        """Make room for one model after another; each is then loaded beside the others."""
        try:
            while self._queue and not self._is_stopping:
                wanted = self._queue[0]
                if await self._make_room(wanted):
                    wanted.service = wanted.make()
                    wanted.loads += 1
                    wanted.loaded = math.inf  # until it has been
                    wanted.service.start()
                    self._begin(self._loaded(wanted, wanted.service))
                self._queue.popleft()
                self._tell()
        finally:
            self._is_making_room = False

    async def _loaded(self, served: Served, service: Service) -> None:
        """Wait until a model has been loaded, or could not be."""
        while service.state == "loading":
            await asyncio.sleep(LOADING_LOOK)
        served.loaded = time.monotonic()
        if service.failure:
            if served.service is service:  # no request has found out before
                self._drop(served)
        else:
            served.failed = 0.0
        self._tell()

    def _drop(self, served: Served) -> None:
        """Forget a service that has failed; load another model if that was the last one."""
        assert served.service and served.service.failure
        error = served.service.failure
        served.failed, served.failure = time.monotonic(), first_line(error)
        self._count(served.service)
        served.service = None
        self._tell()
        if self._services or self._queue or self._is_stopping:
            return
        left = [each for each in self.models.values() if not each.failed]
        if left:
            self._ask_for(left[0])
        else:
            self._fatal = RuntimeError(f"no model can be loaded any more: {first_line(error)}")

    async def _make_room(self, wanted: Served) -> bool:
        """Unload models until another one fits; return whether it does."""
        until = time.monotonic() + ROOM_SECONDS
        try:
            while True:
                loaded = [each for each in self.models.values() if each.service]
                need = wanted.size + sum(each.size for each in loaded) - self._memory
                if need <= 0:
                    return True
                chosen = self._chosen(loaded, need)
                for each in loaded:
                    each.is_leaving = each in chosen
                if idle := [each for each in chosen if not each.users]:
                    await self._unload(idle[0])
                else:
                    if time.monotonic() > until:
                        wanted.crowded = time.monotonic()
                        return False
                    await asyncio.sleep(LOADING_LOOK)
        finally:
            for each in self.models.values():
                each.is_leaving = False
            self._tell()

    def _chosen(self, loaded: Sequence[Served], need: float) -> list[Served]:
        """Return the models that are to make room: those that nobody uses, then others.

        There are none as long as too few of those in use have been left to their users for a time.
        """
        now = time.monotonic()
        able = [
            each
            for each in loaded
            if not each.is_loading
            and (each.is_leaving or not each.is_wanted or now - each.loaded > STAY_SECONDS)
        ]
        chosen = []
        for each in sorted(able, key=lambda e: (e.is_wanted, not e.is_leaving, e.used)):
            if need > 0:
                chosen.append(each)
                need -= each.size
        return chosen if need <= 0 else []

    async def _unload(self, served: Served) -> None:
        service = served.service
        assert service
        await service.stop(0)
        self._count(service)
        served.service = None
        if service is self._initial:
            self._initial = None

    def _count(self, service: Service) -> None:
        """Add the figures of a service that ends to the totals."""
        figures = service.figures()
        totals = {name: figures[name] for name in figures if name not in CURRENT_FIGURES}
        self._totals.update(totals)

    def find(self, name: object) -> Served:
        """Return the model that a request names; the first if it names none."""
        if name is None:
            return self.first
        if not isinstance(name, str):
            refuse("model", "text", name)
        if name not in self.models:
            names = " or ".join(map(shown, self.models))
            raise Refused(
                404,
                f"there is no model {shown(name)} here: use {names}, or leave model out",
                param="model",
                code="model_not_found",
            )
        return self.models[name]

    # Of all services together, as a single one has them:

    @property
    def _services(self) -> list[Service]:
        return [each.service for each in self.models.values() if each.service]

    @property
    def state(self) -> State:
        states = [service.state for service in self._services]
        if "ready" in states:
            return "ready"
        if self._fatal:
            return "failed"
        if states and not self._queue:
            return states[0]
        return "stopping" if self._is_stopping else "loading"

    @property
    def failure(self) -> BaseException | None:
        if self._fatal:
            return self._fatal
        is_initial = self._initial and self.first.service is self._initial
        return self._initial.failure if is_initial and self._initial else None

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
        """Stop all services, and the work on texts; see `Service.stop`."""
        self._is_stopping = True
        for task in self._tasks:
            task.cancel()
        self._tell()
        # Loading may take long, and no output waits for it.
        services = [
            each.stop(seconds if each.state != "loading" else 0.0, hurried)
            for each in self._services
        ]
        await asyncio.gather(self.workers.stop(seconds, hurried), *services)


def _crowded(served: Served) -> Refused:
    return Refused(
        503,
        f"there is no memory for {served.name} beside the models in use: wait and send the request "
        "again",
        headers={"Retry-After": str(LOADING_SECONDS)},
    )


def _unusable(name: str, why: str) -> Refused:
    return Refused(503, f"{name} cannot be used ({why}): choose another model")
