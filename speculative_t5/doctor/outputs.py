"""Checks of whole outputs.

`greedy` outputs are the same with a draft and without, those of `sampling` follow the target's
distribution, `threads` do not disturb each other, and the shipped pair's outputs are `known`.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from ..bench import random_prompts
from ..checkpoints import dtype_name
from ..decoding import Sampler
from ..generation import SpeculativeDecoder
from ..models import T5
from ..tokenizers import Prompt
from . import tiny
from .checks import NUM_DRAFT, Finding, Subject, dtype_of, promises_equal_rows

MAX_TOKENS = 12
TIES_TOKENS = 40  # more than the smallest capacity of a cache
NUM_SENTENCES, NUM_TIES = 100, 20
SECONDS = 30.0  # after which no further prompt is begun
THREADS, SENTENCES_OF_EACH = 4, 6

COUNT = 4000  # outputs of each kind
MAX_SAMPLED, VOCAB_SIZE = 3, 5
LEAST_EXPECTED = 5.0  # outputs of a cell of the test; rarer ones are counted together
LEAST_P = 1e-6
PROMPT = [3, 4, 2, 3, 3, 2, 4, 1]  # it repeats itself, for a lookup to copy from
KINDS: dict[str, dict[str, Any]] = {
    "draft, token rule": {"draft_model": True, "verify": "token"},
    "draft, block rule": {"draft_model": True, "verify": "block"},
    "lookup, block rule": {"draft_model": False, "verify": "block"},
}

# Sentences to correct.
BEGINNINGS = (
    "My sister dont know", "He think that I knows", "Yesterday they tells us", "We was asking",
    "The teacher have explained me", "An old man wanted to knew", "It are not clear",
    "Nobody in the the house remember", "I has forgot", "Her brothers wants to see",
)  # fmt: skip
ENDINGS = (
    "where there keys is.", "why the trian is late.", "how much do it costs.",
    "who have opened the window", "what the childs are doing.", "when we goes too Paris.",
    "wether it will rains tomorow.", "which book she have readed.", "how to went home from hear.",
    "that the dog were hungry.",
)  # fmt: skip
SENTENCES = tuple(f"{first} {last}" for last in ENDINGS for first in BEGINNINGS)

# The shipped target's greedy outputs in float32, made on a Linux CPU by
#     python -m speculative_t5 batch sentences.txt --regular-decode --dtype float32
# for the sentences in which the best token always has a logit that is larger than the next by 3 or
# more: no device's rounding decides those.
KNOWN = {
    "An old man wanted to knew what the childs are doing.": (
        "An old man wanted to know what the children are doing."
    ),
    "We was asking what the childs are doing.": "We were asking what the children are doing.",
    "It are not clear what the childs are doing.": "It is not clear what the children are doing.",
    "My sister dont know wether it will rains tomorow.": (
        "My sister doesn't know whether it will rain tomorrow."
    ),
    "He think that I knows wether it will rains tomorow.": (
        "He thinks that I know whether it will rain tomorrow."
    ),
    "My sister dont know how to went home from hear.": (
        "My sister doesn't know how to go home from here."
    ),
    "An old man wanted to knew how to went home from hear.": (
        "An old man wanted to know how to go home from here."
    ),
    "It are not clear how to went home from hear.": "It is not clear how to go home from here.",
}


@dataclass(frozen=True)
class Compared:
    """Prompts whose greedy outputs differ with a draft and without, by their indices.

    Attributes:
        name: Of the model and the prompts.
        count: Number of prompts.
        plain: Where plain decoding and a draft differ.
        steady: Where steady decoding differs without a draft, with one, and with lookup.
        exact: Whether `plain` is promised to be empty.
    """

    name: str
    count: int
    plain: list[int]
    steady: list[int]
    exact: bool

    @property
    def fault(self) -> str | None:
        """What breaks a promise, if anything does."""
        for mode, found in (("steady", self.steady), ("plain", self.plain if self.exact else [])):
            if found:
                return (
                    f"{len(found)} of {self.count} outputs depend on the draft in {mode} mode "
                    f"({self.name}, the first for prompt {found[0]})"
                )
        return None

    def row(self) -> str:
        """Return a row of the report's table."""
        return f"{f'{self.count} {self.name}'.ljust(34)}{len(self.plain):>12}{len(self.steady):>13}"


