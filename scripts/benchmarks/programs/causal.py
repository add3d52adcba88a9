"""Programs that run decoder-only pairs: ours, mlx-lm and transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from programs import ASSISTED, AUTO, CAUSAL, MLX_LM, MLX_LM_SPECULATIVE, PLAIN
from programs.checkpoints import silence_transformers
from programs.serving import CannotRun, GenerateAll, ids_of, torch_device, versions

Loaded = tuple[GenerateAll, dict[str, Any]]


def load_causal(name: str, spec: dict[str, Any]) -> Loaded:
    """Return a program for the pair in `place`/target and `place`/draft, and what to say of it."""
    if name not in CAUSAL:
        raise CannotRun("it does not run decoder-only models")
    place = Path(spec["place"])
    if name in (MLX_LM, MLX_LM_SPECULATIVE):
        return load_mlx_lm(place, spec, drafts=name == MLX_LM_SPECULATIVE)
    if name in ("transformers", ASSISTED):
        return load_causal_transformers(place, spec, assisted=name == ASSISTED)
    return load_our_pair(name, place, spec)


def load_our_pair(name: str, place: Path, spec: dict[str, Any]) -> Loaded:
    from speculative_t5 import SpeculativeDecoder
    from speculative_t5.libraries import num_threads

    draft = None if name == PLAIN else place / "draft"
    length = "auto" if name == AUTO else spec["num_draft"]
    decoder = SpeculativeDecoder.from_pretrained(place / "target", draft, num_draft=length)

    def generate_all(prompts: list[list[int]], max_tokens: int, batch_size: int) -> list[list[int]]:
        done = decoder.generate_batch(prompts, max_tokens=max_tokens, batch_size=batch_size)
        return [ids_of(output, decoder) for output in done]

    about = {
        "versions": versions("speculative_t5", "mlx"),
        "device": spec["backend"],
        "dtype": spec["dtype"],
        "threads": num_threads(),
    }
    return generate_all, about


def load_mlx_lm(place: Path, spec: dict[str, Any], *, drafts: bool) -> Loaded:
    """Return mlx-lm, with the BLAS of this package: MLX's own is many times slower on Linux.

    Of many prompts it decodes batches if it does not draft.
    """
    from speculative_t5 import load

    import mlx.core as mx
    from mlx_lm.generate import BatchGenerator, generate_step, speculative_generate_step

    loaded: Any = load(place / "target", dtype=spec["dtype"])[0]
    model, ends = loaded.model, loaded.info.eos_token_ids
    small = load(place / "draft", dtype=spec["dtype"])[0] if drafts else None

    def alone(ids: list[int], max_tokens: int) -> list[int]:
        prompt = mx.array(ids)
        steps: Any
        if small is None:
            steps = generate_step(prompt, model, max_tokens=max_tokens)
        else:
            steps = speculative_generate_step(
                prompt,
                model,
                small.model,
                num_draft_tokens=spec["num_draft"],
                max_tokens=max_tokens,
            )
        return up_to_end((int(step[0]) for step in steps), ends)

    def together(prompts: list[list[int]], max_tokens: int, batch_size: int) -> list[list[int]]:
        stops = [[end] for end in ends]
        sizes = {"completion_batch_size": batch_size, "prefill_batch_size": min(batch_size, 8)}
        generator = BatchGenerator(model, stop_tokens=stops, **sizes)
        ids = generator.insert(prompts, [max_tokens] * len(prompts))
        found: dict[int, list[int]] = {each: [] for each in ids}
        while responses := generator.next_generated():
            for response in responses:
                found[response.uid].append(int(response.token))
        generator.close()
        return [up_to_end(found[each], ends) for each in ids]

    def generate_all(prompts: list[list[int]], max_tokens: int, batch_size: int) -> list[list[int]]:
        if batch_size == 1:
            return [alone(ids, max_tokens) for ids in prompts]
        if small is not None:
            raise CannotRun("it drafts for one prompt at a time")
        return together(prompts, max_tokens, batch_size)

    about = {"versions": versions("mlx-lm", "mlx"), "device": spec["backend"]}
    return generate_all, about | {"dtype": spec["dtype"], "note": "BLAS of speculative_t5"}


def up_to_end(tokens: Any, ends: Any) -> list[int]:
    """Return the tokens up to the first that ends an output."""
    output = []
    for token in tokens:
        output.append(token)
        if token in ends:
            break
    return output


def load_causal_transformers(place: Path, spec: dict[str, Any], *, assisted: bool) -> Loaded:
    """Return transformers, one prompt at a time, perhaps with a constant number drafted."""
    import torch
    from transformers import AutoModelForCausalLM

    silence_transformers()
    device = torch_device(spec["backend"])

    def load(folder: str) -> Any:
        dtype = getattr(torch, spec["dtype"])
        model = AutoModelForCausalLM.from_pretrained(place / folder, dtype=dtype)
        return model.eval().to(device)

    model, options = load("target"), {}
    if assisted:
        options["assistant_model"] = draft = load("draft")
        draft.generation_config.num_assistant_tokens = spec["num_draft"]
        draft.generation_config.num_assistant_tokens_schedule = "constant"
        draft.generation_config.assistant_confidence_threshold = 0.0

    @torch.inference_mode()
    def generate_all(prompts: list[list[int]], max_tokens: int, batch_size: int) -> list[list[int]]:
        if batch_size > 1:
            raise CannotRun("it is measured with one prompt at a time")
        outputs = []
        for ids in prompts:
            source = torch.tensor([ids], device=device)
            found = model.generate(
                source,
                attention_mask=torch.ones_like(source),
                max_new_tokens=max_tokens,
                do_sample=False,
                pad_token_id=model.config.eos_token_id,
                **options,
            )
            outputs.append(found[0, len(ids) :].tolist())
        return outputs

    about = {"versions": versions("transformers", "torch"), "device": model.device.type}
    return generate_all, about | {"dtype": spec["dtype"], "threads": torch.get_num_threads()}


def windows_of(ids: Sequence[int], count: int, length: int) -> list[list[int]]:
    """Return as many prompts of a length from a text, as far from each other as it allows."""
    if len(ids) < count * length:
        raise ValueError(f"the text has {len(ids)} tokens, expected {count * length}: ask for less")
    step = len(ids) // count
    return [[*ids[step * i : step * i + length]] for i in range(count)]
