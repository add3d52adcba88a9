"""Compare the programs that a user could pick, on one checkpoint and the same prompts.

    python scripts/compare.py pair  --data deu.txt.xz
    python scripts/compare.py shape t5-base

`pair` runs the shipped pair on held-out text (the data that weights/README.md names), `shape`
random weights of a published shape. Greedy, batch 1, float32 but for CTranslate2's int8. Each
program has a process of its own, since a BLAS loaded for one changes another; they take turns,
prompt by prompt in an order drawn for each turn, and only one runs at a time. A first pass over all
prompts warms up and compares the outputs; it is not timed. CTranslate2 gets the best of a few
settings, the others their defaults. Needs `pip install ".[compare]"`.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:  # each worker imports what it needs, and no more: see above
    from speculative_t5.models.t5.model import T5

REGULAR, SPECULATIVE, ASSISTED = "ours regular", "ours speculative", "transformers assisted"
# Modules that each program needs beyond this package's dependencies.
PROGRAMS: dict[str, tuple[str, ...]] = {
    REGULAR: (),
    SPECULATIVE: (),
    "naive": (),
    "transformers": ("torch",),
    ASSISTED: ("torch",),
    "ctranslate2 float32": ("ctranslate2", "torch"),
    "ctranslate2 int8": ("ctranslate2", "torch"),
}
INEXACT = ("ctranslate2 int8",)
TOLERATED = 1 / 20  # of the outputs: float32 programs may round near-ties differently
MIN_TOKENS, MAX_TOKENS = 20, 60  # of the regular outputs that `pair` keeps, EOS included
LIMIT = 256  # tokens of any output of `pair`
MAX_SOURCE = 2**16  # tokens of a prompt, beyond what random shapes are made for
# Seconds between two requests: threads of the program before may spin for a while when it is done.
PAUSE = 0.1

# The worker's answers to one request: source ids and most tokens -> ids, EOS included.
Generate = Callable[[list[int], int], list[int]]

TurnsOption = Annotated[int, typer.Option(min=1, help="Times that all are measured, by turns.")]
NumDraftOption = Annotated[int, typer.Option(min=1, help="Tokens to draft for each target pass.")]
OnlyOption = Annotated[
    list[str] | None, typer.Option(help="A program to measure, beside ours regular; repeatable.")
]
JsonOption = Annotated[
    Path | None, typer.Option("--json", help="Also write all figures to this file.")
]

app = typer.Typer(help=__doc__, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def pair(
    data: Annotated[Path, typer.Option(help="deu.txt.xz: English, a tab, German, a line each.")],
    model: Annotated[str, typer.Option(help="The target's folder or name.")] = "correct-base",
    draft: Annotated[str, typer.Option(help="The draft's.")] = "correct-small",
    count: Annotated[int, typer.Option(min=1, help="Number of prompts.")] = 24,
    turns: TurnsOption = 5,
    num_draft: NumDraftOption = 5,
    only: OnlyOption = None,
    json_file: JsonOption = None,
) -> None:
    """A trained pair on held-out text: outputs of 20 to 60 tokens."""
    names = available(chosen(only))
    from speculative_t5 import load

    import mlx.core as mx
    from corruption import held_out_examples

    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as stack:
        folders = {"target": Path(place) / "target", "draft": Path(place) / "draft"}
        target, tokenizer = load(model, dtype=mx.float32)
        as_hugging_face(target, folders["target"])
        as_hugging_face(load(draft, dtype=mx.float32)[0], folders["draft"])
        del target
        texts = [source for source, _ in held_out_examples(data, 10 * count + 20, single=False)]
        candidates = list(map(tokenizer.encode, texts))
        options = {"num_draft": num_draft}
        workers = start(names, options, Path(place), candidates[:4], LIMIT, stack)
        prompts = []
        for ids in candidates:
            tokens, _ = workers[REGULAR].ask(ids, LIMIT)
            if MIN_TOKENS <= len(tokens) <= MAX_TOKENS:
                prompts.append(ids)
            if len(prompts) == count:
                break
        else:
            sys.exit(f"error: only {len(prompts)} outputs have {MIN_TOKENS} to {MAX_TOKENS} tokens")
        title = f"{model} and {draft}, num_draft {num_draft}, {count} prompts, {turns} turns"
        compare(title, workers, prompts, LIMIT, turns, json_file)


@app.command()
def shape(
    name: Annotated[str, typer.Argument(help="The target's: t5-small, t5-base and so on.")],
    draft_shape: Annotated[str, typer.Option(help="The draft's.")] = "t5-small",
    source: Annotated[int, typer.Option(min=1, help="Tokens of a prompt, EOS included.")] = 256,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of an output.")] = 64,
    acceptance: Annotated[
        float, typer.Option(min=0, max=1, help="Probability that a drafted token is accepted.")
    ] = 0.8,
    num_draft: NumDraftOption = 5,
    draft_vocab: Annotated[
        int | None, typer.Option(help="Let the draft propose the first so many ids only.")
    ] = None,
    turns: TurnsOption = 3,
    count: Annotated[int, typer.Option(min=1, help="Number of prompts.")] = 3,
    only: OnlyOption = None,
    json_file: JsonOption = None,
) -> None:
    """Random weights of published shapes; drafted tokens are accepted at a forced rate."""
    names = chosen(only)
    from speculative_t5.bench.synthetic import SHAPES, random_model

    for given in (name, draft_shape):
        if given not in SHAPES:
            raise typer.BadParameter(f"no shape {given!r}, expected one of: {', '.join(SHAPES)}")
    if only and ASSISTED in only:
        raise typer.BadParameter(f"{ASSISTED} is left out for random weights")
    names = available([n for n in names if n != ASSISTED])
    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as stack:
        as_hugging_face(random_model(name, seed=0), Path(place) / "target")
        as_hugging_face(random_model(draft_shape, seed=1), Path(place) / "draft")
        rng, ids = random.Random(0), range(2, SHAPES[name].vocab_size)
        prompts = [[*rng.choices(ids, k=source - 1), 1] for _ in range(count)]
        options = {"num_draft": num_draft, "acceptance": acceptance, "draft_vocab": draft_vocab}
        workers = start(names, options, Path(place), prompts[:1], tokens, stack)
        title = (
            f"{name} and {draft_shape}, random weights, {source} source tokens, {tokens} output "
            f"tokens, acceptance {acceptance:g}, num_draft {num_draft}, draft_vocab "
            f"{draft_vocab}, {count} prompts, {turns} turns\n"
            f"{ASSISTED} is left out: of random weights it would accept everything or nothing"
        )
        compare(title, workers, prompts, tokens, turns, json_file, exact_length=True)


def chosen(only: Sequence[str] | None) -> list[str]:
    """The programs to run, in the order of `PROGRAMS`; ours regular is always one."""
    for name in only or ():
        if name not in PROGRAMS:
            raise typer.BadParameter(f"no program {name!r}, expected one of: {', '.join(PROGRAMS)}")
    return [name for name in PROGRAMS if not only or name in only or name == REGULAR]


def available(names: Sequence[str]) -> list[str]:
    """Those whose packages are there; says in one line which are not."""
    lacking = {
        name: [m for m in PROGRAMS[name] if importlib.util.find_spec(m) is None] for name in names
    }
    if packages := sorted({package for found in lacking.values() for package in found}):
        left_out = ", ".join(name for name in names if lacking[name])
        print(
            f"left out for lack of {' and '.join(packages)}: {left_out} "
            '(to add them: pip install ".[compare]")',
            file=sys.stderr,
        )
    return [name for name in names if not lacking[name]]


# Checkpoints


def as_hugging_face(model: T5, folder: Path) -> None:
    """Write a model as a checkpoint that `T5ForConditionalGeneration.from_pretrained` reads.

    It is in float32, without a tokenizer, and gives the same logits.

    Raises:
        ValueError: If the model is quantized, or has a position bias in every layer (umt5).
    """
    from speculative_t5.checkpoints.t5 import plan

    import mlx.core as mx
    from mlx.utils import tree_flatten

    config = model.config
    if config.quantization or config.bias_per_layer:
        raise ValueError("a quantized model or a umt5 cannot be written as a T5 of transformers")
    arrays = dict(tree_flatten(model.parameters()))
    tensors = {}
    for parameter in plan(config):
        rows = 0
        for name, (size, *_) in parameter.sources.items():
            part = arrays[parameter.name][rows : rows + size].astype(mx.float32)
            tensors[name], rows = mx.contiguous(part), rows + size
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, {"format": "pt"})
    raw = {"architectures": ["T5ForConditionalGeneration"], "dtype": "float32"} | config.to_dict()
    (folder / "config.json").write_text(json.dumps(raw, indent=2), encoding="utf-8")


def read_back(folder: Path) -> T5:
    """The model that `as_hugging_face` wrote."""
    from speculative_t5.checkpoints.t5 import open_checkpoint
    from speculative_t5.cpu import accelerate
    from speculative_t5.models.t5.model import T5

    import mlx.core as mx

    checkpoint = open_checkpoint(folder)
    tensors = mx.load(str(folder / "model.safetensors"))
    model = T5(checkpoint.config)
    model.load_weights(
        [(p.name, mx.concatenate([tensors[n] for n in p.sources])) for p in checkpoint.parameters]
    )
    mx.eval(model.parameters())
    accelerate(model)
    return model


@app.command(hidden=True)
def convert(source: Path, output: Path) -> None:
    """Write a checkpoint of `as_hugging_face` for CTranslate2, one made-up word for each id."""
    from ctranslate2.converters.transformers import T5Loader
    from transformers import T5ForConditionalGeneration

    quieten()
    model = T5ForConditionalGeneration.from_pretrained(source).eval()
    config, spec = model.config, T5Loader().get_model_spec(model)
    words = [word(i) for i in range(config.vocab_size)]
    spec.register_source_vocabulary(words)
    spec.register_target_vocabulary(words)
    spec.config.bos_token = word(config.decoder_start_token_id)
    spec.config.decoder_start_token = word(config.decoder_start_token_id)
    spec.config.eos_token = word(config.eos_token_id)
    spec.config.unk_token = words[2]
    assert not spec.config.add_source_eos and not spec.config.add_source_bos
    spec.validate()
    spec.optimize(quantization="float32")
    output.mkdir()
    spec.save(str(output))


def word(token: int) -> str:
    return f"<{token}>"


# Programs: each runs in a worker.


@app.command(hidden=True)
def worker(name: str, spec: str) -> None:
    """Serve one program: a line that says what it is, then an answer to each request.

    Requests and answers are lines of JSON on standard input and output.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints must not get between them

    def say(**answer: Any) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    try:
        generate, about = loaded(name, json.loads(spec))
    except ImportError as error:
        return say(missing=str(error))
    say(**about)
    for line in sys.stdin:
        request = json.loads(line)
        began = time.perf_counter()
        tokens = generate(request["ids"], request["max_tokens"])
        seconds = time.perf_counter() - began
        say(tokens=tokens, seconds=seconds)


