"""Checks of whole outputs: `greedy` with a draft and without, `threads`, and `known` ones."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

import mlx.core as mx

from ..checkpoints import dtype_name
from ..generation import SpeculativeDecoder
from ..tokenizers import Prompt
from . import tiny
from .findings import NUM_DRAFT, Finding, Subject, dtype_of, promises_equal_rows
from .sentences import KNOWN, SENTENCES

MAX_TOKENS = 12
TIES_TOKENS = 40  # more than the smallest capacity of a cache
NUM_SENTENCES, NUM_TIES = 100, 20
SECONDS = 30.0  # after which no further prompt is begun
THREADS, SENTENCES_OF_EACH = 4, 6


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
        prompts = _random_prompts(model)
        found.append(compare(f"near-ties, {dtype_name(dtype)}", tied, prompts, TIES_TOKENS))
    head = f"{'outputs that depend on the draft'.ljust(34)}{'plain mode':>12}{'steady mode':>13}"
    notes = (head, *(each.row() for each in found))
    details = {"compared": [asdict(each) for each in found]}
    if faults := [each.fault for each in found if each.fault]:
        return Finding("greedy", "failed", "; ".join(faults), notes, details)
    first = found[0]
    modes = "plain and steady mode" if first.exact else "steady mode"
    reason = f"outputs are the same with a draft and without in {modes}"
    if not first.exact:
        reason += f"; in plain mode {first.count - len(first.plain)} of {first.count} are"
    return Finding("greedy", "ok", reason, notes, details)


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
    plain_differs: list[int] = []
    steady_differs: list[int] = []
    count = 0
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


def _random_prompts(model: tiny.T5) -> list[list[int]]:
    rng = random.Random(0)
    ids = range(2, model.vocab_size)
    return [[*rng.choices(ids, k=8), model.eos_token_id] for _ in range(NUM_TIES)]


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
    if wrong:
        reason = f"{wrong} of {len(sentences)} outputs of {THREADS} threads differ from serial ones"
        return Finding("threads", "failed", reason, details=details)
    reason = f"{THREADS} threads sharing a decoder give the {len(sentences)} outputs of one"
    return Finding("threads", "ok", reason, details=details)


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
    details = {"sentences": len(KNOWN), "wrong": wrong}
    if wrong:
        first = wrong[0]
        reason = f"expected {first['expected']!r}, found {first['found']!r}"
        return Finding("known", "failed", reason, details=details)
    reason = f"{len(KNOWN)} corrected sentences are those that are known, with a draft and without"
    return Finding("known", "ok", reason, details=details)
