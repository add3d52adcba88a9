"""Checks of whole outputs: `greedy`, `sampling` and `threads`."""

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from ..checkpoints import dtype_name
from ..decoding import Rule, Sampler
from ..generation import SpeculativeDecoder
from ..measure import random_prompts
from ..models import T5
from ..tokenizers import Prompt
from . import tiny
from .checks import DRAFTED_TOKENS, Finding, Subject, dtype_of, promises_equal_rows

MAX_TOKENS = 12
TIES_TOKENS = 40  # more than the smallest capacity of a cache
NUM_SENTENCES, NUM_TIES = 100, 20
SECONDS_OF_COMPARING = 30.0  # after which no further prompt is begun
NUM_THREADS, NUM_THREADED = 4, 24

SAMPLED_OUTPUTS = 4000  # outputs of each kind
MAX_SAMPLED, VOCAB_SIZE = 3, 5
LEAST_EXPECTED = 5.0  # outputs of a cell of the test; rarer ones are counted together
LEAST_P = 1e-6
SAMPLED_PROMPT = [3, 4, 2, 3, 3, 2, 4, 1]  # it repeats itself, for a lookup to copy from
# Whether a model drafts, and the rule.
SAMPLING_KINDS: dict[str, tuple[bool, Rule]] = {
    "draft, coupled rule": (True, "coupled"),
    "draft, token rule": (True, "token"),
    "draft, block rule": (True, "block"),
    "lookup, block rule": (False, "block"),
}

# Sentences to correct.
SENTENCE_BEGINNINGS = (
    "My sister dont know",
    "He think that I knows",
    "Yesterday they tells us",
    "We was asking",
    "The teacher have explained me",
    "An old man wanted to knew",
    "It are not clear",
    "Nobody in the the house remember",
    "I has forgot",
    "Her brothers wants to see",
)
SENTENCE_ENDINGS = (
    "where there keys is.",
    "why the trian is late.",
    "how much do it costs.",
    "who have opened the window",
    "what the childs are doing.",
    "when we goes too Paris.",
    "wether it will rains tomorow.",
    "which book she have readed.",
    "how to went home from hear.",
    "that the dog were hungry.",
)
SENTENCES_OF_LEARNERS = tuple(
    f"{first} {last}" for last in SENTENCE_ENDINGS for first in SENTENCE_BEGINNINGS
)


@dataclass(frozen=True)
class Compared:
    """Prompts whose greedy outputs differ with a draft and without, by their indices."""

    name: str  # of the model and the prompts
    count: int
    plain: list[int]  # where plain decoding and a draft differ
    steady: list[int]  # where steady decoding differs without a draft, with one, and with lookup
    exact: bool  # whether `plain` is promised to be empty

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


def greedy(subject: Subject) -> Finding:
    """Compare greedy outputs with a draft and without, in plain and in steady mode.

    In steady mode none may differ, in any type; in plain mode none where `promises_equal_rows` says
    so. The prompts are sentences for the subject's models, and ids for random models with logits so
    close to each other that the last bits decide.
    """
    decoder = subject.decoder()
    own = dtype_of(decoder.model)
    first = compare(f"sentences, {dtype_name(own)}", decoder, SENTENCES_OF_LEARNERS[:NUM_SENTENCES])
    found = [first]
    for dtype in dict.fromkeys((own, mx.float32, mx.bfloat16)):
        model = tiny.tied_t5(dtype)
        tied = SpeculativeDecoder(model, model, num_draft=DRAFTED_TOKENS)
        prompts = random_prompts(model, 9, NUM_TIES)
        found.append(compare(f"near-ties, {dtype_name(dtype)}", tied, prompts, TIES_TOKENS))
    table = [("outputs that depend on the draft", "plain mode", "steady mode")]
    table += [(f"{c.count} {c.name}", f"{len(c.plain)}", f"{len(c.steady)}") for c in found]
    notes = [f"{name:34}{plain:>12}{steady:>13}" for name, plain, steady in table]
    details = {"compared": [asdict(each) for each in found]}
    faults = "; ".join(each.fault for each in found if each.fault)
    reason = "outputs are the same with a draft and without in plain and steady mode"
    if not first.exact:
        reason = (
            "outputs are the same with a draft and without in steady mode; in plain mode "
            f"{first.count - len(first.plain)} of {first.count} are"
        )
    return Finding.of("greedy", faults, reason, details, notes)


