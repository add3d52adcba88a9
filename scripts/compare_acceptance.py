"""Compare how much of a draft is accepted by mlx-lm's speculative decoding and by this one.

    python scripts/train_causal.py
    python scripts/compare_acceptance.py causal-pair/target causal-pair/draft

Temperature 1, the same pair, prompts and lengths in one run. mlx-lm draws the target's own token at
each place and accepts a drafted one that equals it: of p and q, as probable as the sum of p q. The
rule here accepts with the sum of min(p, q), which is never less; block verification with more yet.
All three are exact, which is tested on many short outputs for one prompt: the second token has to
be distributed as the target has it, summed over all first tokens. A variant that accepts every
draft shows what the test says of one that is not. Needs `pip install ".[causal]"`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated

from speculative_t5 import Generation, SpeculativeDecoder, load
from speculative_t5.generation import VerifyRule
from speculative_t5.models.causal import CausalModel

import mlx.core as mx
import numpy as np
import typer
from train_causal import HELD_OUT_FILE, read_documents

LEAST_EXPECTED = 5.0  # outputs in a cell of the test; rarer tokens share one
BATCH = 64
Encode = Callable[[str], list[int]]
RULES: tuple[VerifyRule, ...] = ("token", "block")


@dataclass(frozen=True)
class Counts:
    """What became of drafts.

    Attributes:
        rounds: Passes of the target.
        drafted: Tokens proposed.
        accepted: Proposed tokens that were emitted.
        rejected: Rounds whose next drafted token was turned down. After it, and where an output
            ends within a draft, the rest of the draft is not judged.
        emitted: Tokens, EOS included.
        opened: Outputs whose first round accepted a token at least.
        outputs: How many there are.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    rejected: int = 0
    emitted: int = 0
    opened: int = 0
    outputs: int = 0

    def __add__(self, other: Counts) -> Counts:
        mine, others = vars(self), vars(other)
        return Counts(**{name: mine[name] + others[name] for name in mine})

    @property
    def acceptance(self) -> float:
        """Accepted / drafted."""
        return self.accepted / max(self.drafted, 1)

    @property
    def judged(self) -> float:
        """Accepted / (accepted + rejected)."""
        return self.accepted / max(self.accepted + self.rejected, 1)

    @property
    def tokens_per_round(self) -> float:
        return self.emitted / max(self.rounds, 1)


def count_flags(flags: Sequence[bool], num_draft: int, max_tokens: int) -> Counts:
    """Rounds of mlx-lm, told from which of the emitted tokens came from the draft.

    A token of the target's own ends a round. Only the last round may lack it: it was cut by
    `max_tokens` or by EOS.

    Example:
        With num_draft 2 and max_tokens 6, `[True, True, False, True, False, True]` are a round that
        accepts both, one that accepts the first of two, and one that was asked for a single token.
    """
    counts, start = Counts(outputs=1), 0
    while start < len(flags):
        drafted = min(num_draft, max_tokens - start)
        end = flags.index(False, start) if False in flags[start:] else len(flags)
        accepted, cut = end - start, end == len(flags)
        counts += Counts(
            rounds=1,
            drafted=drafted,
            accepted=accepted,
            rejected=int(not cut and accepted < drafted),
            emitted=accepted + (not cut),
            opened=int(start == 0 and accepted > 0),
        )
        start = end + 1
    return counts


def count_stats(output: Generation) -> Counts:
    """The same of an output of ours."""
    stats = output.stats
    cut = stats.accepted + stats.rounds - stats.emitted  # 1 if the last round has no own token
    rejections = sum(a < d for a, d in zip(stats.num_accepted, stats.num_drafted, strict=True))
    last_is_short = stats.num_accepted[-1] < stats.num_drafted[-1]
    return Counts(
        rounds=stats.rounds,
        drafted=stats.drafted,
        accepted=stats.accepted,
        rejected=rejections - int(bool(cut) and last_is_short),
        emitted=stats.emitted,
        opened=int(stats.num_accepted[0] > 0),
        outputs=1,
    )


def theirs(
    target: CausalModel,
    draft: CausalModel,
    prompt: Sequence[int],
    num_draft: int,
    max_tokens: int,
    temperature: float = 1.0,
) -> Iterator[tuple[int, bool]]:
    """Tokens that mlx-lm emits, and whether each came from the draft; any end is told as EOS.

    It draws from MLX's global state.
    """
    from mlx_lm.generate import speculative_generate_step
    from mlx_lm.sample_utils import make_sampler

    steps = speculative_generate_step(
        mx.array(prompt), target.model, draft.model, num_draft_tokens=num_draft,
        max_tokens=max_tokens, sampler=make_sampler(temp=temperature),
    )  # fmt: skip
    for token, _, from_draft in steps:
        ended = int(token) in target.eos_token_ids
        yield target.eos_token_id if ended else int(token), bool(from_draft)
        if ended:
            return


