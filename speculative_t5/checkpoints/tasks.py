"""Options of generation that a checkpoint comes with, for its tasks or for all prompts."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import printable, shown
from ..models import is_decoder_only
from .loading import locate

TASK_PARAMS = "task_specific_params"  # of a config.json
DEFAULT_TASK = "default"  # the task that stands for generation_config.json alone
SAME_OPTIONS = (
    "num_beams",
    "length_penalty",
    "early_stopping",
    "no_repeat_ngram_size",
    "top_k",
    "top_p",
    "repetition_penalty",
    "suppress_tokens",
    "begin_suppress_tokens",
    "decoder_start_token_id",
    "num_return_sequences",
)
RENAMED_OPTIONS = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "bad_words_ids": "bad_words",
    "stop_strings": "stop",
}
OTHER_SETTINGS = (
    "max_length",
    "min_length",
    "do_sample",
    "temperature",
    "forced_bos_token_id",
)
START_ID = "decoder_start_token_id"
OTHER_IDS = ("eos_token_id", "pad_token_id")
# These change outputs in ways that are not offered here, unless they have such a value.
HARMLESS_VALUES: dict[str, tuple[Any, ...]] = {
    "num_beam_groups": (1,),
    "diversity_penalty": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "exponential_decay_length_penalty": (),
    "min_p": (0,),
    "forced_eos_token_id": (),
    "typical_p": (1,),
    "penalty_alpha": (0,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "constraints": (),
    "guidance_scale": (1,),
    "sequence_bias": (),
    "force_words_ids": (),
    "top_h": (),
    "forced_decoder_ids": (),
    "renormalize_logits": (),
    "dola_layers": (),
    "watermarking_config": (),
}
KNOWN_SETTINGS = (*SAME_OPTIONS, *RENAMED_OPTIONS, *OTHER_SETTINGS, *HARMLESS_VALUES)


@dataclass(frozen=True)
class TaskSettings:
    """What a checkpoint says about a task."""

    prefix: str | None  # to put before each prompt
    options: dict[str, Any]  # keywords for `SpeculativeDecoder.generate`
    # The ids of OTHER_IDS that generation_config.json has and config.json has not, or not the same;
    # they hold for all outputs of the model.
    ids: dict[str, Any] = field(default_factory=dict)


def read_task(name_or_path: str | Path, task: str = DEFAULT_TASK) -> TaskSettings:
    """Read the options for a task from a model's generation_config.json and config.json.

    Those in `task_specific_params` override those of generation_config.json, as in transformers;
    the task "default" stands for the latter alone. Lengths that transformers counts with the start
    token are one less here.

    Raises:
        ValueError: If there is no such model or task, or it asks for an option that is not offered.
        OSError: If a file cannot be read.
    """
    folder = locate(name_or_path)
    config, raw = folder.config, folder.generation_config
    known = config.get(TASK_PARAMS)
    tasks: Mapping[str, Any] = known if isinstance(known, dict) else {}
    if task != DEFAULT_TASK:
        if not isinstance(tasks.get(task), dict):
            names = ", ".join(map(printable, [*tasks, DEFAULT_TASK]))
            raise ValueError(
                f"{name_or_path} has no options for the task {task!r}: choose one of {names}"
            )
        raw = raw | tasks[task]
    prefix = raw.get("prefix")
    if is_decoder_only(config):  # lengths would include the prompt
        raw = {key: value for key, value in raw.items() if key not in ("max_length", "min_length")}
    same = {name for name in (*OTHER_IDS, START_ID) if raw.get(name) in (None, config.get(name))}
    raw = {name: value for name, value in raw.items() if name not in same}
    ids = {name: raw[name] for name in OTHER_IDS if name in raw}
    options = settings_as_options(
        raw, f"the task {task!r} asks for", "leave the task out, and give options one by one"
    )
    return TaskSettings(prefix if isinstance(prefix, str) else None, options, ids)


def settings_as_options(raw: Mapping[str, Any], asked: str, advice: str) -> dict[str, Any]:
    """Return keywords of `SpeculativeDecoder.generate` for settings by transformers' names.

    What is not offered is refused; `asked` and `advice` are parts of the message.
    """
    for name, harmless in HARMLESS_VALUES.items():
        value = raw.get(name)
        if value not in (None, False, [], {}, *harmless):
            raise ValueError(f"{asked} {name} {shown(value)}, which is not offered: {advice}")
    given = {name: value for name, value in raw.items() if value is not None}
    found = {name: given[name] for name in SAME_OPTIONS if name in given}
    found |= {ours: given[name] for name, ours in RENAMED_OPTIONS.items() if name in given}
    for name, ours in (("max_length", "max_tokens"), ("min_length", "min_tokens")):
        length = given.get(name)
        if type(length) is int and ours not in found:
            found[ours] = max(length - 1, 0)
    if (token := given.get("forced_bos_token_id")) is not None:
        found["forced_tokens"] = (token,)
    if given.get("do_sample"):
        found |= {"temperature": given.get("temperature", 1.0), "top_k": given.get("top_k", 50)}
    else:
        found.pop("top_k", None)
        found.pop("top_p", None)
    return found
