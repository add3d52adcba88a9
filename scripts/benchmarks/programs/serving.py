"""What a program's own process runs: it loads the program, then answers requests.

Each function imports only what its program needs: a BLAS loaded for one changes the speed of
another.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from programs import ASSISTED, AUTO, COMBINED, IN_BATCHES, KEPT, OURS, PLAIN, STEADY
from programs.checkpoints import (
    dtype_of,
    is_whole,
    read_back,
    read_draft,
    silence_transformers,
    word,
)

if TYPE_CHECKING:
    from speculative_t5 import GenerationOutput, SpeculativeDecoder
    from speculative_t5.models.t5 import T5

MAX_SOURCE_LENGTH = 2**16  # tokens of a prompt; random shapes would refuse long ones otherwise

# Of this process on Linux. What getrusage returns includes the process that started it.
STATUS = Path("/proc/self/status")

# Answers a request: source ids and the most tokens to return -> ids, EOS included.
Generate = Callable[[list[int], int], list[int]]
# Of many prompts, the most tokens of each and the rows of a batch -> the ids of each.
GenerateAll = Callable[[list[list[int]], int, int], list[list[int]]]
# Answers a request of any kind.
Answer = Callable[[dict[str, Any]], dict[str, Any]]


class CannotRun(Exception):
    """The program cannot run on this device or in this type; the text says why."""


def serve(name: str, spec: dict[str, Any]) -> None:
    """Answer requests for outputs of a program, see `load_program`."""

    def load() -> tuple[Answer, dict[str, Any]]:
        generate, about = load_program(name, spec)

        def answer(request: dict[str, Any]) -> dict[str, Any]:
            began = time.perf_counter()
            tokens = generate(request["ids"], request["max_tokens"])
            spent = time.perf_counter() - began
            return {"tokens": tokens, "seconds": spent, "peak": peak_memory()}

        return answer, about

    answer_requests(load)


def serve_batches(name: str, spec: dict[str, Any]) -> None:
    """Answer requests for the outputs of many prompts."""

    def load() -> tuple[Answer, dict[str, Any]]:
        generate_all, about = load_in_batches(name, spec)

        def answer(request: dict[str, Any]) -> dict[str, Any]:
            began = time.perf_counter()
            outputs = generate_all(request["prompts"], request["max_tokens"], request["batch_size"])
            spent = time.perf_counter() - began
            return {"outputs": outputs, "seconds": spent, "peak": peak_memory()}

        return answer, about

    answer_requests(load)


def peak_memory() -> int | None:
    """Return the most bytes of memory that this process has had; None where it is not known."""
    if not STATUS.exists():
        return None
    fields = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) * 1024


def answer_requests(load: Callable[[], tuple[Answer, dict[str, Any]]]) -> None:
    """Print a line that describes the program that `load` returns, then answers to requests.

    Requests and answers are lines of JSON on standard input and output. A program that fails
    answers why it is `missing`, and ends.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # keep what libraries print out of the answers

    def say(found: dict[str, Any]) -> None:
        print(json.dumps(found), file=answers, flush=True)

    def fail(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, Exception):
            say({"missing": reason(error, trace)})
        else:
            sys.__excepthook__(kind, error, trace)

    sys.excepthook = fail
    answer, about = load()
    say(about)
    for line in sys.stdin:
        say(answer(json.loads(line)))


def reason(error: BaseException, trace: TracebackType | None) -> str:
    """Say in one line why a program failed, and where."""
    first, *_ = str(error).strip().splitlines() or [""]
    if isinstance(error, CannotRun):
        return first
    if isinstance(error, ImportError):
        return f"{first} (to add it: pip install '.[compare]')"
    *_, last = traceback.extract_tb(trace)
    return f"{type(error).__name__}: {first} ({Path(last.filename).name}, line {last.lineno})"


