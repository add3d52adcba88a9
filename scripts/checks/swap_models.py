"""Memory and threads of a server whose models take turns, as with --memory.

Two models, by default the shipped target and its draft, that do not fit side by side: each swap
unloads one, loads the other and decodes a sentence with it. Prints a row for every `--every` swaps.
"""

import asyncio
from collections.abc import Iterator
from functools import partial
from typing import Annotated, NamedTuple

from speculative_t5.checkpoints import locate, read_tokenizer
from speculative_t5.generation import GenerationOptions, SpeculativeDecoder
from speculative_t5.serve import Models, Served, Service

import mlx.core as mx
import psutil
import typer

SENTENCE = "He go home and she have a apple."


class Row(NamedTuple):
    """What the process takes after some swaps."""

    swaps: int
    memory: float  # MB
    active: float  # MB of MLX's arrays
    threads: int


def load(name: str) -> SpeculativeDecoder:
    return SpeculativeDecoder.from_pretrained(name, draft=None)


def served(name: str) -> Served:
    read = partial(read_tokenizer, locate(name))
    return Served(name, partial(Service, partial(load, name)), read, size=60)


async def swapped(names: list[str], swaps: int, every: int) -> list[Row]:
    """Let models take turns; return what the process takes meanwhile."""
    models, rows, process = Models([*map(served, names)], memory=100), list[Row](), psutil.Process()
    models.start()
    for swap in range(swaps + 1):
        async with models.use(models.models[names[swap % len(names)]]) as service:
            while service.state == "loading":
                await asyncio.sleep(0.01)
            if service.failure:
                raise service.failure
            call = service.submit([SENTENCE], GenerationOptions(max_tokens=12))
            async for _ in call.chunks():
                pass
        if swap % every == 0:
            memory = process.memory_info().rss / 1e6
            row = Row(swap, memory, mx.get_active_memory() / 1e6, process.num_threads())
            rows.append(row)
    await models.stop(0)
    return rows


def lines(rows: list[Row]) -> Iterator[str]:
    yield "| swaps | memory, MB | MLX's arrays, MB | threads |"
    yield "|---|---|---|---|"
    for row in rows:
        yield f"| {row.swaps} | {row.memory:.0f} | {row.active:.0f} | {row.threads} |"


def main(
    models: Annotated[list[str] | None, typer.Argument(help="Names or folders of two.")] = None,
    swaps: Annotated[int, typer.Option(help="How often one takes the place of another.")] = 160,
    every: Annotated[int, typer.Option(help="Swaps between two rows.")] = 20,
) -> None:
    names = models or ["correct-base", "correct-small"]
    for line in lines(asyncio.run(swapped(names, swaps, every))):
        print(line, flush=True)


if __name__ == "__main__":
    typer.run(main)
