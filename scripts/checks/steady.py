"""Count the greedy outputs that depend on the draft, with steady decoding and without it.

    python scripts/checks/steady.py random
    python scripts/checks/steady.py pair --dtype bfloat16

`random` decodes with a random T5 that has near-ties, on MLX's kernels and on products that change
with the number of rows, as on GPUs; `pair` with the shipped pair and damaged sentences. Each way to
draft is compared with no draft. Ends with status 1 if a steady output depends on the draft.
"""

import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

from speculative_t5 import SpeculativeDecoder, load
from speculative_t5.checkpoints import DTYPES
from speculative_t5.cli.terminal import columns
from speculative_t5.kernels import accelerate, native_parts
from speculative_t5.models import T5, T5Config

import mlx.core as mx
import typer
from kernels import Kernels, change
from mlx.utils import tree_map

sys.path.append(str(Path(__file__).parents[2] / "weights" / "training"))

from corruption import PREFIX, Corruptor

SENTENCES = Path(__file__).parents[2] / "tests" / "sentences.txt"
WAYS = {"model": (True, False), "lookup": (False, True), "both": (True, True)}
SIZE = 512  # ids of the random model
HEADER = ["kernels", "dtype", "K", "width", *(f"steady {way}" for way in WAYS)]
HEADER += [f"plain {way}" for way in WAYS]

DtypeOption = Annotated[list[str], typer.Option(help="Types to compute in; repeatable.")]
NumDraftOption = Annotated[list[int], typer.Option(help="Tokens to draft; repeatable.")]
CountOption = Annotated[int, typer.Option(min=1, help="Number of prompts.")]
MaxTokensOption = Annotated[int, typer.Option(min=1, help="Upper bound on an output's tokens.")]

app = typer.Typer(help=__doc__, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command("random")
def random_model(
    dtype: DtypeOption = list(DTYPES),  # noqa: B006
    num_draft: NumDraftOption = [1, 4, 8],  # noqa: B006
    count: CountOption = 200,
    max_tokens: MaxTokensOption = 36,
) -> None:
    """Compare on a random T5 with near-ties."""
    rng = random.Random(0)
    prompts = [[*rng.choices(range(2, SIZE), k=rng.randint(4, 24)), 1] for _ in range(count)]
    rows = []
    for name in dtype:
        for kernels in (None, Kernels):
            model, draft = random_pair(DTYPES[name], kernels)
            title = "as on GPUs" if kernels else "MLX's"
            found = compare(model, draft, None, prompts, num_draft, max_tokens)
            rows += [(title, name, *row) for row in found]
    report(rows, count)


@app.command()
def pair(
    dtype: DtypeOption = list(DTYPES),  # noqa: B006
    num_draft: NumDraftOption = [1, 4, 8],  # noqa: B006
    count: CountOption = 200,
    max_tokens: MaxTokensOption = 36,
) -> None:
    """Compare on the shipped pair and damaged sentences."""
    texts = SENTENCES.read_text(encoding="utf-8").splitlines()
    corruptor, rng = Corruptor(texts), random.Random(0)
    prompts = [PREFIX + corruptor.sentence(rng.choice(texts), rng) for _ in range(count)]
    rows = []
    for name in dtype:
        (model, tokenizer), (draft, _) = (
            load(each, dtype=name) for each in ("correct-base", "correct-small")
        )
        found = compare(model, draft, tokenizer, prompts, num_draft, max_tokens)
        rows += [("MLX's", name, *row) for row in found]
    report(rows, count)


def random_pair(dtype: mx.Dtype, kernels: type[Kernels] | None) -> tuple[T5, T5]:
    """Return a random model with near-ties, and a float32 draft that often agrees with it."""
    config = T5Config(64, 16, 128, 4, 2, 2, vocab_size=SIZE, own_head=True)
    mx.random.seed(4)
    model, draft = T5(config), T5(config)
    model.apply(lambda x: mx.random.normal(x.shape) * (x.shape[-1] ** -0.5 if x.ndim > 1 else 1))
    draft.update(tree_map(lambda x: x + 0.02 * mx.random.normal(x.shape), model.parameters()))
    change(model, dtype, kernels)
    for each in (model, draft):
        accelerate(each)
    return model, draft


def compare(
    model: T5,
    draft: T5,
    tokenizer: Any,
    prompts: Sequence[Any],
    lengths: Sequence[int],
    max_tokens: int,
) -> Iterator[tuple[int, int | None, list[int]]]:
    """Yield each K, the width of steady passes, and how many outputs differ in each way."""

    def outputs(with_model: bool, lookup: bool, **options: Any) -> tuple[list[Any], Any]:
        small = draft if with_model else None
        decoder = SpeculativeDecoder(model, small, tokenizer, lookup=lookup, **options)
        done = (decoder.generate(prompt, max_tokens=max_tokens) for prompt in prompts)
        width = decoder.engine.plan().width
        return [each.tokens for each in done], width

    plain, _ = outputs(False, False)
    for num_draft in lengths:
        differing = []
        steady, width = outputs(False, False, num_draft=num_draft, steady=True)
        for is_steady, alone in ((True, steady), (False, plain)):
            for way in WAYS.values():
                found, _ = outputs(*way, num_draft=num_draft, steady=is_steady)
                differing.append(sum(a != b for a, b in zip(alone, found, strict=True)))
        yield num_draft, width, differing


def report(rows: Sequence[tuple[Any, ...]], count: int) -> None:
    """Print a table of how many of `count` outputs differ; exit with 1 if a steady one does."""
    print(f"outputs of {count} that differ from those without a draft; MLX's parts here:", end=" ")
    print("; ".join(f"{part} {state}" for part, state in native_parts().items()) or "none of ours")
    cells = [(*map(str, row[:-1]), *map(str, row[-1])) for row in rows]
    print("\n".join(columns([tuple(HEADER), *cells], right=range(2, len(HEADER)))))
    if any(any(row[-1][: len(WAYS)]) for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    app()