def load_program(name: str, spec: dict[str, Any]) -> tuple[Generate, dict[str, Any]]:
    """Return a program that is ready, and its versions, device, type, threads, perhaps a note.

    `spec` has the folder of the checkpoints, `place`; the `backend` that MLX computes with, cpu,
    metal or cuda; and the `dtype` by name.
    """
    place = Path(spec["place"])
    if name in KEPT or name in OURS:
        return load_ours(name, place, spec)
    if name in ("transformers", "transformers bfloat16", ASSISTED):
        return load_transformers(place, transformers_spec(name, spec), assisted=name == ASSISTED)
    return load_ctranslate2(place / "ctranslate2", spec, int8=name.endswith("int8"))


def load_in_batches(name: str, spec: dict[str, Any]) -> tuple[GenerateAll, dict[str, Any]]:
    """Return a program that decodes in batches, and what `load_program` says of it."""
    if spec.get("causal"):
        from programs.causal import load_causal

        return load_causal(name, spec)
    if name not in IN_BATCHES:
        raise CannotRun("it is not measured in batches")
    place = Path(spec["place"])
    if name.startswith("ctranslate2"):
        return load_translator(place / "ctranslate2", spec, int8=name.endswith("int8"))
    if name.startswith("transformers"):
        return load_padded_batches(place, transformers_spec(name, spec))
    decoder, about = our_decoder(name, place, spec)
    if decoder.draft and "acceptance" in spec:
        return replayed_in_batches(decoder, spec["acceptance"]), about

    def generate_all(prompts: list[list[int]], max_tokens: int, batch_size: int) -> list[list[int]]:
        outputs = decoder.generate_batch(prompts, max_tokens=max_tokens, batch_size=batch_size)
        return [ids_of(output, decoder) for output in outputs]

    return generate_all, about


def load_ours(name: str, place: Path, spec: dict[str, Any]) -> tuple[Generate, dict[str, Any]]:
    if name == "naive":
        from programs import naive

        model, about = our_target(place, spec, kind=None)
        return lambda ids, max_tokens: naive.generate(model, ids, max_tokens), about
    decoder, about = our_decoder(name, place, spec)
    if "num_beams" in spec:
        return beam_search_of(decoder.model, spec["num_beams"]), about
    if decoder.draft and "acceptance" in spec:
        return replayed_by(decoder, spec["acceptance"]), about  # random models do not end

    def generate(ids: list[int], max_tokens: int) -> list[int]:
        return ids_of(decoder.generate(ids, max_tokens=max_tokens), decoder)

    return generate, about


def our_target(place: Path, spec: dict[str, Any], kind: str | None) -> tuple[T5, dict[str, Any]]:
    """Return our target with matrices of a kind, and what is to be said of it."""
    from speculative_t5.cli.terminal import tips
    from speculative_t5.libraries import num_threads

    model = read_back(place / "target", kind)
    about = {
        "versions": versions("speculative_t5", "mlx"),
        "device": spec["backend"],
        "dtype": kind or dtype_of(model),
        "threads": num_threads(),
        "note": "; ".join(tips()),
    }
    return model, about


def our_decoder(
    name: str, place: Path, spec: dict[str, Any]
) -> tuple[SpeculativeDecoder, dict[str, Any]]:
    """Return our decoder as a program's name says, and what is to be said of it."""
    from speculative_t5 import SpeculativeDecoder
    from speculative_t5.kernels import accelerate

    kind = KEPT.get(name)
    way = name.removesuffix(f" in {kind}")
    model, about = our_target(place, spec, kind)
    draft = None if way == PLAIN else read_draft(place / "draft", model, kind)
    for loaded in (model, draft):
        if loaded:
            accelerate(loaded)
    options = {key: spec[key] for key in ("num_draft", "draft_vocab") if key in spec and draft}
    if way == AUTO:
        options["num_draft"] = "auto"
    if way == STEADY:
        options["steady"] = True
    if way == COMBINED:
        options["lookup"] = True
    options["max_source_length"] = MAX_SOURCE_LENGTH
    return SpeculativeDecoder(model, draft, **options), about


def ids_of(output: GenerationOutput, decoder: SpeculativeDecoder) -> list[int]:
    """Return the ids of an output, EOS included."""
    ended = output.finish_reason == "eos"
    return [*output.tokens, decoder.model.info.eos_token_id] if ended else output.tokens


