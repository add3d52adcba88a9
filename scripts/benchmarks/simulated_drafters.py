"""Compare ways to draft on devices that are not at hand: counted outcomes, and assumed costs.

    python scripts/benchmarks/simulated_drafters.py --data deu.txt.xz --draft correct-small

What is accepted is counted on the pair's own greedy outputs for held-out prompts, for drafts of a
token or a block in a pass, lookups, and both in turn. Costs are in passes of the target over one
token, see `simulated_devices`: one for the target's pass, one for each pass of the draft. Where a
draft's pass costs 0.4, a round with four of them costs 1 + 4 * 0.4 = 2.6; if it gives 4.16 tokens,
it is 1.60 times as fast as plain decoding. The speed is that of the best fixed length.
Needs the data that weights/README.md names.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from speculative_t5 import load
from speculative_t5.decoding import LENGTHS, SHARES
from speculative_t5.decoding.lookup import Lookup
from speculative_t5.distill import Label
from speculative_t5.distill.training import agreement
from speculative_t5.models import SharingDraft

import mlx.core as mx
import typer
from simulated_devices import Curve, launches, mac_in_steps, mac_of_two_kernels
from texts import DataOption, engine, held_out_examples

MAX_TOKENS = 200
SHOWN = 4, 8, 16  # lengths in the first table


def flat(length: int) -> float:
    """A GPU whose passes over up to 64 tokens cost the same."""
    return 1.0 if length <= 64 else 2.0


# Of a target's pass, and of a draft's.
DEVICES: dict[str, tuple[Curve, float]] = {
    "M1, M2": (mac_of_two_kernels, 0.15),
    "M3 and later": (mac_in_steps, 0.12),
    "launch-bound draft": (launches, 0.4),
    "flat up to 64 tokens": (flat, 0.15),
    "flat, launch-bound draft": (flat, 0.4),
}


@dataclass(frozen=True)
class Counts:
    """What became of the outputs, by one way to draft."""

    tokens: int
    # Of each round: tokens of the target's pass, passes of the draft.
    rounds: list[tuple[int, int]]

    def per_round(self, values: Callable[[tuple[int, int]], float]) -> float:
        return sum(map(values, self.rounds)) / len(self.rounds)

    def speed(self, verify: Curve, step: float) -> float:
        cost = self.per_round(lambda r: verify(r[0]) + step * r[1])
        return self.tokens / len(self.rounds) / cost


@dataclass(frozen=True)
class Trace:
    """An output, and where a draft is right, as in `Agreement.rows`."""

    source: Sequence[int]
    tokens: Sequence[int]
    right: Sequence[Sequence[bool]]

    def rounds(self, num_draft: int, share: float) -> Iterator[tuple[int, int]]:
        """Yield the rounds in which the model drafts a share of the tokens, and a lookup others."""
        block, pos, lookup = len(self.right), 0, Lookup(self.source, 1, 8)
        by_model = math.ceil(share * num_draft)
        while pos < len(self.tokens):
            asked = min(num_draft, MAX_TOKENS - pos - 1)
            of_model, left = min(by_model, asked), len(self.tokens) - pos
            run = 0
            while run < min(of_model, left):
                place = run % block
                if not self.right[place][pos + run - place]:
                    break
                run += 1
            drafted = of_model
            if asked > of_model and run == of_model < left:
                before = [0, *self.tokens[:pos]]
                follow = self.tokens[pos : pos + run]
                found = lookup.propose(before, asked - of_model, follow)
                drafted += len(found)
                for token, true in zip(found, self.tokens[pos + run :], strict=False):
                    if token != true:
                        break
                    run += 1
            yield 1 + drafted, -(-of_model // block)
            pos += run + 1


def traces_of(name: str, target: Any, labels: Sequence[Label]) -> list[Trace]:
    """Return the traces of a draft, by name or folder."""
    draft: Any = load(name, target=target)[0]
    found = []
    for each in labels:
        if isinstance(draft, SharingDraft):
            (right,) = agreement(draft, [each], batch_tokens=1).rows
        else:
            logits = draft(mx.array([each.prompt]), mx.array([[0, *each.tokens[:-1]]]))
            best = mx.argmax(logits[0], axis=-1).tolist()
            right = [[a == b for a, b in zip(best, each.tokens, strict=True)]]
        found.append(Trace(each.prompt, each.tokens, right))
    return found


def count(traces: Sequence[Trace], num_draft: int, share: float) -> Counts:
    rounds = [each for trace in traces for each in trace.rounds(num_draft, share)]
    return Counts(sum(len(trace.tokens) for trace in traces), rounds)


def main(
    data: DataOption,
    draft: Annotated[list[str], typer.Option(help="A draft for correct-base; repeatable.")],
    prompts: Annotated[int, typer.Option(help="Number of prompts.")] = 300,
) -> None:
    """Print tokens per pass, and speeds on the devices."""
    sources = [source for source, _ in held_out_examples(data, prompts, single=False)]
    decoder = engine(None)
    outputs = decoder.generate_batch(sources, max_tokens=MAX_TOKENS)
    labels = [
        Label(i, decoder.encode(source), [*output.tokens, 1][:MAX_TOKENS])
        for i, (source, output) in enumerate(zip(sources, outputs, strict=True))
    ]
    traces = {name: traces_of(name, decoder.model, labels) for name in draft}
    ways = [(name, share) for name in draft for share in SHARES]
    print("Tokens per pass of the target, and passes of the draft for each, by length")
    print("| draft | its share | " + " | ".join(map(str, SHOWN)) + " |")
    print("|---|---|" + "---|" * len(SHOWN))
    for name, share in ways:
        cells = []
        for num_draft in SHOWN:
            found = count(traces[name], num_draft, share)
            per_pass = found.tokens / len(found.rounds)
            cells.append(f"{per_pass:.2f} ({found.per_round(lambda r: r[1]):.1f})")
        print(f"| {name} | {share:g} | {' | '.join(cells)} |", flush=True)
    print("Speed over plain decoding at the best length, which is in brackets")
    print("| draft | its share | " + " | ".join(DEVICES) + " |")
    print("|---|---|" + "---|" * len(DEVICES))
    for name, share in ways:
        counted = {n: count(traces[name], n, share) for n in LENGTHS if n}
        cells = []
        for verify, step in DEVICES.values():
            speeds = {n: found.speed(verify, step) for n, found in counted.items()}
            best = max(speeds, key=lambda n: speeds[n])
            cells.append(f"{speeds[best]:.2f} ({best})")
        print(f"| {name} | {share:g} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    typer.run(main)
