"""The command `serve`: an OpenAI-compatible server."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import typer

from ..checkpoints import encoder_folder, loaded_size, locate, model_name
from ..errors import escaped, first_line, rounded_up
from ..generation import GenerationOptions, num_rows
from ..options import check_integer, check_options
from .options import (
    DEFAULT_MODEL,
    HIDDEN_OPTIONS,
    DecoderOptions,
    Keywords,
    choose,
    is_given,
    server_option,
    with_options,
)
from .terminal import note

if TYPE_CHECKING:
    from ..serve import Models, Served, Settings

MOST_SECONDS_GIVEN = 86_400  # of a shutdown, or a text
MOST_TEXT = 2 * 2**20  # characters; a body has as many bytes at most


@dataclass(frozen=True)
class ServerOptions:
    """Where the server listens, how much it takes, and who may use it."""

    host: str = server_option(
        "127.0.0.1", "Address to listen on; 0.0.0.0 listens on every address of this machine."
    )
    port: int = server_option(8080, "Port to listen on; 0 chooses a free one.")
    memory: float | None = server_option(
        None,
        "With several models: the most gigabytes for all weights, by the sizes of files; models "
        "that nobody uses are unloaded to make room.",
        shown="no limit",
    )
    batch_size: int | None = server_option(
        None, "Outputs of a model to decode side by side.", shown="16, or 1 with --steady"
    )
    max_queue: int = server_option(256, "Outputs that may wait; further requests get status 429.")
    text_seconds: float = server_option(
        600.0,
        "Seconds that a whole text may take; then it is answered as far as it went, and a "
        "translation with status 503.",
    )
    max_text: int = server_option(
        MOST_TEXT, "Characters of a whole text at most; a longer one gets status 413."
    )
    sentence_cache: float = server_option(
        32.0,
        "Megabytes for corrections and translations of sentences that were answered lately, so "
        "that an edited text costs what has changed; 0 keeps none.",
        least=0.0,
        most=1e6,
    )
    api_key_file: Path | None = server_option(
        None,
        "File of API keys, one per line; each request must carry one of them.",
        shown="no key is needed",
    )
    cors_origin: list[str] | None = server_option(
        None,
        "Site whose pages may send requests from a browser, such as https://example.org, "
        "or * for all; may be repeated.",
    )
    shutdown_seconds: float = server_option(
        30.0, "Seconds that running outputs have to finish after SIGTERM or Ctrl-C."
    )

    def __post_init__(self) -> None:
        check_options(self)
        check_integer("--port", self.port, 0, 65535)
        check_integer("--max-queue", self.max_queue, 1)
        check_integer("--max-text", self.max_text, 1, MOST_TEXT)
        _check_seconds("--shutdown-seconds", self.shutdown_seconds)
        _check_seconds("--text-seconds", self.text_seconds)


@with_options(
    changes={
        "seed": {
            "help": "Seed of requests that give none.",
            "show_default": "a new one for each request",
        },
        "model": {
            "hint": str | Sequence[str],
            "show_default": DEFAULT_MODEL,
            "help": "Target: a folder, or the name of a model on this machine or on the Hugging "
            "Face Hub; may be repeated.",
        },
        **HIDDEN_OPTIONS,
    }
)
def serve(
    ctx: typer.Context,
    *,
    server: ServerOptions,
    options: DecoderOptions,
    keywords: Keywords,
) -> None:
    """Serve models over HTTP, in the protocols of OpenAI, LanguageTool and LibreTranslate.

    Requests are decoded side by side, and what one gets does not depend on the others. The options
    for sampling and outputs are the defaults of requests that do not give their own. --model may be
    repeated: the first is loaded at once, others when they are asked for. To try it, open the
    server's address in a browser.
    """
    _check_installed()
    from .. import serve as serving

    origins = server.cors_origin or ()
    serving.check_origins(origins)
    keys = serving.read_keys(server.api_key_file) if server.api_key_file else []
    served, keywords = _models_to_serve(ctx, server, options, keywords)
    if server.memory is not None:
        _check_memory(server.memory, served)
    defaults = GenerationOptions(**keywords)
    defaults.check_stream(several=True)
    settings = serving.Settings(
        defaults,
        keys,
        origins,
        local=serving.is_loopback(server.host),
        draw_seeds=not is_given(ctx, "seed"),
        text_seconds=server.text_seconds,
        max_text=server.max_text,
        sentence_bytes=server.sentence_cache * 1e6,
    )
    most = server.memory and server.memory * 1e9
    models = serving.Models(served, most, serving.Workers(ahead=True))
    _answer_requests(models, settings, server)
    _end_process(models)


def _check_installed() -> None:
    try:
        from .. import serve as serve
    except ModuleNotFoundError as error:
        raise ValueError(
            f"serve needs packages that are not installed ({first_line(error)}): "
            "run pip install 'speculative-t5[serve]'"
        ) from error


def _models_to_serve(
    ctx: typer.Context, server: ServerOptions, options: DecoderOptions, keywords: dict[str, Any]
) -> tuple[list[Served], dict[str, Any]]:
    """Return the models by their names, and the options of outputs, which a task may give."""
    names = cast(list[str], cast(Any, options.model) or [DEFAULT_MODEL])
    several = len(names) > 1
    if several:
        _check_several_models(ctx, names)
    served = []
    for name in names:
        own, keywords = choose(ctx, replace(options, model=name), keywords)
        rows = num_rows(server.batch_size, steady=own.steady)
        served.append(_to_serve(own, rows, server.max_queue))
        if several:  # a wrong one is refused at once
            served[-1].read_tokenizer()
        if several or server.memory is not None:
            served[-1].size = _size_of_files(own)
    return served, keywords


def _answer_requests(models: Models, settings: Settings, server: ServerOptions) -> None:
    """Listen, and answer requests until a signal ends that."""
    from .. import serve as serving

    with serving.bind(server.host, server.port) as listening:
        number = listening.getsockname()[1]
        running = serving.Server(
            serving.make_app(models, settings),
            models,
            shutdown_seconds=server.shutdown_seconds,
            ready=partial(announce_server, settings, [*models.models], server.host, number),
        )
        logging.basicConfig(format="%(levelname)s: %(message)s")
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as under nohup
            signal.signal(signal.SIGHUP, running.handle_exit)
        running.run([listening])


def _end_process(models: Models) -> None:
    """End the process as a failure of a model says, also while one of them cannot be stopped."""
    if models.is_running:
        # A pass that hangs, or loading. Python's end would take from it what it computes with, and
        # MLX would abort.
        if models.failure:
            note(f"error: {first_line(models.failure)}")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1 if models.failure else 0)
    if models.failure:
        raise models.failure


def _check_seconds(name: str, seconds: float) -> None:
    if not 0 <= seconds <= MOST_SECONDS_GIVEN:  # which nan is not, either
        raise ValueError(f"{name} must be from 0 to {MOST_SECONDS_GIVEN}, got {seconds}")


def _check_memory(memory: float, served: Sequence[Served]) -> None:
    """Refuse a limit in gigabytes that not every model would fit in."""
    largest = max(each.size for each in served)
    if not largest <= memory * 1e9:  # as of nan
        raise ValueError(
            f"--memory must be at least {rounded_up(largest / 1e9, 4)}, the size of the largest "
            f"model, got {memory}"
        )


def _check_several_models(ctx: typer.Context, names: Sequence[str]) -> None:
    """Refuse options that are for a single model beside several."""
    for name in ("draft_model", "adapter", "task", "prefix", "to"):
        if is_given(ctx, name):
            raise ValueError(
                f"--{name.replace('_', '-')} is for one model, and there are {len(names)}: leave "
                "it out"
            )
    if len({*map(model_name, names)}) < len(names):
        raise ValueError(f"two models have one name: give --model once for each of {names}")


def _to_serve(options: DecoderOptions, rows: int, max_queue: int) -> Served:
    """Return a model for the server to load."""
    from ..serve import to_serve

    own = {"batch_size": rows, "max_queue": max_queue}
    return to_serve(options.name, options.model, options, options.load, **own)


def _size_of_files(options: DecoderOptions) -> int:
    """Return the size of a model and its draft, in bytes; mostly that of their files."""
    names = (name for name in (options.model, options.draft) if name not in (None, "lookup"))
    return sum(loaded_size(encoder_folder(locate(str(name)))) for name in names)


def announce_server(settings: Settings, names: Sequence[str], host: str, port: int) -> None:
    """Say where the server is, and warn if anybody may use it."""
    address = f"[{host}]" if ":" in host else host
    print(f"serving {escaped(', '.join(names))} at http://{address}:{port}", flush=True)
    if not settings.local and not settings.api_keys:
        note(
            f"warning: anybody who reaches {address} can use this server: give --api-key-file, or "
            "--host 127.0.0.1"
        )
