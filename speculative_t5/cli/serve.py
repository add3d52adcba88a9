"""The command `serve`: an OpenAI-compatible server."""

from __future__ import annotations

import logging
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ..errors import check_integer, first_line
from ..generation import GenerationOptions
from .options import UNSHOWN, DecoderOptions, Keywords, choose, in_server, is_given, with_options
from .terminal import note

if TYPE_CHECKING:
    from ..serve import Settings

MOST_SECONDS = 86_400  # of a shutdown


@with_options(
    changes={
        "seed": {
            "help": "Seed of requests that give none.",
            "show_default": "a new one for each request",
        },
        **UNSHOWN,
    }
)
def serve(
    ctx: typer.Context,
    *,
    host: str = in_server(
        "127.0.0.1", "Address to listen on; 0.0.0.0 listens on every address of this machine."
    ),
    port: int = in_server(8080, "Port to listen on; 0 chooses a free one."),
    batch_size: int | None = in_server(
        None, "Outputs to decode side by side.", shown="16, or 1 with --steady"
    ),
    max_queue: int = in_server(256, "Outputs that may wait; further requests get status 429."),
    api_key_file: Path | None = in_server(
        None,
        "File of API keys, one per line; each request must carry one of them.",
        shown="no key is needed",
    ),
    cors_origin: list[str] | None = in_server(
        None,
        "Site whose pages may send requests from a browser, such as https://example.org, "
        "or * for all; may be repeated.",
    ),
    shutdown_seconds: float = in_server(
        30.0, "Seconds that running outputs have to finish after SIGTERM or Ctrl-C."
    ),
    options: DecoderOptions,
    keywords: Keywords,
) -> None:
    """Serve a model over HTTP, in OpenAI's protocol.

    Requests are decoded side by side, and what one gets does not depend on the others. The options
    for sampling and outputs are the defaults of requests that do not give their own. To try it,
    open the server's address in a browser.
    """
    try:
        from .. import serve as serving
    except ModuleNotFoundError as error:
        raise ValueError(
            f"serve needs packages that are not installed ({first_line(error)}): "
            "run pip install 'speculative-t5[serve]'"
        ) from error
    check_integer("--port", port, 0, 65535)
    check_integer("--max-queue", max_queue, 1)
    if not 0 <= shutdown_seconds <= MOST_SECONDS:  # which nan is not, either
        raise ValueError(
            f"--shutdown-seconds must be from 0 to {MOST_SECONDS}, got {shutdown_seconds}"
        )
    serving.check_origins(cors_origin or ())
    keys = serving.read_keys(api_key_file) if api_key_file else []
    options, keywords = choose(ctx, options, keywords)
    rows = options.rows(batch_size)
    defaults = GenerationOptions(**keywords)
    defaults.check_stream(several=True)
    settings = serving.Settings(
        options.name, defaults, keys, cors_origin or (),
        local=serving.is_loopback(host), draw_seeds=not is_given(ctx, "seed"),
    )  # fmt: skip
    service = serving.Service(options.load, batch_size=rows, max_queue=max_queue)
    with serving.bind(host, port) as listening:
        number = listening.getsockname()[1]
        server = serving.Server(
            serving.make_app(service, settings), service, shutdown_seconds=shutdown_seconds,
            ready=partial(announce, settings, host, number),
        )  # fmt: skip
        logging.basicConfig(format="%(levelname)s: %(message)s")
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as under nohup
            signal.signal(signal.SIGHUP, server.handle_exit)
        server.run([listening])
    if service.is_running:
        # A pass that hangs, or loading. Python's end would take from it what it computes with, and
        # MLX would abort.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    if service.failure:
        raise service.failure


def announce(settings: Settings, host: str, port: int) -> None:
    """Say where the server is, and warn if anybody may use it."""
    address = f"[{host}]" if ":" in host else host
    print(f"serving {settings.model} at http://{address}:{port}", flush=True)
    if not settings.local and not settings.api_keys:
        note(
            f"warning: anybody who reaches {address} can use this server: give --api-key-file, or "
            "--host 127.0.0.1"
        )
