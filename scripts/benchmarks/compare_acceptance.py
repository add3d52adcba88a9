"""Compare how much of a draft mlx-lm's speculative decoding and this package's accept.

    python weights/training/train_causal.py
    python scripts/benchmarks/compare_acceptance.py causal-pair/target causal-pair/draft

Temperature 1; the same pair, prompts and lengths in one run. mlx-lm samples the target's own token
at each place and accepts a drafted token that equals it, with probability sum of p q for target p
and draft q. The rule here accepts with probability sum of min(p, q), which is never less; block
verification accepts more still. All three are exact. This is tested on many short outputs for one
prompt: the second token must have the target's distribution, summed over all first tokens. A
variant that accepts every draft shows how the test rejects one that is not exact. Needs
`pip install mlx-lm`.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated

from speculative_t5 import SpeculativeDecoder, load
from speculative_t5.causal import DecoderOnlyModel
from speculative_t5.doctor.outputs import chi_square, p_value
from speculative_t5.generation import VerifyRule

import mlx.core as mx
import numpy as np
import typer
from acceptance_counts import Counts, count_flags, count_stats
from texts import HELD_OUT_FILE

PAIR = Path("causal-pair")
BATCH = 64
Encode = Callable[[str], list[int]]
RULES: tuple[VerifyRule, ...] = ("token", "block")


@dataclass(frozen=True)
class Fit:
    """Pearson's chi-square test of counts against a distribution."""

    statistic: float
    freedom: int
    p_value: float


def theirs(
    target: DecoderOnlyModel,
    draft: DecoderOnlyModel,
    prompt: Sequence[int],
    num_draft: int,
    max_tokens: int,
) -> Iterator[tuple[int, bool]]:
    """Yield mlx-lm's tokens, and whether each came from the draft; any end is reported as EOS.

    It samples with MLX's global random state.
    """
    from mlx_lm.generate import speculative_generate_step
    from mlx_lm.sample_utils import make_sampler

    steps = speculative_generate_step(
        mx.array(prompt),
        target.model,
        draft.model,
        num_draft_tokens=num_draft,
        max_tokens=max_tokens,
        sampler=make_sampler(temp=1.0),
    )
    for token, _, from_draft in steps:
        ended = int(token) in target.info.eos_token_ids
        yield target.info.eos_token_id if ended else int(token), bool(from_draft)
        if ended:
            return


def probabilities(model: DecoderOnlyModel, rows: Sequence[Sequence[int]]) -> np.ndarray:
    """Return the next token's probabilities after rows of one length: (B, V) float64."""
    found = []
    for first in range(0, len(rows), BATCH):
        logits = np.array(model(mx.array(rows[first : first + BATCH]))[:, -1], dtype=np.float64)
        weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
        found.append(weights / weights.sum(axis=-1, keepdims=True))
    return np.concatenate(found)


def predicted(
    target: DecoderOnlyModel, draft: DecoderOnlyModel, prompts: Sequence[Sequence[int]]
) -> tuple[float, float]:
    """Predict how often a first drafted token is accepted: by mlx-lm, and by the token-wise rule.

    These are the means over prompts of the sums of p q and of min(p, q).
    """
    p, q = (probabilities(model, prompts) for model in (target, draft))
    size = min(p.shape[1], q.shape[1])
    p, q = p[:, :size], q[:, :size]
    return float((p * q).sum(axis=1).mean()), float(np.minimum(p, q).sum(axis=1).mean())


def second_token_distribution(target: DecoderOnlyModel, prompt: Sequence[int]) -> np.ndarray:
    """Return the probabilities of the second token, and last of there being none: (V + 1,).

    All ids that end an output count as EOS.
    """
    ends = sorted(target.info.eos_token_ids)
    first = probabilities(target, [prompt])[0]
    second = probabilities(target, [[*prompt, token] for token in range(len(first))])
    ended, first[ends] = first[ends].sum(), 0
    distribution = first @ second
    eos, distribution[ends] = distribution[ends].sum(), 0
    distribution[target.info.eos_token_id] = eos
    return np.append(distribution, ended)


def second_token_counts(outputs: Sequence[Sequence[int]], vocab_size: int, eos: int) -> np.ndarray:
    """Count outputs by their second token, last those that have none: (V + 1,)."""
    seconds = [vocab_size if output[0] == eos else output[1] for output in outputs]
    return np.bincount(seconds, minlength=vocab_size + 1)


