"""Load one or several servers, and check each output against that of the command `batch`.

    python -m speculative_t5 serve --port 8080
    python scripts/benchmarks/serve_load.py http://127.0.0.1:8080
    python scripts/benchmarks/serve_load.py http://127.0.0.1:8080 --requests 10000 --clients 16
    python scripts/benchmarks/serve_load.py http://127.0.0.1:8080 --disturb

1, 4, 16 and 64 clients at a time send the same prompts as streams, greedy; `batch` decodes these
prompts as well. They take turns, in a random order for each turn, after a first one that is not
counted. The clients share the processors with the server. `--disturb` lets a third of the requests
leave at random moments and makes a tenth nonsense (malformed, fuzzed, huge, slow, to nowhere); the
others must get their outputs all the same, and at the end the server must have no rows left. Ends
with exit code 1 if an output differs.

Needs `pip install ".[compare,serve]"`.
"""

import asyncio
import json
import random
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import aiohttp
import httpx
import numpy as np
import typer
from programs.clients import Answer, Run, Wrong, differing, drive, model_of, new_client, settle

REPOSITORY = Path(__file__).parents[2]
PROMPTS = REPOSITORY / "tests" / "learners.tsv"  # sentences of learners, a tab, their corrections
BATCH = "batch"
MARK = 1000  # requests between two lines on the server's memory
FAULTS = (Wrong, httpx.HTTPError, aiohttp.ClientError)  # of a server, not of this program
MAX_SHOWN = 3  # outputs that differ


@dataclass
class Figures:
    """What one variant gave in all turns that count."""

    speeds: list[float] = field(default_factory=list)  # tokens per second of each turn
    rates: list[float] = field(default_factory=list)  # requests per second of each turn
    answers: list[Answer] = field(default_factory=list)
    others: Counter[str] = field(default_factory=Counter)  # see `Run`
    # The server's resident bytes, after each turn or each thousand of requests.
    memory: list[int] = field(default_factory=list)
    differ: int = 0

    def add(self, run: Run) -> None:
        self.speeds.append(sum(answer.tokens for answer in run.answers) / run.seconds)
        self.rates.append(len(run.answers) / run.seconds)
        self.answers += run.answers
        self.others += run.others


@dataclass(frozen=True)
class Server:
    """A running server: its address, what it is called here, and its process if that is here."""

    url: str
    name: str
    process: Any  # of psutil, or None

    def resident(self) -> int | None:
        """Return the bytes resident now, those of its child processes included."""
        if self.process is None:
            return None
        family = [self.process, *self.process.children(recursive=True)]
        return sum(each.memory_info().rss for each in family)


def main(
    urls: Annotated[list[str], typer.Argument(help="Addresses of servers.", show_default=False)],
    clients: Annotated[str, typer.Option(help="Clients at a time, several by commas.")] = (
        "1,4,16,64"
    ),
    requests: Annotated[int, typer.Option(min=1, help="Requests of one turn.")] = 300,
    turns: Annotated[int, typer.Option(min=1, help="How often everything is measured.")] = 3,
    disturb: Annotated[
        bool, typer.Option("--disturb", help="Let clients leave and send nonsense.")
    ] = False,
    batch_options: Annotated[
        str, typer.Option(help="Options of the server, for batch: '--num-draft 4', say.")
    ] = "",
    prompts: Annotated[
        Path, typer.Option(help="A prompt a line, up to a tab; taken again from the first.")
    ] = PROMPTS,
    join: Annotated[int, typer.Option(min=1, help="Lines of the file that make a prompt.")] = 1,
    max_tokens: Annotated[int, typer.Option(min=1, help="Bound on an output's tokens.")] = 256,
    api_key: Annotated[str | None, typer.Option(help="Key of the servers.")] = None,
    seed: Annotated[int, typer.Option(help="For the order, and for those who leave.")] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of the table.")
    ] = False,
) -> None:
    """Load one or several servers, and check each output against that of the command `batch`."""
    counts = [int(count) for count in clients.split(",") if count.isdecimal()]
    if len(counts) != clients.count(",") + 1 or min(counts) < 1:
        sys.exit(f"error: --clients must be numbers of at least 1 by commas, got {clients!r}")
    for url in urls:
        parts = urlsplit(url)
        if url != f"http://{parts.netloc}" or not parts.netloc:
            sys.exit(f"error: an address must be like http://127.0.0.1:8080, got {url!r}")
    lines = prompts.read_text(encoding="utf-8").splitlines()
    sources = cycle(line.split("\t")[0] for line in lines if line.strip())
    texts = [" ".join(islice(sources, join)) for _ in range(requests)]
    options = ["--max-tokens", str(max_tokens), *shlex.split(batch_options)]
    rng = random.Random(seed)
    load = Load(texts, Offline(texts, options), counts, max_tokens, api_key, rng, disturb)
    try:
        figures = asyncio.run(load.measure(urls, turns))
    except (*FAULTS, ExceptionGroup) as error:
        reason = first_of(error)
        if not isinstance(reason, FAULTS):
            raise
        sys.exit(f"error: {type(reason).__name__}: {reason}")
    title = f"{requests} requests, {turns} turns, {'disturbed' if disturb else 'undisturbed'}"
    print(as_object(title, figures) if as_json else "\n".join([title, *report(figures)]))
    if any(found.differ for found in figures.values()):
        sys.exit("error: outputs differ from those of batch")


