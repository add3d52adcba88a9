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
from collections.abc import Callable
from pathlib import Path
from typing import Any

from programs import ASSISTED, PLAIN, SPECULATIVE
from programs.checkpoints import read_back, silence_transformers, word

MAX_SOURCE_LENGTH = 2**16  # tokens of a prompt; random shapes would refuse long ones otherwise

# Answers a request: source ids and the most tokens to return -> ids, EOS included.
Generate = Callable[[list[int], int], list[int]]


def serve(name: str, spec: dict[str, Any]) -> None:
    """Print a line that describes the program, then an answer to each request.

    Requests and answers are lines of JSON on standard input and output.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # keep what libraries print out of the answers

    def say(**answer: Any) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    try:
        generate, about = load_program(name, spec)
    except ImportError as error:
        return say(missing=str(error))
    say(**about)
    for line in sys.stdin:
        request = json.loads(line)
        began = time.perf_counter()
        tokens = generate(request["ids"], request["max_tokens"])
        seconds = time.perf_counter() - began
        say(tokens=tokens, seconds=seconds)


def load_program(name: str, spec: dict[str, Any]) -> tuple[Generate, dict[str, Any]]:
    """Return a program that is ready, and its versions, threads and perhaps a note."""
    place = Path(spec["place"])
    if name in (PLAIN, SPECULATIVE, "naive"):
        return load_ours(name, place, spec)
    if name in ("transformers", ASSISTED):
        return load_transformers(place, assisted=name == ASSISTED)
    compute_type = name.removeprefix("ctranslate2 ")
    return load_ctranslate2(place / "ctranslate2", compute_type, spec["threads"])


def load_ours(name: str, place: Path, spec: dict[str, Any]) -> tuple[Generate, dict[str, Any]]:
    from programs import naive
    from speculative_t5 import SpeculativeDecoder
    from speculative_t5.bench.synthetic import SyntheticDecoder
    from speculative_t5.cli.tips import tips
    from speculative_t5.cpu import accelerate
    from speculative_t5.device import num_threads

    model = read_back(place / "target")
    about = {
        "versions": versions("speculative_t5", "mlx"),
        "threads": num_threads(),
        "note": "; ".join(tips()),
    }
    if name == "naive":
        return lambda ids, max_tokens: naive.generate(model, ids, max_tokens), about
    draft = read_back(place / "draft") if name == SPECULATIVE else None
    for loaded in (model, draft):
        if loaded:
            accelerate(loaded)
    options = {key: spec[key] for key in ("num_draft", "draft_vocab") if key in spec and draft}
    decoder: Any = SpeculativeDecoder(model, draft, max_source_length=MAX_SOURCE_LENGTH, **options)
    if draft and "acceptance" in spec:
        decoder = SyntheticDecoder(decoder, spec["acceptance"])

    def generate(ids: list[int], max_tokens: int) -> list[int]:
        output = decoder.generate(ids, max_tokens=max_tokens)
        ended = output.finish_reason == "eos"
        return [*output.tokens, model.eos_token_id] if ended else output.tokens

    return generate, about


def load_transformers(place: Path, *, assisted: bool) -> tuple[Generate, dict[str, Any]]:
    import torch
    from transformers import T5ForConditionalGeneration

    silence_transformers()
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


def assistant_settings(draft: Any) -> str:
    """Describe how assisted generation drafts by default."""
    config = draft.generation_config
    names = (
        "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold",
    )  # fmt: skip
    default = config._get_default_generation_params()
    values = {name: getattr(config, name, None) for name in names}
    return ", ".join(f"{n} {default.get(n) if v is None else v}" for n, v in values.items())


def load_ctranslate2(
    folder: Path, compute_type: str, threads: int
) -> tuple[Generate, dict[str, Any]]:
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