def greedy(subject: Subject) -> Finding:
    """Compare greedy outputs with a draft and without, in plain and in steady mode.

    In steady mode none may differ, in any type; in plain mode none where `promises_equal_rows` says
    so. The prompts are sentences for the subject's models, and ids for random models with logits so
    close to each other that the last bits decide.
    """
    decoder = subject.decoder()
    own = dtype_of(decoder.model)
    found = [compare(f"sentences, {dtype_name(own)}", decoder, SENTENCES[:NUM_SENTENCES])]
    for dtype in dict.fromkeys((own, mx.float32, mx.bfloat16)):
        model = tiny.tied_t5(dtype)
        tied = SpeculativeDecoder(model, model, num_draft=NUM_DRAFT)
        prompts = random_prompts(model, 9, NUM_TIES)
        found.append(compare(f"near-ties, {dtype_name(dtype)}", tied, prompts, TIES_TOKENS))
    head = f"{'outputs that depend on the draft'.ljust(34)}{'plain mode':>12}{'steady mode':>13}"
    notes = (head, *(each.row() for each in found))
    details = {"compared": [asdict(each) for each in found]}
    faults = "; ".join(each.fault for each in found if each.fault)
    first = found[0]
    modes = "plain and steady mode" if first.exact else "steady mode"
    reason = f"outputs are the same with a draft and without in {modes}"
    if not first.exact:
        reason += f"; in plain mode {first.count - len(first.plain)} of {first.count} are"
    return Finding.of("greedy", faults, reason, details, notes)


def compare(
    name: str,
    decoder: SpeculativeDecoder,
    prompts: Sequence[Prompt],
    max_tokens: int = MAX_TOKENS,
) -> Compared:
    """Decode prompts greedily with and without a decoder's draft, in plain and steady mode."""
    model, tokenizer = decoder.model, decoder.tokenizer
    lookup, steady = (
        SpeculativeDecoder(model, draft, tokenizer, num_draft=NUM_DRAFT, steady=True)
        for draft in ("lookup", decoder.draft or "lookup")
    )
    ways = ((decoder, False), (decoder, True), (steady, False), (steady, True), (lookup, True))
    began = time.perf_counter()
    count, plain_differs, steady_differs = 0, [], []
    for i, prompt in enumerate(prompts):
        plain, drafted, *others = (
            each.generate(prompt, max_tokens=max_tokens, speculative=speculative).tokens
            for each, speculative in ways
        )
        if plain != drafted:
            plain_differs.append(i)
        if others[1:] != others[:-1]:
            steady_differs.append(i)
        count += 1
        if time.perf_counter() - began > SECONDS:
            break
    exact = promises_equal_rows(model)
    return Compared(name, count, plain_differs, steady_differs, exact)


def sampling(subject: Subject) -> Finding:
    """Test sampled outputs of a tiny model against their distribution, which is enumerated.

    The seed is fixed: on the same machine the result is always the same.
    """
    target, draft = (
        tiny.t5(seed=seed, d_model=16, d_kv=8, d_ff=16, num_heads=2, vocab_size=VOCAB_SIZE)
        for seed in (1, 2)
    )
    expected = distribution(target)
    values = {
        kind: p_value(*chi_square(_sampled(target, draft, **options), expected))
        for kind, options in KINDS.items()
    }
    details = {"outputs": COUNT, "p_values": values, "least_p": LEAST_P}
    kind, worst = min(values.items(), key=lambda item: item[1])
    fault = (
        f"outputs are not distributed as the target's own ({kind}): chi-square of {COUNT} "
        f"outputs, p = {worst:.0e}"
    )
    reason = (
        f"{COUNT} outputs each of {len(KINDS)} kinds follow the target's distribution "
        f"(chi-square, smallest p {worst:.2f})"
    )
    return Finding.of("sampling", fault if worst < LEAST_P else None, reason, details)


