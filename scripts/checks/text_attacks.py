"""Send a server texts that take long, and show what small requests beside them see.

Starts `serve` with few open files, as a Mac allows by default, with the shipped pair and a tiny
model that translates. Each kind of text is sent by three clients at a time, while another one asks
for /health, for a completion and for the correction of a sentence in turn. In the end the first
three kinds are sent again, and the server is told to stop.

With --planted the processes that work on texts hold the interpreter for ever as soon as they split
one of the attack's, whatever the patterns of today do.

Exits with 1 if a small request ever waited for longer than `--most`, or the server for longer than
ten seconds to end.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from statistics import median
from typing import Annotated, NamedTuple

import typer

REPOSITORY = Path(__file__).parents[2]
CLIENTS = 3  # that send the same at a time
PAUSE = 0.02  # seconds between two small requests
PATIENCE = 120.0  # seconds for an answer
LONGEST = 10.0  # seconds for the server to end
SMALL = {  # by name: method, path and fields
    "health": ("GET", "/health", None),
    "completion": ("POST", "/v1/completions", {"prompt": "He go home.", "max_tokens": 8}),
    "check": ("POST", "/v2/check", {"text": "He go home.", "language": "en"}),
}
WARM = 3  # times that each small request is sent before
PLANTED = """
import re, sys
sys.path[:] = {path!r}
from speculative_t5.documents import rewriting
from speculative_t5.serve import text_worker
split = rewriting.Document._split
def hangs(self):
    if len(self.text) > 1000:
        re.match("(a+)+$", "a" * 60 + "b")
    return split(self)
