"""A round waits for the device once, and every wait goes through `read`."""

from __future__ import annotations

import threading
from itertools import pairwise
from typing import Any

from speculative_t5 import SpeculativeDecoder
from speculative_t5.decoding import decode, read, syncs
from speculative_t5.generation import GenerationOptions

import mlx.core as mx
import pytest
from conftest import PAIRS, tiny_pair

READERS = ("tolist", "item", "__bool__", "__int__", "__array__")
WAITS = {"none": 1, "model": 1, "lookup": 1, "both": 2}  # the lookup reads the model's draft


@pytest.fixture
def device_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the calls by which Python has waited for values on the device."""
    seen: list[str] = []

    def watch(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def watched(*arguments: Any, **options: Any) -> Any:
            seen.append(name)
            return original(*arguments, **options)

        monkeypatch.setattr(owner, name, watched)

    for name in READERS:
        watch(mx.array, name)
    watch(mx, "eval")
    return seen


@pytest.mark.parametrize(("kind", "temperature"), [("t5", 0.0), *((kind, 1.0) for kind in PAIRS)])
@pytest.mark.parametrize("drafter", WAITS)
def test_a_round_waits_once(
    kind: str, drafter: str, temperature: float, device_reads: list[str]
) -> None:
    target, small = tiny_pair(kind, vocab_size=20, layers=2, seed=3)
    draft = small if drafter in ("model", "both") else None
    decoder = SpeculativeDecoder(target, draft, num_draft=3, lookup=drafter in ("lookup", "both"))
    each = set()
    for index in range(3):
        options = GenerationOptions(max_tokens=20, temperature=temperature)
        requests = decoder.requests([(index, [5, 9, 7, 5, 1])], options)
        rounds = decode(target, requests, decoder.plan(), batch_size=1)
        totals = [(syncs(), len(device_reads)) for _ in rounds]
        # The first round also encodes the draft's source; the last may have no room for a draft.
        each |= {(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(totals[:-1])}
    assert each == {(WAITS[drafter], WAITS[drafter])}


def test_other_reads_are_seen(device_reads: list[str]) -> None:
    before = syncs()
    mx.array([[1]]).item()
    assert (syncs() - before, device_reads) == (0, ["item"])


def test_syncs_are_counted_by_thread() -> None:
    before, ids = syncs(), mx.array([[3, 4]])
    other = threading.Thread(target=read, args=(mx.array([[1]]),))
    other.start()
    other.join()
    assert read(ids) == [[3, 4]] and syncs() - before == 1