def _sampled(target: T5, draft: T5, *, draft_model: bool, verify: Any) -> Counter[tuple[int, ...]]:
    decoder = SpeculativeDecoder(
        target, draft if draft_model else "lookup", num_draft=2, verify=verify
    )
    outputs = decoder.generate_batch(
        [PROMPT] * COUNT, batch_size=COUNT, temperature=1.0, max_tokens=MAX_SAMPLED
    )
    return Counter((*out.tokens, *[tiny.EOS] * (out.finish_reason == "eos")) for out in outputs)


def distribution(model: T5) -> dict[tuple[int, ...], float]:
    """Return the probability of every output of at most MAX_SAMPLED tokens, EOS included."""
    masses: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(MAX_SAMPLED):
        extended: dict[tuple[int, ...], float] = {}
        for prefix, mass in masses.items():
            if prefix[-1:] == (tiny.EOS,):
                extended[prefix] = mass
                continue
            logits = model(mx.array([PROMPT]), mx.array([[0, *prefix]]))[0, -1]
            probs = np.array(Sampler(1.0).probs(logits), np.float64)
            for token, p in enumerate(probs / probs.sum()):
                extended[*prefix, token] = mass * float(p)
        masses = extended
    return masses


def chi_square(
    seen: Mapping[tuple[int, ...], int], expected: Mapping[tuple[int, ...], float]
) -> tuple[float, int]:
    """Return Pearson's statistic and its degrees of freedom.

    Outputs that are expected less often than LEAST_EXPECTED times make one cell, which joins the
    smallest of the others if it is too small itself.
    """
    total = sum(seen.values())
    cells: list[list[float]] = []
    rare = [0.0, 0.0]
    for output in expected.keys() | seen.keys():
        mass, count = total * expected.get(output, 0.0), float(seen.get(output, 0))
        if mass < LEAST_EXPECTED:
            rare = [rare[0] + mass, rare[1] + count]
        else:
            cells.append([mass, count])
    if cells and rare[0] < LEAST_EXPECTED:
        smallest = min(cells)
        smallest[:] = smallest[0] + rare[0], smallest[1] + rare[1]
    elif rare[0]:
        cells.append(rare)
    return sum((count - mass) ** 2 / mass for mass, count in cells), len(cells) - 1


def p_value(statistic: float, freedom: int) -> float:
    """Return the chance of a chi-square of at least that much (Wilson and Hilferty, 1931)."""
    spread = 2 / (9 * freedom)
    z = ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
    return math.erfc(z / math.sqrt(2)) / 2


def threads(subject: Subject) -> Finding:
    """Decode in several threads that share a decoder, and compare with a single thread."""
    decoder = subject.decoder()
    sentences = SENTENCES[: THREADS * SENTENCES_OF_EACH]

    def decoded(part: Sequence[str]) -> list[list[int]]:
        return [decoder.generate(each, max_tokens=MAX_TOKENS).tokens for each in part]

    expected = decoded(sentences)
    with ThreadPoolExecutor(THREADS) as pool:
        parts = [sentences[i::THREADS] for i in range(THREADS)]
        found = list(pool.map(decoded, parts))
    wrong = sum(
        ours != theirs
        for i, part in enumerate(found)
        for ours, theirs in zip(part, expected[i::THREADS], strict=True)
    )
    details = {"threads": THREADS, "outputs": len(sentences), "different": wrong}
    fault = f"{wrong} of {len(sentences)} outputs of {THREADS} threads differ from serial ones"
    reason = f"{THREADS} threads sharing a decoder give the {len(sentences)} outputs of one"
    return Finding.of("threads", fault if wrong else None, reason, details)


def known(subject: Subject) -> Finding:
    """Compare outputs of the shipped target in float32 with those where it was trained."""
    if not subject.is_shipped:
        return Finding("known", "skipped", "only the outputs of the shipped pair are known")
    decoder = subject.decoder(mx.float32)
    wrong = []
    for sentence, text in KNOWN.items():
        for speculative in (False, True):
            found = decoder.generate(sentence, speculative=speculative).text
            if found != text:
                wrong.append({"prompt": sentence, "expected": text, "found": found})
    faults = [f"expected {each['expected']!r}, found {each['found']!r}" for each in wrong[:1]]
    reason = f"{len(KNOWN)} corrected sentences are those that are known, with a draft and without"
    details = {"sentences": len(KNOWN), "wrong": wrong}
    return Finding.of("known", "".join(faults), reason, details)