def probabilities(model: CausalModel, rows: Sequence[Sequence[int]]) -> np.ndarray:
    """Of what follows each of some rows of the same length: (B, V) float64."""
    found = []
    for first in range(0, len(rows), BATCH):
        logits = np.array(model(mx.array(rows[first : first + BATCH]))[:, -1], dtype=np.float64)
        weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
        found.append(weights / weights.sum(axis=-1, keepdims=True))
    return np.concatenate(found)


def predicted(
    target: CausalModel, draft: CausalModel, prompts: Sequence[Sequence[int]]
) -> tuple[float, float]:
    """Mean over prompts of the sums of p q and of min(p, q): what accepts a first drafted token."""
    p, q = (probabilities(model, prompts) for model in (target, draft))
    size = min(p.shape[1], q.shape[1])
    p, q = p[:, :size], q[:, :size]
    return float((p * q).sum(axis=1).mean()), float(np.minimum(p, q).sum(axis=1).mean())


def second_token_law(target: CausalModel, prompt: Sequence[int]) -> np.ndarray:
    """Probabilities of the second token after a prompt, and last that there is none: (V + 1,).

    All ids that end an output count as EOS.
    """
    ends = sorted(target.eos_token_ids)
    first = probabilities(target, [prompt])[0]
    second = probabilities(target, [[*prompt, token] for token in range(len(first))])
    ended, first[ends] = first[ends].sum(), 0
    law = first @ second
    again, law[ends] = law[ends].sum(), 0
    law[target.eos_token_id] = again
    return np.append(law, ended)


def second_token_counts(outputs: Sequence[Sequence[int]], vocab_size: int, eos: int) -> np.ndarray:
    """How often each token, EOS included, is the second of outputs; last, how often none is."""
    seconds = [vocab_size if output[0] == eos else output[1] for output in outputs]
    return np.bincount(seconds, minlength=vocab_size + 1)


@dataclass(frozen=True)
class Fit:
    """Pearson's test of counts against a law."""

    statistic: float
    freedom: int
    p_value: float


def fit(counts: np.ndarray, law: np.ndarray) -> Fit:
    """Whether counts (N,) are drawn from probabilities (N,).

    Cells that expect less than `LEAST_EXPECTED` are pooled, with the next larger ones if that is
    not enough.
    """
    order = np.argsort(law)
    expected = law[order] * counts.sum()
    rare = int(np.searchsorted(expected, LEAST_EXPECTED))
    while 0 < rare < len(expected) and expected[:rare].sum() < LEAST_EXPECTED:
        rare += 1
    starts = np.array([0, *range(max(rare, 1), len(expected))])
    expected = np.add.reduceat(expected, starts)
    seen = np.add.reduceat(counts[order], starts)
    statistic = float(((seen - expected) ** 2 / expected).sum())
    return Fit(statistic, len(starts) - 1, chi_square_tail(statistic, len(starts) - 1))


def chi_square_tail(statistic: float, freedom: int) -> float:
    """Probability that chi-square with so many degrees of freedom is larger.

    Q(a + 1, y) = Q(a, y) + y^a e^-y / Gamma(a + 1), from a = 1 or 1/2 on.
    """
    if freedom < 1:
        return 1.0
    y, a = statistic / 2, (2 - freedom % 2) / 2
    tail = math.exp(-y) if a == 1 else math.erfc(math.sqrt(y))
    while a < freedom / 2:
        tail += math.exp(a * math.log(y) - y - math.lgamma(a + 1)) if y else 0.0
        a += 1
    return min(tail, 1.0)


def load_pair(target: Path, draft: Path) -> tuple[CausalModel, CausalModel, Encode]:
    """Both models in float32, and what makes ids of text.

    Raises:
        ValueError: If one is not there, or is no whole model.
    """
    for folder in (target, draft):
        if not (folder / "config.json").exists():
            raise ValueError(
                f"no model in {folder}: run python scripts/train_causal.py, which makes a pair"
            )
    (large, tokenizer), (small, _) = (load(folder, dtype=mx.float32) for folder in (target, draft))
    return large, small, tokenizer.encode


def take_windows(ids: Sequence[int], count: int, length: int) -> list[list[int]]:
    """So many windows of a text, side by side or further apart.

    Raises:
        ValueError: If there are not as many.
    """
    if len(ids) < count * length:
        raise ValueError(
            f"{count} prompts of {length} tokens are more than the text's {len(ids)}: "
            "ask for less, or give a longer --text"
        )
    step = len(ids) // count
    return [list(ids[start : start + length]) for start in range(0, count * step, step)]