def first_of(error: BaseException) -> BaseException:
    """Return the first error of a group, however deep."""
    return first_of(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


class Offline:
    """The command `batch` on the same prompts; `texts` are its outputs."""

    def __init__(self, prompts: Sequence[str], options: Sequence[str]) -> None:
        self.prompts = prompts
        self.options = options
        self.texts: list[str] = []

    def run(self) -> tuple[float, float]:
        """Decode all prompts; return tokens and prompts per second, without loading the models."""
        with tempfile.TemporaryDirectory() as folder:
            source, output = Path(folder, "prompts.jsonl"), Path(folder, "output.jsonl")
            records = (json.dumps({"prompt": prompt}) + "\n" for prompt in self.prompts)
            source.write_text("".join(records), encoding="utf-8")
            command = [sys.executable, "-m", "speculative_t5", "batch"]
            done = subprocess.run(
                [*command, source, "--output", output, *self.options],
                cwd=REPOSITORY,
                check=False,
                capture_output=True,
                text=True,
            )
            if done.returncode:
                sys.exit(f"error: batch: {done.stderr.strip().splitlines()[-1]}")
            found = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
        texts = [record["text"] for record in found]
        if self.texts and texts != self.texts:
            sys.exit("error: batch gave other outputs than before")
        self.texts = texts
        *_, (tokens, seconds, speed) = re.findall(
            r"([\d,]+) tokens in ([\d.]+) s, ([\d,]+) tokens/s", done.stderr
        )
        tokens, speed = (float(number.replace(",", "")) for number in (tokens, speed))
        return speed, len(texts) * speed / tokens


@dataclass
class Load:
    """Runs the variants in turn."""

    texts: Sequence[str]
    offline: Offline
    clients: Sequence[int]
    max_tokens: int
    key: str | None
    rng: random.Random
    disturb: bool

    async def measure(self, urls: Sequence[str], turns: int) -> dict[tuple[str, int], Figures]:
        """Return the figures of each variant, a name and a number of clients."""
        servers = [await self._meet(url) for url in urls]
        variants = [(server, count) for server in servers for count in self.clients]
        figures = {(server.name, count): Figures() for server, count in variants}
        figures = {(BATCH, 0): Figures()} | figures
        for turn in range(turns + 1):
            for variant in self.rng.sample([None, *variants], len(variants) + 1):
                if variant is None:
                    speed, rate = await asyncio.to_thread(self.offline.run)
                    if turn:
                        figures[BATCH, 0].speeds.append(speed)
                        figures[BATCH, 0].rates.append(rate)
                else:
                    server, count = variant
                    found = figures[server.name, count] if turn else Figures()
                    await self._run(server, count, found, warm_up=not turn)
        for (name, count), found in figures.items():
            wrong = differing(found.answers, self.offline.texts)
            found.differ = len(wrong)
            for answer in wrong[:MAX_SHOWN]:
                expected = self.offline.texts[answer.index]
                note(f"{name}, {count} clients: {answer.text!r} instead of {expected!r}")
        return figures

    async def _meet(self, url: str) -> Server:
        async with new_client(url, self.key) as client:
            name = await model_of(client)
        port = urlsplit(url).port or 80
        return Server(url, f"{name} at {port}", process_at(port))

    async def _run(self, server: Server, clients: int, found: Figures, *, warm_up: bool) -> None:
        texts = self.texts[: 2 * clients] if warm_up else self.texts

        def watch(done: int) -> None:
            if done % MARK and done != len(texts):
                return
            if (resident := server.resident()) is not None:
                found.memory.append(resident)
                if done >= MARK:
                    size = f"{resident / 1e6:.1f} MB resident"
                    note(f"{server.name}, {clients} clients: {done:,} requests, {size}")

        async with new_client(server.url, self.key) as client:
            stay, rng = 0.0, None
            if self.disturb and not warm_up:
                typical = await drive(client, texts[: 2 * clients], clients, self.max_tokens)
                stay = statistics.median(answer.whole for answer in typical.answers)
                rng = self.rng
            run = await drive(
                client, texts, clients, self.max_tokens, disturb=rng, stay=stay, watch=watch
            )
            await settle(client)
        found.add(run)


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def process_at(port: int) -> Any:
    """Return the process that listens at a port of this machine, if it can be seen."""
    import psutil

    try:
        for found in psutil.net_connections("tcp"):
            if found.status == psutil.CONN_LISTEN and found.laddr.port == port and found.pid:
                return psutil.Process(found.pid)
    except psutil.AccessDenied:
        note("the servers' memory is not watched: the system does not show it")
    return None


def report(figures: dict[tuple[str, int], Figures]) -> list[str]:
    """Return the lines of a table."""
    lines = [
        f"{'':32} {'clients':>7} {'requests/s':>10} {'tokens/s':>8} {'of batch':>8} "
        f"{'first token, ms':>17} {'whole, ms':>17} {'memory, MB':>17} {'same output':>12}",
        f"{'':32} {'':7} {'':10} {'':8} {'':8} {'50 %':>8} {'99 %':>8} {'50 %':>8} {'99 %':>8} "
        f"{'first':>8} {'most':>8}",
    ]
    base = statistics.median(figures[BATCH, 0].speeds)
    for (name, clients), found in figures.items():
        speed, rate = statistics.median(found.speeds), statistics.median(found.rates)
        line = f"{name:32} {clients or '':>7} {rate:10.1f} {speed:8.0f} {speed / base:8.2f}"
        if found.answers:
            times = [*percentiles(found.answers, "first"), *percentiles(found.answers, "whole")]
            line += "".join(f" {1000 * seconds:8.0f}" for seconds in times)
            memory = (found.memory[0], max(found.memory)) if found.memory else ()
            line += "".join(f" {resident / 1e6:8.1f}" for resident in memory) or " " * 18
            count = len(found.answers)
            line += f" {f'{count - found.differ}/{count}':>12}"
        lines.append(line)
        lines += [f"    {count:,} {kind}" for kind, count in found.others.items()]
    return lines


def percentiles(answers: Sequence[Answer], name: str) -> tuple[float, float]:
    """Return the median and the 99th percentile of a time."""
    half, most = np.percentile([getattr(answer, name) for answer in answers], [50, 99])
    return float(half), float(most)


def waits(found: Figures) -> dict[str, Any]:
    """Return the percentiles of what clients waited for, if any got an answer."""
    if not found.answers:
        return {}
    return {key: percentiles(found.answers, key) for key in ("first", "whole")}


def as_object(title: str, figures: dict[tuple[str, int], Figures]) -> str:
    """Return the report as a line of JSON."""
    variants = [
        {
            "name": name,
            "clients": clients,
            "tokens_per_second": found.speeds,
            "requests_per_second": found.rates,
            "memory": found.memory,
            "differ": found.differ,
            "answers": len(found.answers),
            "others": found.others,
        }
        | waits(found)
        for (name, clients), found in figures.items()
    ]
    return json.dumps({"title": title, "variants": variants})


if __name__ == "__main__":
    typer.run(main)
