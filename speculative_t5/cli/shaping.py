"""The options about what outputs may contain, where they stop, and how many there are."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

import typer

from ..checkpoints import read_task
from ..decoding import EarlyStopping
from ..errors import check_utf8
from ..generation import GenerationOptions
from .options import DecoderOptions, SamplingOptions, in_models, in_output
from .terminal import note, one_line

in_shaping, in_beams = (
    partial(typer.Option, rich_help_panel=panel) for panel in ("Constraints", "Beam search")
)


# For `with_groups`: what needs finished outputs is not shown by commands that refuse it.
UNSHOWN: dict[str, dict[str, Any]] = {
    name: {"hidden": True} for name in ("scores", "num_beams", "length_penalty", "early_stopping")
}


@dataclass(frozen=True)
class ShapingOptions:
    """Options that change the target's distribution, stops, several outputs and scores."""

    repetition_penalty: Annotated[
        float,
        in_shaping(help="Above 1, tokens that the output already has become less probable."),
    ] = 1.0
    no_repeat_ngram_size: Annotated[
        int, in_shaping(help="Let no sequence of N tokens occur twice; 0 is off.")
    ] = 0
    min_tokens: Annotated[
        int, in_shaping(help="Let no output end before it has this many tokens.")
    ] = 0
    suppress_tokens: Annotated[
        str | None,
        in_shaping(help="Ids that no output may contain, separated by commas.", show_default=False),
    ] = None
    bad_words: Annotated[
        list[str] | None,
        in_shaping(
            help="Text that no output may contain, as the ids that the tokenizer gives it; may be "
            "repeated.",
            show_default=False,
        ),
    ] = None
    logit_bias: Annotated[
        list[str] | None,
        in_shaping(
            metavar="ID=BIAS",
            help="Bias to add to the logit of an id; -inf forbids it; may be repeated.",
            show_default=False,
        ),
    ] = None
    forced_tokens: Annotated[
        str | None,
        in_shaping(
            help="Ids that every output begins with, separated by commas.", show_default=False
        ),
    ] = None
    stop: Annotated[
        list[str] | None,
        in_output(help="End the output before this text; may be repeated.", show_default=False),
    ] = None
    stop_token_ids: Annotated[
        str | None,
        in_output(help="Ids that end an output, separated by commas.", show_default=False),
    ] = None
    num_return_sequences: Annotated[
        int,
        in_output(
            "--num-return-sequences",
            "-n",
            help="Outputs for each prompt; greedy decoding has only one.",
        ),
    ] = 1
    scores: Annotated[
        bool,
        in_output("--scores", help="Also give the logarithm of each output's probability."),
    ] = False

    task: Annotated[
        str | None,
        in_models(
            help="Use the options that the checkpoint has for a task, such as summarization; or "
            "default, for those that it has for all tasks. Options given here win.",
            show_default=False,
        ),
    ] = None
    num_beams: Annotated[
        int, in_beams(help="Width of a beam search, which uses no draft; 1 is no search.")
    ] = 1
    length_penalty: Annotated[
        float, in_beams(help="Above 0 a search prefers long outputs, below 0 short ones.")
    ] = 1.0
    early_stopping: Annotated[
        str,
        in_beams(
            help="When to end a search that has as many outputs as beams: on (at once), off (when "
            "a better one is unlikely) or never (when none can be better)."
        ),
    ] = "off"

    def keywords(self) -> dict[str, Any]:
        """Return keywords for `SpeculativeDecoder.generate`; refuse what cannot be parsed."""
        for name in ("bad_words", "stop"):
            for text in getattr(self, name) or []:
                check_utf8("--" + name.replace("_", "-"), text)
        return {
            "repetition_penalty": self.repetition_penalty,
            "no_repeat_ngram_size": self.no_repeat_ngram_size,
            "min_tokens": self.min_tokens,
            "suppress_tokens": _ids("suppress_tokens", self.suppress_tokens),
            "bad_words": tuple(self.bad_words or ()),
            "logit_bias": dict(map(_bias, self.logit_bias or [])),
            "forced_tokens": _ids("forced_tokens", self.forced_tokens),
            "stop": tuple(self.stop or ()),
            "stop_token_ids": _ids("stop_token_ids", self.stop_token_ids),
            "num_return_sequences": self.num_return_sequences,
            "scores": self.scores,
            "num_beams": self.num_beams,
            "length_penalty": self.length_penalty,
            "early_stopping": _early_stopping(self.early_stopping),
        }


@dataclass(frozen=True)
class Chosen:
    """The options of a run, those of its task included.

    Attributes:
        models: Which models, and how to read prompts.
        keywords: For `SpeculativeDecoder.generate`.
    """

    models: DecoderOptions
    keywords: dict[str, Any]


def choose(
    ctx: typer.Context, options: DecoderOptions, sampling: SamplingOptions, shaping: ShapingOptions
) -> Chosen:
    """Return the options of a run, checked; say which of them come from the checkpoint's task."""
    keywords = vars(sampling) | shaping.keywords()
    if shaping.task is not None:
        task = read_task(options.model, shaping.task)
        taken = {name: v for name, v in task.options.items() if not is_given(ctx, name)}
        keywords |= taken
        if task.prefix is not None and options.prefix is None:
            options = replace(options, prefix=task.prefix)
            taken["prefix"] = task.prefix
        shown = ", ".join(f"{name} {value!r}" for name, value in taken.items())
        note(f"task {shaping.task}: {one_line(shown) or 'no options'}")
    GenerationOptions(**keywords)
    return Chosen(options, keywords)


def is_given(ctx: typer.Context, name: str) -> bool:
    """Whether an option is on the command line."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def is_plain(chosen: Chosen, *, regular_decode: bool) -> bool:
    """Whether the target decodes alone, as a beam search does; refuse a draft for that."""
    num_beams = chosen.keywords["num_beams"]
    if num_beams == 1 or regular_decode:
        return regular_decode
    if chosen.models.draft_model is not None or chosen.models.lookup:
        raise ValueError(
            f"num_beams is {num_beams}, and a beam search does not go with a draft: leave "
            "out --draft-model and --lookup"
        )
    return True


def _early_stopping(text: str) -> EarlyStopping:
    """Parse when a beam search ends."""
    meanings: dict[str, EarlyStopping] = {"on": True, "off": False, "never": "never"}
    if text not in meanings:
        raise ValueError(f"early_stopping must be on, off or never, got {text!r}")
    return meanings[text]


def _ids(name: str, text: str | None) -> tuple[int, ...]:
    """Parse ids separated by commas."""
    try:
        return tuple(int(part) for part in (text or "").split(",") if text)
    except ValueError:
        raise ValueError(f"{name} must be ids separated by commas, got {text!r}") from None


def _bias(text: str) -> tuple[int, float]:
    """Parse an id and its bias."""
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise ValueError(f"logit_bias must be ID=BIAS, such as 17=-2.5, got {text!r}") from None