def compare_acceptance(
    target: CausalModel,
    draft: CausalModel,
    prompts: Sequence[Sequence[int]],
    *,
    num_draft: int,
    max_tokens: int,
    seed: int,
) -> dict[str, Counts]:
    """Decode all prompts in every variant."""
    mx.random.seed(seed)
    found = {"mlx-lm": Counts()}
    for prompt in prompts:
        tokens = theirs(target, draft, prompt, num_draft, max_tokens)
        found["mlx-lm"] += count_flags([flag for _, flag in tokens], num_draft, max_tokens)
    for rule in RULES:
        decoder = SpeculativeDecoder(target, draft, num_draft=num_draft, verify=rule)
        outputs = decoder.generate_batch(
            prompts, batch_size=BATCH, max_tokens=max_tokens, temperature=1.0, seed=seed
        )
        found[f"ours, {rule}"] = sum(map(count_stats, outputs), Counts())
    return found


def compare_exactness(
    target: CausalModel,
    draft: CausalModel,
    prompt: Sequence[int],
    *,
    num_draft: int,
    runs: int,
    seed: int,
) -> dict[str, tuple[Fit, float]]:
    """Test the second token of many outputs for one prompt in every variant.

    The outputs may be `num_draft` + 1 tokens long, so that first rounds are drafted for in full.

    Returns:
        By variant the test, and the share of outputs that began with a drafted token.
    """
    law, eos, length = second_token_law(target, prompt), target.eos_token_id, num_draft + 1

    def told(outputs: Sequence[Sequence[int]], opened: int) -> tuple[Fit, float]:
        return fit(second_token_counts(outputs, len(law) - 1, eos), law), opened / runs

    mx.random.seed(seed)
    begun = [list(islice(theirs(target, draft, prompt, num_draft, length), 2)) for _ in range(runs)]
    opened = sum(output[0][1] for output in begun)
    found = {"mlx-lm": told([[token for token, _ in output] for output in begun], opened)}
    variants = {f"ours, {rule}": {"verify": rule} for rule in RULES}
    for name, options in (variants | {"delta 1, not exact": {"delta": 1.0}}).items():
        decoder = SpeculativeDecoder(target, draft, num_draft=num_draft, **options)
        outputs = decoder.generate_batch(
            [prompt] * runs, batch_size=BATCH, max_tokens=length, temperature=1.0, seed=seed
        )
        opened = sum(output.stats.num_accepted[0] > 0 for output in outputs)
        found[name] = told([[*output.tokens, eos] for output in outputs], opened)
    return found


def main(
    target: Annotated[Path, typer.Argument(help="Folder.")] = Path("causal-pair/target"),
    draft: Annotated[Path, typer.Argument(help="Folder.")] = Path("causal-pair/draft"),
    text: Annotated[
        Path | None, typer.Option(help="Where prompts come from; else held-out.txt of the pair.")
    ] = None,
    num_draft: Annotated[int, typer.Option(min=1, help="Tokens to draft for each pass.")] = 4,
    count: Annotated[int, typer.Option(min=1, help="Number of prompts.")] = 64,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each.")] = 32,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an output.")] = 64,
    runs: Annotated[int, typer.Option(min=1, help="Outputs to test exactness by.")] = 3000,
    seed: Annotated[int, typer.Option(min=0, help="Of all draws.")] = 0,
) -> None:
    try:
        large, small, encode = load_pair(target, draft)
        (held_out,) = read_documents([text or target.parent / HELD_OUT_FILE])
        prompts = take_windows(encode(held_out), count, prompt_tokens)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    print(
        f"{count} prompts of {prompt_tokens} tokens, outputs of up to {max_tokens}, "
        f"num_draft {num_draft}, temperature 1\n"
    )
    found = compare_acceptance(
        large, small, prompts, num_draft=num_draft, max_tokens=max_tokens, seed=seed
    )
    print(f"{'':20} accepted of drafted   of judged   tokens per pass   first place")
    for name, counts in found.items():
        print(
            f"{name:20} {counts.acceptance:19.3f} {counts.judged:11.3f} "
            f"{counts.tokens_per_round:17.3f} {counts.opened / counts.outputs:13.3f}",
            flush=True,
        )
    product, overlap = predicted(large, small, prompts)
    print(
        f"\nAt the first place p and q predict {product:.3f} for equal draws (sum of p q) and "
        f"{overlap:.3f} for the token-wise rule (sum of min(p, q)).\n"
    )
    print(
        f"The second token of {runs} outputs for one prompt, against its exact law:\n"
        f"{'':20} chi-square   degrees of freedom   p-value   first place",
        flush=True,
    )
    tested = compare_exactness(large, small, prompts[0], num_draft=num_draft, runs=runs, seed=seed)
    for name, (test, opened) in tested.items():
        print(
            f"{name:20} {test.statistic:10.1f} {test.freedom:20} {test.p_value:9.2g} {opened:13.3f}"
        )
    product, overlap = predicted(large, small, prompts[:1])
    print(f"\nFor this prompt p and q predict {product:.3f} and {overlap:.3f} at the first place.")


if __name__ == "__main__":
    app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(help=__doc__)(main)
    app()