def load_pair(target: Path, draft: Path) -> tuple[DecoderOnlyModel, DecoderOnlyModel, Encode]:
    """Load both models in float32, and the function that encodes text."""
    for folder in (target, draft):
        if not (folder / "config.json").exists():
            raise ValueError(
                f"no model in {folder}: run python weights/training/train_causal.py, "
                "which makes a pair"
            )
    (large, tokenizer), (small, _) = (
        load(str(folder), dtype=mx.float32) for folder in (target, draft)
    )
    return large, small, tokenizer.encode


def take_windows(ids: Sequence[int], count: int, length: int) -> list[list[int]]:
    """Take `count` windows of a text, side by side or further apart."""
    if len(ids) < count * length:
        raise ValueError(
            f"{count} prompts of {length} tokens are more than the text's {len(ids)}: "
            "ask for less, or train the pair on a longer text"
        )
    step = len(ids) // count
    return [list(ids[start : start + length]) for start in range(0, count * step, step)]


def compare_acceptance(
    target: DecoderOnlyModel,
    draft: DecoderOnlyModel,
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
    target: DecoderOnlyModel,
    draft: DecoderOnlyModel,
    prompt: Sequence[int],
    *,
    num_draft: int,
    runs: int,
    seed: int,
) -> dict[str, tuple[Fit, float]]:
    """Test the second token of many outputs for one prompt in every variant.

    The outputs may be `num_draft` + 1 tokens long, so that first rounds draft `num_draft` tokens.
    Returned are the test, and the share of outputs that began with a drafted token.
    """
    distribution = second_token_distribution(target, prompt)
    eos, length = target.info.eos_token_id, num_draft + 1

    def result(outputs: Sequence[Sequence[int]], opened: int) -> tuple[Fit, float]:
        counts = second_token_counts(outputs, len(distribution) - 1, eos)
        seen, expected = (dict(enumerate(each.tolist())) for each in (counts, distribution))
        statistic, freedom = chi_square(seen, expected)
        chance = p_value(statistic, freedom) if freedom else 1.0
        return Fit(statistic, freedom, chance), opened / runs

    mx.random.seed(seed)
    begun = [list(islice(theirs(target, draft, prompt, num_draft, length), 2)) for _ in range(runs)]
    opened = sum(output[0][1] for output in begun)
    found = {"mlx-lm": result([[token for token, _ in output] for output in begun], opened)}
    variants = {f"ours, {rule}": {"verify": rule} for rule in RULES}
    for name, options in (variants | {"delta 1, not exact": {"delta": 1.0}}).items():
        decoder = SpeculativeDecoder(target, draft, num_draft=num_draft, **options)
        outputs = decoder.generate_batch(
            [prompt] * runs, batch_size=BATCH, max_tokens=length, temperature=1.0, seed=seed
        )
        opened = sum(output.stats.num_accepted[0] > 0 for output in outputs)
        found[name] = result([[*output.tokens, eos] for output in outputs], opened)
    return found


def main(
    target: Annotated[Path, typer.Argument(help="The target's folder.")] = PAIR / "target",
    draft: Annotated[Path, typer.Argument(help="The draft's folder.")] = PAIR / "draft",
    num_draft: Annotated[int, typer.Option(min=1, help="Tokens to draft for each pass.")] = 4,
    count: Annotated[int, typer.Option(min=1, help="Number of prompts.")] = 64,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 32,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an output.")] = 64,
    runs: Annotated[int, typer.Option(min=1, help="Outputs to test exactness by.")] = 3000,
    seed: Annotated[int, typer.Option(min=0, help="Seed of all sampling.")] = 0,
) -> None:
    try:
        large, small, encode = load_pair(target, draft)
        held_out = (target.parent / HELD_OUT_FILE).read_text(encoding="utf-8")
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
            f"{counts.tokens_per_round:17.3f} {counts.opened / counts.outputs:13.3f}"
        )
    print_predicted(large, small, prompts)
    print(f"The second token of {runs} outputs for one prompt, against its exact distribution:")
    tested = compare_exactness(large, small, prompts[0], num_draft=num_draft, runs=runs, seed=seed)
    print(f"{'':20} chi-square   degrees of freedom   p-value   first place")
    for name, (test, opened) in tested.items():
        print(
            f"{name:20} {test.statistic:10.1f} {test.freedom:20} {test.p_value:9.2g} {opened:13.3f}"
        )
    print_predicted(large, small, prompts[:1])


def print_predicted(
    target: DecoderOnlyModel, draft: DecoderOnlyModel, prompts: Sequence[Sequence[int]]
) -> None:
    product, overlap = predicted(target, draft, prompts)
    print(
        f"\nAt the first place p and q predict {product:.3f} for equal samples (sum of p q) and "
        f"{overlap:.3f} for the token-wise rule (sum of min(p, q)).\n",
        flush=True,
    )


if __name__ == "__main__":
    app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(help=__doc__)(main)
    app()
