"""Compare the programs that a user could choose, on one checkpoint and the same prompts.

    python scripts/benchmarks/compare.py pair  --data deu.txt.xz
    python scripts/benchmarks/compare.py shape t5-base
    python scripts/benchmarks/compare.py batches --data deu.txt.xz
    python scripts/benchmarks/compare.py causal causal-gpt2 --batch-size 1

`pair` runs the shipped pair on held-out text (the data that weights/README.md names), `shape` runs
random weights of a published shape, both one prompt at a time; `batches` runs the pair on many
sentences, in batches of several sizes; `causal` runs a decoder-only pair. Decoding is greedy. Ours
runs on the device that MLX uses, the others on the same GPU if they can, else on the CPU; all in
one type, except for CTranslate2's int8. What cannot run so is left out, in one line that says why.

Each program has a process of its own, since a BLAS loaded for one changes another. Only one runs at
a time: they take turns prompt by prompt, in a random order for each turn. A first pass over all
prompts warms up and compares the outputs; it is not timed. CTranslate2 runs with the best of a few
settings, the others with their defaults. `--by-type` compares ours with weights of 16, 8 and 4
bits, those of drafts as well. `--num-beams 4` compares beam search instead, without drafts;
CTranslate2 ends it by other rules, and may give other outputs. The other programs need
`pip install ".[compare]"`.
"""

import contextlib
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from programs import ASSISTED, BY_TYPES, CAUSAL, COMBINED, IN_BATCHES, PLAIN, PROGRAMS, WITH_BEAMS
from programs.checkpoints import as_ctranslate2, as_hugging_face, write_draft
from programs.length_worker import load_way
from programs.measuring import compare
from programs.serving import answer_requests, serve, serve_batches
from programs.throughput import compare_batches
from programs.workers import BATCHES, ONE_BY_ONE, Lost, Worker, start

MIN_TOKENS, MAX_TOKENS = 20, 60  # of the outputs that `pair` keeps, EOS included
LIMIT = 256  # tokens of any output of `pair`
LEFT_OUT = (ASSISTED, COMBINED)  # by `shape`

DataOption = Annotated[Path, typer.Option(help="deu.txt.xz: English, a tab, German, a line each.")]
ModelOption = Annotated[str, typer.Option(help="The target's folder or name.")]
DraftOption = Annotated[str, typer.Option(help="The draft's folder or name.")]
TurnsOption = Annotated[int, typer.Option(min=1, help="How often everything is measured.")]
NumDraftOption = Annotated[int, typer.Option(min=1, help="Tokens to draft for each target pass.")]
OnlyOption = Annotated[
    list[str] | None, typer.Option(help="A program to measure beside ours plain; repeatable.")
]
NumBeamsOption = Annotated[
    int | None,
    typer.Option(min=2, help="Compare beam search with this many.", show_default="greedy decoding"),
]
DtypeOption = Annotated[
    str | None,
    typer.Option(
        help="Type of the checkpoint: float32, float16 or bfloat16.",
        show_default="float32 on a CPU, bfloat16 elsewhere",
    ),
]
ByTypeOption = Annotated[
    bool,
    typer.Option("--by-type", help="Compare types of weights: 16, 8 and 4 bits beside float32."),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object instead of the table.")
]

