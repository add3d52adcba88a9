"""The process that works on whole texts for a server, one at a time; it has no weights.

Whatever a text makes it do, it holds up nobody else: the server asks and answers over a socket,
and ends the process when its time is over. Messages are pickled tuples that begin with a word.

    server: ("models", what each model does), once
    server: ("text", Task)
        process: ("key", the API key in the fields)         server: ("reply", None)
        process: ("use", name of a model)                   server: ("reply", Facts)
        process: ("outputs", sources, options)              server: ("reply", list of Generation)
        process: ("log_probabilities", source, tokens)      server: ("reply", list of Logprob)
        process: ("part", part of the answer)               no reply
    process: ("answer", JSON), ("refused", keywords of Refused) or ("failed", lines for the log)

Instead of a reply the server may send ("refused", keywords of Refused).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from ..documents import identifier
from . import document_files, languagetool, libretranslate
from .fields import parse_fields
from .models import MODELS_PATH
from .requests import Refused, as_refusal
from .texts import Facts, Partly, Remote

LEFT_OVER = 10  # seconds of processor time beyond what the server allows, if it is there no more

Fields = dict[str, Any]


def does_texts(model: Any) -> bool:
    """Whether a model corrects or translates, by what it says, as an encoder alone does not."""
    corrects = languagetool.languages_corrected(model)
    return bool(corrects or libretranslate.languages_translated(model))


@dataclass(frozen=True)
class TextRoute:
    """What a route for whole texts does."""

    answer: Callable[[Fields, Remote, Partly], Any]
    fits: Callable[[Fields, Any], bool]  # whether a model can answer, by what it does
    languages: Callable[[Any], Any]  # what a model does at all
    partly: bool = False  # whether an answer may end early
    methods: tuple[str, ...] = ("POST",)
    takes_file: bool = False  # as its body; the fields are then those of the address


TEXT_ROUTES = {
    "/v2/check": TextRoute(
        languagetool.check,
        languagetool.corrects,
        languagetool.languages_corrected,
        partly=True,
        methods=("GET", "POST"),
    ),
    "/translate": TextRoute(
        libretranslate.translate, libretranslate.translates, libretranslate.languages_translated
    ),
    "/detect": TextRoute(libretranslate.detect, lambda _, model: does_texts(model), does_texts),
    "/v1/documents": TextRoute(
        document_files.rewrite_file, document_files.rewrites, does_texts, takes_file=True
    ),
}


@dataclass(frozen=True)
class Abilities:
    """What a model does, as its tokenizer says."""

    name: str
    corrects: list[str] | None
    languages: Any


@dataclass(frozen=True)
class Task:
    """A request for a whole text."""

    path: str
    body: bytes
    kind: str  # its content type
    seconds: float  # of processor time that it may take
    most: int  # characters that it may have
    query: str = ""  # of its address


class TextWorker:
    """Answers tasks that come over a connection, until it ends."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._models: Sequence[Abilities] = ()
        self._facts: dict[str, Facts] = {}  # of models that have been used

    def serve(self) -> None:
        """Do one task after another."""
        while True:
            try:
                kind, value = pickle.loads(self._connection.recv_bytes())
            except (EOFError, ConnectionError):  # the server has ended
                return
            if kind == "models":
                self._models = value
            else:
                with contextlib.suppress(EOFError, ConnectionError):
                    self._send(*self._answered(value))

    def ask(self, *question: Any) -> Any:
        """Return what the server answers to a question, or raise Refused."""
        self._send(*question)
        kind, value = pickle.loads(self._connection.recv_bytes())
        if kind == "refused":
            raise Refused.again(value)
        return value

    def _send(self, *message: Any) -> None:
        self._connection.send_bytes(pickle.dumps(message))

    def _answered(self, task: Task) -> tuple[str, Any]:
        """Return the last message about a task."""
        limit_processor_time(task.seconds)
        try:
            return "answer", as_body(self._answer(task))
        except Refused as refused:
            return "refused", refused.keywords
        except ValueError as error:
            return "refused", as_refusal(error).keywords
        except (EOFError, ConnectionError):
            raise
        except Exception:  # the next task is none the worse for it
            return "failed", traceback.format_exc()

    def _answer(self, task: Task) -> Any:
        route = TEXT_ROUTES[task.path]
        sent = (b"", "") if route.takes_file else (task.body, task.kind)
        fields = parse_fields(*sent, task.query)
        self.ask("key", str(fields.get("api_key") or fields.get("apiKey") or ""))
        if route.takes_file:  # only for those who may send it
            fields = document_files.opened_file(fields, task.body)
        check_length(fields, task.most)
        name = fields["model"] if "model" in fields else self._chosen(task.path, fields)
        if (facts := self.ask("use", name)) is not None:
            self._facts[name] = facts

        def partly(part: dict[str, Any]) -> None:
            self._send("part", part)

        remote = Remote(self._facts[name], self.ask, self._served())
        return route.answer(fields, remote, partly)

    def _served(self) -> set[str]:
        """Return the languages that models correct or translate."""
        kinds = (languagetool.languages_corrected, libretranslate.languages_translated)
        return {each["code"] for some in kinds for model in self._models for each in some(model)}

    def _chosen(self, path: str, fields: Fields) -> str:
        """Return the first model that can answer a request for a text."""
        route, able = TEXT_ROUTES[path], []
        for each in self._models:
            if route.fits(fields, each):
                return each.name
            if route.languages(each):
                able.append(each)
        if not able:
            raise Refused(
                404, f"no model of this server does what {path} is for: see {MODELS_PATH}"
            )
        return able[0].name  # which says what it lacks


def check_length(fields: Fields, most: int) -> None:
    """Refuse a text, or texts, of more characters than the server takes."""
    for name in ("text", "data", "q"):
        found = fields.get(name)
        parts = found if isinstance(found, list) else [found]
        size = sum(len(each if isinstance(each, str) else json.dumps(each)) for each in parts)
        if size > most:
            raise Refused(
                413,
                f"{name} has {size:,} characters, and this server takes {most:,}: send it in "
                "parts, one by one",
                param=name,
                code="request_too_large",
            )


def as_body(answer: Any) -> bytes:
    """Return an answer as JSON."""
    return json.dumps(answer, ensure_ascii=False, separators=(",", ":")).encode()


def limit_processor_time(seconds: float) -> None:
    """Let the system end this process some time after the server should have."""
    most = math.ceil(time.process_time() + seconds) + LEFT_OVER
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(
        resource.RLIMIT_CPU, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard)
    )


def work_on_texts() -> None:
    """Serve over a socket; the last arguments of the command are the priority and its number."""
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # the server gets them, and ends us
        signal.signal(each, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(int(sys.argv[-2]))
    with Connection(int(sys.argv[-1])) as connection:
        identifier()  # most texts need it, and it takes a second to read
        connection.send_bytes(pickle.dumps(("ready",)))
        TextWorker(connection).serve()
