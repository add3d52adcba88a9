"""Correct texts by LanguageTool's protocol, and compare with what `rewrite` makes of them.

Texts are learners' sentences, some with emoji, combining marks or words from right to left among
them. Applying all matches has to give the text of `rewrite`, character by character. Then clients
at a time send the same texts, and their throughput is compared with that of `rewrite` on all of
them joined; the two take turns.
"""

import json
import random
import re
import subprocess
import sys
import time
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Annotated
from urllib.request import Request, urlopen

from speculative_t5 import SpeculativeDecoder

import typer

REPOSITORY = Path(__file__).parents[2]
LEARNERS = REPOSITORY / "tests" / "learners.tsv"
FOREIGN = (
    "😀",
    "👩\u200d🚀",
    "👍🏽",
    "🇩🇪",
    "cafe\u0301",
    "n\u0303andu\u0301",
    "ị\u0301",
    "नमस्ते",
    "שָׁלוֹם",
    "مَرْحَبًا",
    "العالم",
    "東京",
    "𝒳",
    "Zoe\u0308",
)
PAGE = 500  # words


def make_texts(count: int) -> list[str]:
    """Make texts of one to three sentences; three in four have foreign words among the others."""
    draw = random.Random(0)
    sentences = [line.split("\t")[0] for line in LEARNERS.read_text("utf-8").splitlines()]
    texts = []
    for number in range(count):
        words = " ".join(draw.sample(sentences, draw.randint(1, 3))).split(" ")
        for _ in range(number % 4):
            words.insert(draw.randint(1, len(words)), draw.choice(FOREIGN))
        text = " ".join(words)
        texts.append(unicodedata.normalize("NFD", text) if number % 5 == 0 else text)
    return texts


def corrected(url: str, text: str) -> str:
    """Return a text with all matches of the server applied, by their UTF-16 offsets."""
    body = json.dumps({"text": text, "language": "en"}).encode()
    asked = Request(f"{url}/v2/check", body, {"Content-Type": "application/json"})
    with urlopen(asked) as response:
        matches = json.load(response)["matches"]
    units = text.encode("utf-16-le")
    for match in reversed(matches):
        start, end = 2 * match["offset"], 2 * (match["offset"] + match["length"])
        new = match["replacements"][0]["value"].encode("utf-16-le")
        units = units[:start] + new + units[end:]
    return units.decode("utf-16-le")


def main(
    model: Annotated[str, typer.Option(help="Model that corrects.")] = "correct-base",
    count: Annotated[int, typer.Option(help="Texts.")] = 1000,
    clients: Annotated[int, typer.Option(help="Clients at a time.")] = 16,
    turns: Annotated[int, typer.Option(help="Turns of the comparison of speed.")] = 3,
) -> None:
    texts = make_texts(count)
    decoder = SpeculativeDecoder.from_pretrained(model)
    least = decoder.min_probability  # which the server does not adapt to a text
    wanted = [decoder.rewrite(text, min_probability=least) for text in texts]
    command = [sys.executable, "-m", "speculative_t5", "serve", "--port", "0", "--model", model]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout
            url = server.stdout.readline().split()[-1]
            compare(url, decoder, texts, [done.text for done in wanted], clients, turns)
        finally:
            server.terminate()
    pieces = [piece for done in wanted for piece in done.pieces]
    print(f"{len(pieces)} sentences, {sum(p.status == 'changed' for p in pieces)} of them changed")


def compare(
    url: str,
    decoder: SpeculativeDecoder,
    texts: list[str],
    wanted: list[str],
    clients: int,
    turns: int,
) -> None:
    with ThreadPoolExecutor(clients) as pool:
        found = [*pool.map(lambda text: corrected(url, text), texts)]
        equal = sum(a == b for a, b in zip(found, wanted, strict=True))
        changed = sum(a != b for a, b in zip(texts, wanted, strict=True))
        foreign = sum(any(map(text.__contains__, FOREIGN)) for text in texts)
        print(f"{equal} of {len(texts)} texts equal, {changed} changed, {foreign} with other signs")
        words = re.findall(r"\S+\s*", "\n\n".join(texts))
        page = "".join(words[:PAGE])
        times = []
        for _ in range(turns):
            began = time.perf_counter()
            corrected(url, page)
            times.append(time.perf_counter() - began)
        print(f"a page of {PAGE} words, one client: {median(times):.2f} s")
        ratios = []
        whole = "\n\n".join(texts)
        for _ in range(turns):
            began = time.perf_counter()
            done = decoder.rewrite(whole, min_probability=decoder.min_probability)
            assert done.text == "\n\n".join(wanted)
            alone = time.perf_counter() - began
            began = time.perf_counter()
            assert [*pool.map(lambda text: corrected(url, text), texts)] == found
            ratios.append(alone / (time.perf_counter() - began))
            print(f"rewrite {alone:.1f} s, {clients} clients {alone / ratios[-1]:.1f} s")
        print(f"throughput of {clients} clients relative to rewrite: {median(ratios):.2f}")


if __name__ == "__main__":
    app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(help=__doc__)(main)
    app()