def replayed_by(decoder: SpeculativeDecoder, acceptance: float) -> Generate:
    """Return generation whose drafted tokens are the output's own with this probability."""
    replayed = replayed_in_batches(decoder, acceptance)
    return lambda ids, max_tokens: replayed([ids], max_tokens, 1)[0]


def replayed_in_batches(decoder: SpeculativeDecoder, acceptance: float) -> GenerateAll:
    """Return the same for many prompts; the first call for a prompt decodes it plainly, too."""
    from speculative_t5.decoding import decode
    from speculative_t5.generation import GenerationOptions
    from speculative_t5.measure import replaying_plan

    known: dict[tuple[int, ...], Sequence[int]] = {}  # outputs by prompt

    def replayed(prompts: list[list[int]], max_tokens: int, batch_size: int) -> list[list[int]]:
        new = [ids for ids in prompts if tuple(ids) not in known]
        plain = {"speculative": False, "max_tokens": max_tokens, "batch_size": batch_size}
        for ids, done in zip(new, decoder.generate_batch(new, **plain), strict=True):
            known[tuple(ids)] = done.tokens
        plan = replaying_plan(decoder, known, acceptance)
        wanted = GenerationOptions(max_tokens=max_tokens)
        requests = decoder.engine.requests(enumerate(prompts), wanted)
        rounds = decode(decoder.model, requests, plan, batch_size=batch_size)
        ends = [each for each in rounds if each.finish_reason]
        outputs = {
            each.index: each.output if each.end_id is None else [*each.output, each.end_id]
            for each in ends
        }
        return [outputs[index] for index in range(len(prompts))]

    return replayed


def beam_search_of(model: Any, num_beams: int) -> Generate:
    """Return our beam search."""
    from speculative_t5.decoding import BeamOptions, Request, RowOptions, beam_search

    def generate(ids: list[int], max_tokens: int) -> list[int]:
        request = Request(0, ids, RowOptions(max_tokens=max_tokens))
        (found,) = beam_search(model, [request], BeamOptions(num_beams), batch_size=1)
        best = found.hypotheses[0]
        ended = best.finish_reason == "eos"
        return [*best.tokens, model.info.eos_token_id] if ended else best.tokens

    return generate


def load_transformers(
    place: Path, spec: dict[str, Any], *, assisted: bool
) -> tuple[Generate, dict[str, Any]]:
    if assisted and not is_whole(place / "draft"):
        raise CannotRun("the draft shares its target's encoder, and it needs one that is a model")
    model, about, wait = transformers_model(place / "target", spec)
    options: dict[str, Any] = {"do_sample": False, "num_beams": spec.get("num_beams", 1)}
    if assisted:
        options["assistant_model"] = draft = transformers_model(place / "draft", spec)[0]
        about["note"] = assistant_settings(draft)
    import torch

    @torch.inference_mode()
    def generate(ids: list[int], max_tokens: int) -> list[int]:
        source = torch.tensor([ids], device=model.device)
        mask = torch.ones_like(source)  # or ids that are padding elsewhere would be masked
        output = model.generate(source, attention_mask=mask, max_new_tokens=max_tokens, **options)
        tokens: list[int] = output[0, 1:].tolist()
        wait()
        return tokens

    return generate, about


def load_padded_batches(place: Path, spec: dict[str, Any]) -> tuple[GenerateAll, dict[str, Any]]:
    """Return transformers with prompts of like lengths side by side, each batch to its end."""
    model, about, _ = transformers_model(place / "target", spec)
    import torch

    end, pad = model.config.eos_token_id, model.config.pad_token_id

    @torch.inference_mode()
    def generate_all(prompts: list[list[int]], max_tokens: int, batch_size: int) -> list[list[int]]:
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        outputs: list[list[int]] = [[] for _ in prompts]
        for start in range(0, len(order), batch_size):
            group = order[start : start + batch_size]
            longest = max(len(prompts[index]) for index in group)
            source = torch.full((len(group), longest), pad)
            mask = torch.zeros_like(source)
            for row, index in enumerate(group):
                source[row, : len(prompts[index])] = torch.tensor(prompts[index])
                mask[row, : len(prompts[index])] = 1
            found = model.generate(
                source.to(model.device),
                attention_mask=mask.to(model.device),
                max_new_tokens=max_tokens,
                do_sample=False,
            )
            for index, tokens in zip(group, found[:, 1:].tolist(), strict=True):
                ended = tokens.index(end) + 1 if end in tokens else len(tokens)
                outputs[index] = tokens[:ended]
        return outputs

    return generate_all, about