def compare(
    name: str, decoder: SpeculativeDecoder, prompts: Sequence[Prompt], max_tokens: int = MAX_TOKENS
) -> Compared:
    """Decode prompts greedily with and without a decoder's draft, in plain and steady mode."""
    model, tokenizer = decoder.model, decoder.tokenizer
    lookup, steady = (
        SpeculativeDecoder(model, draft, tokenizer, num_draft=DRAFTED_TOKENS, steady=True)
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
        if time.perf_counter() - began > SECONDS_OF_COMPARING:
            break
    return Compared(name, count, plain_differs, steady_differs, promises_equal_rows(model))


def sampling(subject: Subject) -> Finding:
    """Test sampled outputs of a tiny model against their distribution, which is enumerated.

    The seed is fixed: on the same machine the result is always the same.
    """
    target, draft = (
        tiny.t5(seed=seed, d_model=16, d_kv=8, d_ff=16, num_heads=2, vocab_size=VOCAB_SIZE)
        for seed in (1, 2)
    )
    expected, values = distribution(target), {}
    for kind, (by_model, rule) in SAMPLING_KINDS.items():
        decoder = SpeculativeDecoder(
            target, draft if by_model else "lookup", num_draft=2, verify=rule
        )
        found = decoder.generate_batch(
            [SAMPLED_PROMPT] * SAMPLED_OUTPUTS,
            batch_size=SAMPLED_OUTPUTS,
            temperature=1.0,
            max_tokens=MAX_SAMPLED,
        )
        ends = {"eos": (tiny.EOS_ID,)}
        seen = Counter((*out.tokens, *ends.get(out.finish_reason, ())) for out in found)
        values[kind] = p_value(*chi_square(seen, expected))
    kind, worst = min(values.items(), key=lambda item: item[1])
    fault = (
        f"outputs are not distributed as the target's own ({kind}): chi-square of "
        f"{SAMPLED_OUTPUTS} outputs, p = {worst:.0e}"
    )
    reason = (
        f"{SAMPLED_OUTPUTS} outputs each of {len(SAMPLING_KINDS)} kinds follow the target's "
        f"distribution (chi-square, smallest p {worst:.2f})"
    )
    details = {"outputs": SAMPLED_OUTPUTS, "p_values": values, "least_p": LEAST_P}
    return Finding.of("sampling", fault if worst < LEAST_P else None, reason, details)


def distribution(model: T5) -> dict[tuple[int, ...], float]:
    """Return the probability of every output of at most MAX_SAMPLED tokens, EOS included."""
    masses: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(MAX_SAMPLED):
        for prefix in [each for each in masses if each[-1:] != (tiny.EOS_ID,)]:
            mass = masses.pop(prefix)
            logits = model(mx.array([SAMPLED_PROMPT]), mx.array([[0, *prefix]]))[0, -1]
            probs = np.array(Sampler(1.0).probs(logits), np.float64)
            for token, p in enumerate(probs / probs.sum()):
                masses[*prefix, token] = mass * float(p)
    return masses


def chi_square(seen: Mapping[Any, int], expected: Mapping[Any, float]) -> tuple[float, int]:
    """Return Pearson's statistic and its degrees of freedom.

    Outputs that are expected less often than LEAST_EXPECTED times make one cell, which joins the
    smallest of the others if it is too small itself.
    """
    total = sum(seen.values())
    outputs = expected.keys() | seen.keys()
    cells = sorted((total * expected.get(each, 0.0), seen.get(each, 0)) for each in outputs)
    rare = [cell for cell in cells if cell[0] < LEAST_EXPECTED]
    del cells[: len(rare)]
    if cells and sum(mass for mass, _ in rare) < LEAST_EXPECTED:
        rare.append(cells.pop(0))
    cells.append((sum(mass for mass, _ in rare), sum(count for _, count in rare)))
    return sum((count - mass) ** 2 / mass for mass, count in cells), len(cells) - 1


def p_value(statistic: float, freedom: int) -> float:
    """Return the chance of a chi-square of at least that much (Wilson and Hilferty, 1931)."""
    spread = 2 / (9 * freedom)
    z = ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
    return math.erfc(z / math.sqrt(2)) / 2


def threads(subject: Subject) -> Finding:
    """Decode in several threads that share a decoder, and compare with a single thread."""
    decoder = subject.decoder()
    sentences = SENTENCES_OF_LEARNERS[:NUM_THREADED]

    def decoded(sentence: str) -> list[int]:
        return decoder.generate(sentence, max_tokens=MAX_TOKENS).tokens

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        found = [*pool.map(decoded, sentences)]
    wrong = sum(ours != decoded(each) for ours, each in zip(found, sentences, strict=True))
    details = {"threads": NUM_THREADS, "outputs": len(sentences), "different": wrong}
    fault = f"{wrong} of {len(sentences)} outputs of {NUM_THREADS} threads differ from serial ones"
    reason = f"{NUM_THREADS} threads sharing a decoder give the {len(sentences)} outputs of one"
    return Finding.of("threads", fault if wrong else None, reason, details)