rewriting.Document._split = hangs
text_worker.work_on_texts()
"""
SERVES = """
import sys
from speculative_t5 import cli
from speculative_t5.serve import workers
workers.default_command = lambda: [sys.executable, "-c", {code!r}]
sys.argv[0] = "__main__.py"
cli.main()
"""


class Attack(NamedTuple):
    """A request that may take long."""

    path: str
    body: bytes
    kind: str = "application/json"


def as_json(path: str, **fields: object) -> Attack:
    return Attack(path, json.dumps(fields, ensure_ascii=False).encode())


def attacks(size: int) -> dict[str, Attack]:
    """Return requests of about so many bytes, by name."""
    words = "He go home and she have a apple. " * (size // 33)
    into = {"source": "de", "target": "fr", "model": "tiny"}
    parts = [{"text": "a "}, {"markup": "<b>"}] * (size // 50)
    return {
        "a run of marks": as_json(
            "/v2/check", text="He go home " + "!" * size + " and so on.", language="en"
        ),
        "a tag without an end": as_json("/translate", q="<" + "a" * size, format="html", **into),
        "a placeholder of zeros": as_json("/translate", q="a %" + "0" * size + " b.", **into),
        "many sentences": as_json("/v2/check", text=words, language="en"),
        "sentences, language unknown": as_json("/v2/check", text=words, language="auto"),
        "one sentence": as_json("/v2/check", text="he go " * (size // 6), language="en"),
        "no spaces": as_json("/v2/check", text="a" * size, language="en"),
        "blank lines": as_json("/v2/check", text="a\n\n" * (size // 3), language="en"),
        "brackets": as_json("/translate", q="<b " * (size // 3), format="html", **into),
        "a list of texts": as_json("/translate", q=["Das."] * (size // 8), **into),
        "many annotations": as_json("/v2/check", data={"annotation": parts}, language="en"),
        "detect": as_json("/detect", q=words),
        "escapes in a form": Attack(
            "/v2/check",
            b"language=en&text=" + b"%C3%A9+" * (size // 7),
            "application/x-www-form-urlencoded",
        ),
        "many fields": Attack(
            "/v2/check", b"a=1&" * (size // 4), "application/x-www-form-urlencoded"
        ),
        "a long prompt": as_json("/v1/completions", prompt=words),
        "many prompts": as_json(
            "/v1/completions", prompt=[words[:2000]] * (size // 2000), max_tokens=1
        ),
        "many ids": as_json("/v1/completions", prompt=[5] * (size // 3)),
        "a long chat": as_json(
            "/v1/chat/completions", messages=[{"role": "user", "content": words}]
        ),
        "nested lists": Attack("/v1/completions", b"[" * (size // 2) + b"]" * (size // 2)),
        "long names": as_json("/v1/completions", prompt="a", **{"b" * (size // 2): 1}),
    }


def send(port: int, attack: Attack) -> int:
    """Send a request, and return the status of its answer."""
    connection = HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        connection.request("POST", attack.path, attack.body, {"Content-Type": attack.kind})
        response = connection.getresponse()
        response.read()
        return response.status
    finally:
        connection.close()


def ask(port: int, name: str) -> float:
    """Send a small request, and return the seconds until its answer; lost ones take forever."""
    method, path, fields = SMALL[name]
    connection, began = HTTPConnection("127.0.0.1", port, timeout=PATIENCE), time.monotonic()
    try:
        connection.request(method, path, json.dumps(fields) if fields else None)
        response = connection.getresponse()
        response.read()
        return time.monotonic() - began if response.status == 200 else PATIENCE
    except (OSError, HTTPException):
        return PATIENCE
    finally:
        connection.close()


@contextmanager
def server(files: int, planted: bool, folder: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Run a server that may open so many files, and give its process and port."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

    sys.path[:0] = [str(REPOSITORY / name) for name in ("tests", "scripts")]
    from test_languages import make_translator

    tiny = Path(make_translator(folder)).rename(folder / "tiny")
    code = SERVES.format(code=PLANTED.format(path=sys.path))
    start = ["-c", code] if planted else ["-m", "speculative_t5"]
    models = ["--model", "correct-base", "--model", str(tiny)]
    with subprocess.Popen(
        [sys.executable, *start, "serve", "--port", "0", *models],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=limit,
        cwd=REPOSITORY,
    ) as process:
        try:
            assert process.stdout
            yield process, int(process.stdout.readline().rpartition(":")[2])
        finally:
            process.kill()


def beside(port: int, over: Callable[[], bool], least: int = WARM) -> dict[str, list[float]]:
    """Send small requests in turn until something is over; return the seconds of each."""
    seconds: dict[str, list[float]] = {name: [] for name in SMALL}
    while not over() or len(seconds["check"]) < least:
        for name in SMALL:
            seconds[name].append(ask(port, name))
            time.sleep(PAUSE)
    return seconds


def row(name: str, statuses: str, took: float, seconds: dict[str, list[float]]) -> str:
    shown = "  ".join(f"{median(each):.3f} {max(each):.3f}" for each in seconds.values())
    return f"{name:28s} {statuses:12s} {took:6.1f}  {shown}"


def main(
    size: Annotated[int, typer.Option(help="Bytes of a request, about.")] = 200_000,
    files: Annotated[int, typer.Option(help="Files that the server may open.")] = 256,
    seconds: Annotated[float, typer.Option(help="Most seconds of each attack.")] = 10.0,
    most: Annotated[float, typer.Option(help="Seconds that a small request may wait.")] = 0.5,
    only: Annotated[str, typer.Option(help="A word of the attacks' names.")] = "",
    planted: Annotated[bool, typer.Option(help="Let all long texts hang.")] = False,
) -> None:
    print(f"three clients send {size:,} bytes; a small request beside waits, in seconds:")
    print(f"{'attack':28s} {'answers':12s} {'took':>6s}  health       completion   check")
    chosen, failed = attacks(size), []
    with (
        tempfile.TemporaryDirectory() as folder,
        server(files, planted, Path(folder)) as (process, port),
        ThreadPoolExecutor(100) as threads,
    ):
        send(port, as_json("/translate", q="Das.", source="de", target="fr", model="tiny"))
        print(row("nothing", "", 0.0, beside(port, lambda: True)), flush=True)
        for name, attack in chosen.items():
            if only in name:
                sent = [threads.submit(send, port, attack) for _ in range(CLIENTS)]
                took, found = watched(port, sent, seconds)
                print(row(name, answers(sent), took, found), flush=True)
                if max(map(max, found.values())) > most:
                    failed.append(f"{name}: a small request waited for longer than {most:g} s")
        for attack in [*chosen.values()][:CLIENTS]:
            threads.submit(send, port, attack)
        time.sleep(1.0)
        began = time.monotonic()
        process.terminate()
        try:
            code = process.wait(3 * LONGEST)
        except subprocess.TimeoutExpired:
            code = None
        took = time.monotonic() - began
        print(f"SIGTERM beside the first three: exit code {code} after {took:.1f} s")
        if took > LONGEST or code != 0:
            failed.append(f"the server ended with {code} after {took:.1f} s")
    if failed:
        sys.exit("\n".join(failed))


def watched(
    port: int, sent: list[Future[int]], seconds: float
) -> tuple[float, dict[str, list[float]]]:
    """Send small requests until others are answered, or a time is over; return how long it was."""
    began = time.monotonic()

    def over() -> bool:
        return time.monotonic() > began + seconds or all(each.done() for each in sent)

    found = beside(port, over)
    return time.monotonic() - began, found


def answers(sent: list[Future[int]]) -> str:
    """Return the statuses of answers, with a dot for each that has not come."""
    return " ".join(str(each.result()) if each.done() else "." for each in sent)


if __name__ == "__main__":
    app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(help=__doc__)(main)
    app()