def transformers_spec(name: str, spec: dict[str, Any]) -> dict[str, Any]:
    """Return the spec of a program of transformers, in the type that its name says, if any."""
    return spec | {"dtype": "bfloat16"} if name.endswith("bfloat16") else spec


def transformers_model(
    folder: Path, spec: dict[str, Any]
) -> tuple[Any, dict[str, Any], Callable[[], None]]:
    """Return a model of transformers, what is to be said of it, and what waits for its device."""
    import torch
    from transformers import T5ForConditionalGeneration

    silence_transformers()
    device = torch_device(spec["backend"])
    dtype = getattr(torch, spec["dtype"])
    model = T5ForConditionalGeneration.from_pretrained(folder, dtype=dtype).eval().to(device)
    about = {
        "versions": versions("transformers", "torch"),
        "device": model.device.type,
        "dtype": str(model.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
    }
    wait = {"cuda": torch.cuda.synchronize, "mps": torch.mps.synchronize}.get(device, lambda: None)
    return model, about, wait


def torch_device(backend: str) -> str:
    """Return torch's device beside MLX's: the same GPU if torch can use it, else the CPU."""
    import torch

    if backend == "cuda" and torch.cuda.is_available():
        return "cuda"
    return "mps" if backend == "metal" and torch.backends.mps.is_available() else "cpu"


def assistant_settings(draft: Any) -> str:
    """Describe how assisted generation drafts by default."""
    config = draft.generation_config
    names = (
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "assistant_confidence_threshold",
    )
    default = config._get_default_generation_params()
    values = {name: getattr(config, name, None) for name in names}
    return ", ".join(f"{n} {default.get(n) if v is None else v}" for n, v in values.items())


def load_ctranslate2(
    folder: Path, spec: dict[str, Any], *, int8: bool
) -> tuple[Generate, dict[str, Any]]:
    generate_all, about = load_translator(folder, spec, int8=int8)

    def generate(ids: list[int], max_tokens: int) -> list[int]:
        (output,) = generate_all([ids], max_tokens, 1)
        return output

    return generate, about


def load_translator(
    folder: Path, spec: dict[str, Any], *, int8: bool
) -> tuple[GenerateAll, dict[str, Any]]:
    """Return CTranslate2, and what is to be said of it."""
    import ctranslate2

    cuda = spec["backend"] == "cuda" and ctranslate2.get_cuda_device_count() > 0
    device, kind, threads = "cuda" if cuda else "cpu", spec["dtype"], spec["threads"]
    if int8:
        kind = f"int8_{kind}" if cuda else "int8"
    supported = ctranslate2.get_supported_compute_types(device)
    if kind not in supported:
        known = ", ".join(sorted(supported))
        raise CannotRun(f"on {device} it computes in {known}, not in {kind}")
    translator = ctranslate2.Translator(
        str(folder), device=device, compute_type=kind, inter_threads=1, intra_threads=threads
    )

    def generate_all(prompts: list[list[int]], max_tokens: int, batch_size: int) -> list[list[int]]:
        results = translator.translate_batch(
            [list(map(word, ids)) for ids in prompts],
            max_batch_size=batch_size,
            beam_size=spec.get("num_beams", 1),
            max_decoding_length=max_tokens,
            min_decoding_length=0,
            max_input_length=0,
            return_end_token=True,
        )
        return [[int(found[1:-1]) for found in result.hypotheses[0]] for result in results]

    backend = "CT2_USE_MKL=0" if os.environ.get("CT2_USE_MKL") == "0" else "default backend"
    about = {
        "versions": versions("ctranslate2"),
        "device": device,
        "dtype": translator.compute_type,
        "threads": threads,
        "note": "" if cuda else backend,
    }
    return generate_all, about


def versions(*packages: str) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:  # run from its folder, not installed
            found[package] = str(getattr(sys.modules.get(package), "__version__", "?"))
    return found