def loaded(name: str, spec: dict[str, Any]) -> tuple[Generate, dict[str, Any]]:
    """A program that is ready, and what there is to tell: versions, threads, perhaps a note."""
    place = Path(spec["place"])
    if name in (REGULAR, SPECULATIVE, "naive"):
        return ours(name, place, spec)
    if name in ("transformers", ASSISTED):
        return transformers(place, assisted=name == ASSISTED)
    return ctranslate2(place / "ctranslate2", name.removeprefix("ctranslate2 "), spec["threads"])


def ours(name: str, place: Path, spec: dict[str, Any]) -> tuple[Generate, dict[str, Any]]:
    import speculative_t5
    from speculative_t5.bench.synthetic import SyntheticDecoder
    from speculative_t5.cli.tips import tips
    from speculative_t5.cpu import blocks
    from speculative_t5.device import num_threads

    import naive

    model = read_back(place / "target")
    about = {
        "versions": versions("speculative_t5", "mlx"),
        "threads": num_threads(),
        "note": "; ".join(tips()),
    }
    if name == "naive":
        blocks.library = None  # MLX's own operations alone
        return lambda ids, max_tokens: naive.generate(model, ids, max_tokens), about
    if name == REGULAR:
        decoder: Any = speculative_t5.SpeculativeDecoder(model, None, max_source_length=MAX_SOURCE)
    elif "acceptance" in spec:
        draft = read_back(place / "draft")
        drafting = speculative_t5.SpeculativeDecoder(
            model, draft, num_draft=spec["num_draft"], draft_vocab=spec["draft_vocab"],
            max_source_length=MAX_SOURCE,
        )  # fmt: skip
        decoder = SyntheticDecoder(drafting, spec["acceptance"])
    else:
        draft = read_back(place / "draft")
        decoder = speculative_t5.SpeculativeDecoder(
            model, draft, num_draft=spec["num_draft"], max_source_length=MAX_SOURCE
        )

    def generate(ids: list[int], max_tokens: int) -> list[int]:
        output = decoder.generate(ids, max_tokens=max_tokens)
        ended = output.finish_reason == "eos"
        return [*output.tokens, model.eos_token_id] if ended else output.tokens

    return generate, about


