"""Serve the shipped target by another program, as plainly as one would write it in an afternoon.

    python scripts/benchmarks/plain_server.py transformers --port 8081
    python scripts/benchmarks/plain_server.py ctranslate2 --port 8082

For serve_load.py: it answers `POST /v1/completions` (one prompt, greedy, as a stream) and
`GET /v1/models`. Requests that wait are decoded together, up to `--batch-size`, and those that come
meanwhile wait for the end of the batch; a stream has its whole text in one event. One process, in
float32 on the CPU, without drafts. Needs `pip install ".[compare,serve]"`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import sentencepiece
import typer
import uvicorn
from programs.checkpoints import as_hugging_face, silence_transformers, word
from programs.workers import convert
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

MODEL = Path(__file__).parents[2] / "weights" / "correct-base"
EOS = 1
PROGRAMS = ("transformers", "ctranslate2")

# Source ids of several prompts and the most tokens of an output -> ids of each, without EOS, and
# whether the output ended by it.
Generate = Callable[[Sequence[list[int]], int], list[tuple[list[int], bool]]]


def main(
    program: Annotated[str, typer.Argument(help=f"One of {', '.join(PROGRAMS)}.")],
    port: Annotated[int, typer.Option(help="Port of 127.0.0.1.")] = 8081,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts to decode together.")] = 16,
    threads: Annotated[int, typer.Option(min=1, help="Threads to compute with.")] = (
        os.cpu_count() or 1
    ),
) -> None:
    """Serve the shipped target by another program."""
    if program not in PROGRAMS:
        raise typer.BadParameter(f"no program {program!r}, expected one of: {', '.join(PROGRAMS)}")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        # In a process of its own: MLX's BLAS would change the speed of the other program.
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=spawn) as pool:
            pool.submit(write_checkpoint, place / "target").result()
        load = load_transformers if program == "transformers" else load_ctranslate2
        app = make_app(program, load(place, threads), batch_size)
        uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


def write_checkpoint(folder: Path) -> None:
    """Write the shipped target as transformers reads it."""
    from speculative_t5 import load

    import mlx.core as mx

    as_hugging_face(load(MODEL, dtype=mx.float32)[0], folder)


def load_transformers(place: Path, threads: int) -> Generate:
    import torch
    from transformers import T5ForConditionalGeneration

    silence_transformers()
    torch.set_num_threads(threads)
    model = T5ForConditionalGeneration.from_pretrained(place / "target").eval()

    @torch.inference_mode()
    def generate(prompts: Sequence[list[int]], max_tokens: int) -> list[tuple[list[int], bool]]:
        longest = max(map(len, prompts))
        source = torch.tensor([ids + [0] * (longest - len(ids)) for ids in prompts])
        mask = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids in prompts])
        found = model.generate(
            source, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False
        )
        return [cut(ids) for ids in found[:, 1:].tolist()]

    return generate


def load_ctranslate2(place: Path, threads: int) -> Generate:
    import ctranslate2

    if unable := convert(place / "target", place / "ctranslate2"):
        sys.exit(f"error: {unable}")
    translator = ctranslate2.Translator(
        str(place / "ctranslate2"), compute_type="float32", inter_threads=1, intra_threads=threads
    )

    def generate(prompts: Sequence[list[int]], max_tokens: int) -> list[tuple[list[int], bool]]:
        results = translator.translate_batch(
            [list(map(word, ids)) for ids in prompts], beam_size=1, min_decoding_length=0,
            max_decoding_length=max_tokens, max_input_length=0, return_end_token=True,
        )  # fmt: skip
        return [cut([int(text[1:-1]) for text in found.hypotheses[0]]) for found in results]

    return generate


def cut(ids: list[int]) -> tuple[list[int], bool]:
    """Return ids up to EOS, and whether there is one."""
    return (ids[: ids.index(EOS)], True) if EOS in ids else (ids, False)


@dataclass
class Waiting:
    """A request that waits for its output."""

    ids: list[int]
    max_tokens: int
    done: asyncio.Future[tuple[list[int], bool]] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


def end_if_failed(decoding: asyncio.Task[None]) -> None:
    """End the server with its decoding: nobody else would answer those who wait."""
    if not decoding.cancelled() and (error := decoding.exception()):
        print(f"error: decoding failed: {error!r}", file=sys.stderr, flush=True)
        os._exit(1)


def make_app(name: str, generate: Generate, batch_size: int) -> Starlette:
    """Return the application; outputs of one batch have the bound of the longest."""
    processor: Any = sentencepiece.SentencePieceProcessor()
    processor.Load(str(MODEL / "spiece.model"))
    prefix = json.loads((MODEL / "config.json").read_text(encoding="utf-8"))["prefix"]
    queue: asyncio.Queue[Waiting] = asyncio.Queue()

    async def decode() -> None:
        while True:
            batch = [await queue.get()]
            while len(batch) < batch_size and not queue.empty():
                batch.append(queue.get_nowait())
            most = max(each.max_tokens for each in batch)
            found = await asyncio.to_thread(generate, [each.ids for each in batch], most)
            for each, (ids, ended) in zip(batch, found, strict=True):
                if not each.done.cancelled():  # its client is still there
                    ends = ended and len(ids) < each.max_tokens
                    each.done.set_result((ids[: each.max_tokens], ends))

    async def completions(request: Request) -> Response:
        body = await request.json()
        text = body["prompt"]
        ids = processor.EncodeAsIds(text if text.startswith(prefix) else prefix + text)
        waiting = Waiting([*ids, EOS], body["max_tokens"])
        queue.put_nowait(waiting)
        return StreamingResponse(stream(waiting), media_type="text/event-stream")

    async def stream(waiting: Waiting) -> AsyncIterator[str]:
        ids, ended = await waiting.done
        reason = "stop" if ended else "length"
        choice = {"index": 0, "text": processor.DecodeIds(ids), "finish_reason": reason}
        usage = {"completion_tokens": len(ids) + ended}
        for event in ({"choices": [choice]}, {"choices": [], "usage": usage}):
            yield f"data: {json.dumps(event)}\n\n"
        yield "data: [DONE]\n\n"

    async def models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": name, "object": "model"}]})

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        decoding = asyncio.create_task(decode())
        decoding.add_done_callback(end_if_failed)
        yield
        decoding.cancel()

    routes = [
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/models", models),
    ]
    app = Starlette(routes=routes, lifespan=lifespan)
    app.state.queue = queue
    return app


if __name__ == "__main__":
    typer.run(main)