app = typer.Typer(help=__doc__, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def pair(
    data: DataOption,
    model: ModelOption = "correct-base",
    draft: DraftOption = "correct-small",
    count: Annotated[int, typer.Option(min=1, help="Number of prompts.")] = 24,
    turns: TurnsOption = 5,
    num_draft: NumDraftOption = 5,
    num_beams: NumBeamsOption = None,
    only: OnlyOption = None,
    dtype: DtypeOption = None,
    by_type: ByTypeOption = False,
    as_json: JsonOption = False,
) -> None:
    """Compare on a trained pair and held-out text: outputs of 20 to 60 tokens."""
    names, search, unlike = chosen_for(num_beams, only, by_type=by_type)
    setting, kind = setting_of(dtype)
    from texts import held_out_examples

    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        place = Path(folder)
        tokenizer = write_pair(model, draft, kind, place)
        texts = [source for source, _ in held_out_examples(data, 10 * count + 20, single=False)]
        candidates = list(map(tokenizer.encode, texts))
        options = setting | search | {"num_draft": num_draft}
        workers = start(names, options, place, candidates[:4], LIMIT, stack)
        prompts = choose_prompts(workers[PLAIN], candidates, count)
        title = f"{model} and {draft}, num_draft {num_draft}, {count} prompts, {turns} turns"
        if num_beams:
            title = f"{model}, num_beams {num_beams}, {count} prompts, {turns} turns"
        compare(title, workers, prompts, LIMIT, turns, unlike=unlike, as_json=as_json)


def write_pair(model: str, draft: str, dtype: Any, place: Path) -> Any:
    """Write a pair as checkpoints that every program reads; return its tokenizer."""
    from speculative_t5 import load

    target, tokenizer = load(model, dtype=dtype)
    as_hugging_face(target, place / "target")
    write_draft(load(draft, dtype=dtype, target=target)[0], place / "draft")
    return tokenizer


def choose_prompts(plain: Worker, candidates: Sequence[list[int]], count: int) -> list[list[int]]:
    """Return the first `count` prompts whose outputs have the lengths to measure."""
    prompts = []
    for ids in candidates:
        try:
            tokens, _ = plain.ask(ids, LIMIT)
        except Lost as error:
            sys.exit(f"error: {plain.name}: {error}")
        if MIN_TOKENS <= len(tokens) <= MAX_TOKENS:
            prompts.append(ids)
        if len(prompts) == count:
            return prompts
    sys.exit(f"error: only {len(prompts)} outputs have {MIN_TOKENS} to {MAX_TOKENS} tokens")


@app.command()
def shape(
    name: Annotated[str, typer.Argument(help="The target's shape: t5-small, t5-base and so on.")],
    draft_shape: Annotated[str, typer.Option(help="The draft's shape.")] = "t5-small",
    source: Annotated[int, typer.Option(min=1, help="Tokens of a prompt, EOS included.")] = 256,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of an output.")] = 64,
    acceptance: Annotated[
        float, typer.Option(min=0, max=1, help="Probability that a drafted token is accepted.")
    ] = 0.8,
    num_draft: NumDraftOption = 5,
    draft_vocab: Annotated[
        int | None, typer.Option(help="Let the draft propose only the first N ids.")
    ] = None,
    turns: TurnsOption = 3,
    count: Annotated[int, typer.Option(min=1, help="Number of prompts.")] = 3,
    batch_size: Annotated[
        str | None, typer.Option(help="Compare batches of these sizes, such as 1,16,64.")
    ] = None,
    num_beams: NumBeamsOption = None,
    only: OnlyOption = None,
    dtype: DtypeOption = None,
    by_type: ByTypeOption = False,
    as_json: JsonOption = False,
) -> None:
    """Compare on random weights of published shapes, with a synthetic rate of acceptance."""
    sizes = sizes_of(batch_size) if batch_size else []
    if sizes and num_beams:
        raise typer.BadParameter("--batch-size and --num-beams cannot be combined")
    names, search, unlike = chosen_for(num_beams, only, by_type=by_type or bool(sizes))
    names = [each for each in names if each not in LEFT_OUT]
    setting, kind = setting_of(dtype)
    check_shapes((name, draft_shape), only or ())
    drafting = {"num_draft": num_draft, "acceptance": acceptance, "draft_vocab": draft_vocab}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        place = Path(folder)
        write_random(name, place / "target", kind, seed=0)
        write_random(draft_shape, place / "draft", kind, seed=1)
        prompts = random_prompts(name, source, count)
        options = setting | search | drafting
        kind_of = BATCHES if sizes else ONE_BY_ONE
        workers = start(names, options, place, prompts[:1], tokens, stack, kind_of)
        title = f"{name}, random weights, {source} source tokens, {tokens} output tokens, "
        title += f"num_beams {num_beams}" if num_beams else drafted_as(draft_shape, drafting)
        title += f", {count} prompts, {turns} turns"
        if sizes:
            compare_batches(title, workers, prompts, tokens, sizes, turns, as_json=as_json)
            return
        compare(
            title,
            workers,
            prompts,
            tokens,
            turns,
            exact_length=True,
            unlike=unlike,
            as_json=as_json,
        )


def drafted_as(shape: str, drafting: dict[str, Any]) -> str:
    """Return what a title says of drafts of random weights."""
    named = ", ".join(f"{option} {value}" for option, value in drafting.items())
    left_out = " and ".join(LEFT_OUT)
    return f"{shape} drafts: {named} (without {left_out}: they would accept all or nothing)"


def check_shapes(shapes: Sequence[str], only: Sequence[str]) -> None:
    """Refuse shapes that nobody has published, and programs that random weights do not suit."""
    from speculative_t5.measure import SHAPES

    for given in shapes:
        if given not in SHAPES:
            raise typer.BadParameter(f"no shape {given!r}, expected one of: {', '.join(SHAPES)}")
    for given in only:
        if given in LEFT_OUT:
            raise typer.BadParameter(f"{given} is left out for random weights")


def write_random(shape: str, folder: Path, dtype: Any, seed: int) -> None:
    """Write random weights of a shape as a checkpoint."""
    from speculative_t5.measure import random_model

    import mlx.core as mx

    as_hugging_face(random_model(shape, dtype=dtype, seed=seed), folder)
    mx.clear_cache()  # or this process would keep the memory


def random_prompts(shape: str, length: int, count: int) -> list[list[int]]:
    """Return prompts of random ids, EOS at their ends."""
    from speculative_t5.measure import config_of_shape

    rng, ids = random.Random(0), range(2, config_of_shape(shape).vocab_size)
    return [[*rng.choices(ids, k=length - 1), 1] for _ in range(count)]


def chosen(only: Sequence[str] | None, all_of: Sequence[str] = PROGRAMS) -> list[str]:
    """Return the programs to run, `all_of` these by default; ours plain is always one."""
    known = [*dict.fromkeys((*PROGRAMS, *BY_TYPES))]
    for name in only or ():
        if name not in known:
            raise typer.BadParameter(f"no program {name!r}, expected one of: {', '.join(known)}")
    if only:
        return [name for name in known if name in only or name == PLAIN]
    return [*all_of]


def chosen_for(
    num_beams: int | None, only: Sequence[str] | None, *, by_type: bool = False
) -> tuple[list[str], dict[str, int], tuple[str, ...]]:
    """Return the programs to run, what they are to know of beams, and which may be unlike ours."""
    names = chosen(only, BY_TYPES if by_type else PROGRAMS)
    if num_beams is None:
        return names, {}, ()
    for name in only or ():
        if name not in WITH_BEAMS:
            raise typer.BadParameter(f"{name} is left out with num_beams")
    names = [name for name in names if name in WITH_BEAMS]
    return names, {"num_beams": num_beams}, ("ctranslate2",)


def setting_of(dtype: str | None) -> tuple[dict[str, str], Any]:
    """Return where and in which type all programs compute, by name, and that type for MLX."""
    from speculative_t5 import device
    from speculative_t5.checkpoints import DTYPES

    import mlx.core as mx

    if dtype is not None and dtype not in DTYPES:
        raise typer.BadParameter(f"no type {dtype!r}, expected one of: {', '.join(DTYPES)}")
    kind = DTYPES[dtype] if dtype else device.default_type().dtype
    gpu = "cuda" if mx.cuda.is_available() else "metal"
    setting = {
        "backend": "cpu" if device.on_cpu() else gpu,
        "dtype": next(name for name, each in DTYPES.items() if each == kind),
    }
    return setting, kind


@app.command()
def batches(
    data: DataOption,
    model: ModelOption = "correct-base",
    draft: DraftOption = "correct-small",
    count: Annotated[int, typer.Option(min=1, help="Number of sentences.")] = 400,
    batch_size: Annotated[
        str, typer.Option(help="Rows of a batch, several by commas.")
    ] = "1,16,64",
    turns: TurnsOption = 3,
    num_draft: NumDraftOption = 5,
    only: OnlyOption = None,
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare the throughput of batches, on a trained pair and held-out sentences."""
    for name in only or ():
        if name not in IN_BATCHES:
            raise typer.BadParameter(f"{name} is not measured in batches")
    names, sizes = chosen(only, IN_BATCHES), sizes_of(batch_size)
    setting, kind = setting_of(dtype)
    from texts import held_out_examples

    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        place = Path(folder)
        tokenizer = write_pair(model, draft, kind, place)
        prompts = [tokenizer.encode(source) for source, _ in held_out_examples(data, count)]
        options = setting | {"num_draft": num_draft}
        probes = prompts[: max(sizes)]
        workers = start(names, options, place, probes, LIMIT, stack, BATCHES)
        title = f"{model} and {draft}, num_draft {num_draft}, {count} sentences, {turns} turns"
        compare_batches(title, workers, prompts, LIMIT, sizes, turns, as_json=as_json)


@app.command()
def causal(
    pair: Annotated[Path, typer.Argument(help="Folder with a target and a draft.")],
    prompts_in: Annotated[
        Path | None, typer.Option(help="Text to take prompts from.", show_default="held-out.txt")
    ] = None,
    count: Annotated[int, typer.Option(min=1, help="Number of prompts.")] = 16,
    source: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 32,
    tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an output.")] = 128,
    batch_size: Annotated[str, typer.Option(help="Rows of a batch, several by commas.")] = "1",
    turns: TurnsOption = 3,
    num_draft: NumDraftOption = 4,
    only: OnlyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare on a pair of decoder-only models, such as weights/training/train_causal.py makes."""
    for name in only or ():
        if name not in CAUSAL:
            raise typer.BadParameter(f"no program {name!r}, expected one of: {', '.join(CAUSAL)}")
    names = [name for name in CAUSAL if not only or name in only or name == PLAIN]
    sizes, (setting, _) = sizes_of(batch_size), setting_of(None)
    from speculative_t5.checkpoints import locate, read_tokenizer

    from programs.causal import windows_of

    text = (prompts_in or pair / "held-out.txt").read_text(encoding="utf-8")
    ids = read_tokenizer(locate(pair / "target")).encode(text)
    prompts = windows_of(ids, count, source)
    options = setting | {"num_draft": num_draft, "causal": True}
    with contextlib.ExitStack() as stack:
        workers = start(names, options, pair, prompts[:2], tokens, stack, BATCHES)
        lengths = f"{source} source tokens, at most {tokens} of output"
        title = f"{pair.name}, {lengths}, num_draft {num_draft}, {count} prompts, {turns} turns"
        compare_batches(title, workers, prompts, tokens, sizes, turns, as_json=as_json)


def sizes_of(batch_size: str) -> list[int]:
    """Return the rows of batches that an option lists."""
    sizes = [int(size) for size in batch_size.split(",") if size.isdecimal() and int(size)]
    if len(sizes) != batch_size.count(",") + 1:
        raise typer.BadParameter(f"--batch-size must be numbers by commas, got {batch_size!r}")
    return sizes


@app.command(hidden=True)
def convert(source: Path, output: Path) -> None:
    """Write a checkpoint for CTranslate2, in a process of its own."""
    as_ctranslate2(source, output)


@app.command(hidden=True)
def worker(name: str, spec: str) -> None:
    """Serve one program to the process that measures."""
    serve(name, json.loads(spec))


@app.command(hidden=True)
def batch_worker(name: str, spec: str) -> None:
    """Serve one program that decodes in batches."""
    serve_batches(name, json.loads(spec))


@app.command(hidden=True)
def length_worker(name: str, spec: str) -> None:
    """Serve one way of drafting to compare_lengths.py."""
    answer_requests(lambda: load_way(json.loads(spec)))


if __name__ == "__main__":
    app()