def transformers(place: Path, *, assisted: bool) -> tuple[Generate, dict[str, Any]]:
    import torch
    from transformers import T5ForConditionalGeneration

    quieten()
    model = T5ForConditionalGeneration.from_pretrained(place / "target").eval()
    options: dict[str, Any] = {"do_sample": False, "num_beams": 1}
    about = {"versions": versions("transformers", "torch"), "threads": torch.get_num_threads()}
    if assisted:
        draft = T5ForConditionalGeneration.from_pretrained(place / "draft").eval()
        options["assistant_model"] = draft
        about["note"] = assistant_settings(draft)

    @torch.inference_mode()
    def generate(ids: list[int], max_tokens: int) -> list[int]:
        source = torch.tensor([ids])
        mask = torch.ones_like(source)  # or ids that are padding elsewhere would be masked
        output = model.generate(source, attention_mask=mask, max_new_tokens=max_tokens, **options)
        return output[0, 1:].tolist()

    return generate, about


def quieten() -> None:
    """Keep transformers from printing warnings and progress."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def assistant_settings(draft: Any) -> str:
    """How assisted generation drafts by default."""
    config = draft.generation_config
    names = (
        "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold",
    )  # fmt: skip
    default = config._get_default_generation_params()
    values = {name: getattr(config, name, None) for name in names}
    return ", ".join(f"{n} {default.get(n) if v is None else v}" for n, v in values.items())


def ctranslate2(folder: Path, compute_type: str, threads: int) -> tuple[Generate, dict[str, Any]]:
    import ctranslate2

    translator = ctranslate2.Translator(
        str(folder), device="cpu", compute_type=compute_type, inter_threads=1, intra_threads=threads
    )

    def generate(ids: list[int], max_tokens: int) -> list[int]:
        (result,) = translator.translate_batch(
            [list(map(word, ids))], beam_size=1, max_decoding_length=max_tokens,
            min_decoding_length=0, max_input_length=0, return_end_token=True,
        )  # fmt: skip
        return [int(found[1:-1]) for found in result.hypotheses[0]]

    backend = "CT2_USE_MKL=0" if os.environ.get("CT2_USE_MKL") == "0" else "default backend"
    note = f"computes in {translator.compute_type}, {backend}"
    return generate, {"versions": versions("ctranslate2"), "threads": threads, "note": note}


def versions(*packages: str) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:  # run from its folder, not installed
            found[package] = str(getattr(sys.modules.get(package), "__version__", "?"))
    return found


# The parent


class Worker:
    """A program in a process of its own."""

    def __init__(self, name: str, spec: dict[str, Any], **environment: str) -> None:
        self.name = name
        command = [sys.executable, __file__, "worker", name, json.dumps(spec)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env=os.environ | {"HF_HUB_OFFLINE": "1"} | environment,
        )
        self.about = self._answer()

    def ask(self, ids: list[int], max_tokens: int) -> tuple[list[int], float]:
        """The output, EOS included, and the seconds that it took."""
        assert self._process.stdin
        print(json.dumps({"ids": ids, "max_tokens": max_tokens}), file=self._process.stdin)
        self._process.stdin.flush()
        answer = self._answer()
        time.sleep(PAUSE)
        return answer["tokens"], answer["seconds"]

    def close(self) -> None:
        """End the process; it ends by itself when there are no more requests."""
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"error: {self.name} ended with exit code {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def start(
    names: Sequence[str],
    options: dict[str, Any],
    place: Path,
    probes: Sequence[list[int]],
    max_tokens: int,
    stack: contextlib.ExitStack,
) -> dict[str, Worker]:
    """Start the programs on place/target and place/draft; says which cannot run.

    Args:
        names: Of `PROGRAMS`.
        options: For the workers.
        place: Where the checkpoints are.
        probes: Source ids to find the best settings of CTranslate2 with.
        max_tokens: Of their outputs.
        stack: Ends the programs.
    """
    if any(name.startswith("ctranslate2") for name in names):
        paths = [str(place / "target"), str(place / "ctranslate2")]
        subprocess.run([sys.executable, __file__, "convert", *paths], check=True)
    workers = {}
    for name in names:
        spec = {"place": str(place), **options}
        if name.startswith("ctranslate2"):
            program = fastest(name, spec, probes, max_tokens)
        else:
            program = Worker(name, spec)
        stack.callback(program.close)
        if "missing" in program.about:
            print(f"left out: {name}: {program.about['missing']}", file=sys.stderr)
        else:
            workers[name] = program
    return workers


def fastest(
    name: str, spec: dict[str, Any], probes: Sequence[list[int]], max_tokens: int
) -> Worker:
    """CTranslate2 with the number of threads and the backend that suit this machine best.

    They differ by several times on small models: threads may wait for each other by sleeping.
    """
    best, least = None, float("inf")
    for threads in sorted({1, os.cpu_count() or 1}):
        for backend in ({}, {"CT2_USE_MKL": "0"}):
            program = Worker(name, {**spec, "threads": threads}, **backend)
            if "missing" in program.about:
                return program
            program.ask(probes[0], max_tokens)
            seconds = sum(program.ask(ids, max_tokens)[1] for ids in probes)
            if seconds < least:
                best, least, program = program, seconds, best
            if program:
                program.close()
    assert best
    return best


@dataclass
class Figures:
    """What was found of one program.

    Attributes:
        about: Versions, threads and a note.
        agree: Outputs that are those of ours regular.
        speeds: Tokens per second of each turn.
    """

    about: dict[str, Any]
    agree: int = 0
    speeds: list[float] = field(default_factory=list)

    @property
    def speed(self) -> float:
        return statistics.median(self.speeds)


def compare(
    title: str,
    workers: dict[str, Worker],
    prompts: Sequence[list[int]],
    max_tokens: int,
    turns: int,
    json_file: Path | None,
    *,
    exact_length: bool = False,
) -> None:
    """Compare outputs, measure and report; exits with 1 where an exact program is not.

    Args:
        title: Says what is measured.
        workers: By name; ours regular is one.
        prompts: Source ids, EOS included.
        max_tokens: Of one output.
        turns: Times that all prompts are measured.
        json_file: Where figures go, too.
        exact_length: Whether every output must have `max_tokens` tokens.
    """
    figures = {name: Figures(program.about) for name, program in workers.items()}
    order = random.Random(0)
    outputs: dict[str, list[list[int]]] = {}
    for name, output, _ in turn(workers, prompts, max_tokens, order):
        outputs.setdefault(name, []).append(output)
    print(title)
    wrong = []
    for name, program in figures.items():
        pairs = zip(outputs[name], outputs[REGULAR], strict=True)
        program.agree = sum(a == b for a, b in pairs)
        if name != REGULAR:
            print(f"{name}: {program.agree} of {len(prompts)} outputs agree", flush=True)
        if name not in INEXACT and len(prompts) - program.agree > TOLERATED * len(prompts):
            wrong.append(name)
        if exact_length and {*map(len, outputs[name])} != {max_tokens}:
            sys.exit(f"error: {name} gave outputs of other than {max_tokens} tokens")
    if wrong:
        sys.exit(f"error: more than one output in twenty differs: {', '.join(wrong)}")
    for _ in range(turns):
        tokens, seconds = dict.fromkeys(workers, 0), dict.fromkeys(workers, 0.0)
        for name, output, spent in turn(workers, prompts, max_tokens, order):
            tokens[name] += len(output)
            seconds[name] += spent
        for name, program in figures.items():
            program.speeds.append(tokens[name] / seconds[name])
    print("\n".join(report(figures)))
    if json_file:
        told = {
            "title": title,
            "machine": f"{platform.platform()}, {os.cpu_count()} CPUs",
            "python": platform.python_version(),
            "prompts": len(prompts),
            "programs": {
                name: {**f.about, "agree": f.agree, "tokens_per_second": f.speeds}
                for name, f in figures.items()
            },
        }
        json_file.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")


def turn(
    workers: dict[str, Worker],
    prompts: Sequence[list[int]],
    max_tokens: int,
    order: random.Random,
) -> Iterator[tuple[str, list[int], float]]:
    """Every prompt once by every program: its name, the output and the seconds."""
    names = order.sample(list(workers), len(workers))
    for ids in prompts:
        for name in names:
            yield name, *workers[name].ask(ids, max_tokens)


def report(figures: dict[str, Figures]) -> list[str]:
    """A table of speeds, then versions, threads and notes."""
    regular, speculative = figures[REGULAR].speed, figures.get(SPECULATIVE)
    lines = [
        "",
        f"{'':22} {'tokens/s':>9} {'min-max of turns':>17} {'over regular':>13} "
        f"{'speculative over it':>20}",
    ]
    for name, found in figures.items():
        spread = f"{min(found.speeds):.1f}-{max(found.speeds):.1f}"
        over = f"{speculative.speed / found.speed:.2f}" if speculative else ""
        lines.append(
            f"{name:22} {found.speed:9.1f} {spread:>17} {found.speed / regular:13.2f} {over:>20}"
        )
    lines.append("")
    for name, found in figures.items():
        packages = " ".join(f"{package} {v}" for package, v in found.about["versions"].items())
        note = f"; {found.about['note']}" if found.about.get("note") else ""
        lines.append(f"{name}: {packages}; threads {found.about['threads']}{note}")
    return lines


if __name__ == "__main__":
    app()
