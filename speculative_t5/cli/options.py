"""The options that several commands share, in groups, and the decoder that they describe.

What an option does, its default and its range stand in one place, at its field of a dataclass (see
`errors.option`). Here is what only a command line has: the forms in which values are typed, short
names, and completion.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import Field, dataclass, fields, is_dataclass, replace
from functools import partial, wraps
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import mlx.core as mx
import typer

from ..checkpoints import DTYPES, ModelFolder, model_folders, named_draft, read_task
from ..decoding import EarlyStopping
from ..errors import check_utf8
from ..generation import (
    DraftingOptions,
    GenerationOptions,
    NumDraft,
    SpeculativeDecoder,
    process_facts,
)
from .terminal import note, one_line

DEFAULT_MODEL = "correct-base"
PANELS = ("Models", "Drafting", "Sampling", "Output", "Constraints", "Beam search")  # of --help
in_models, in_drafting, in_output = (
    partial(typer.Option, rich_help_panel=panel) for panel in ("Models", "Drafting", "Output")
)
# For `with_groups`: what needs finished outputs is not shown by commands that refuse it.
UNSHOWN: dict[str, dict[str, Any]] = {
    name: {"hidden": True} for name in ("scores", "num_beams", "length_penalty", "early_stopping")
}


def complete_model(incomplete: str) -> Iterator[str]:
    """Yield the values of --model, for a shell that completes it."""
    return (f.name for f in _starting(incomplete) if ModelFolder(f).kind != "t5-draft")


def complete_draft(incomplete: str) -> Iterator[str]:
    """Yield the values of --draft-model."""
    yield from (folder.name for folder in _starting(incomplete))
    if "lookup".startswith(incomplete):
        yield "lookup"


def _starting(incomplete: str) -> list[Path]:
    return [folder for folder in model_folders() if folder.name.startswith(incomplete)]


def complete_rule(incomplete: str) -> Iterator[str]:
    """Yield the values of --verify."""
    return (rule for rule in ("auto", "token", "block") if rule.startswith(incomplete))


def complete_dtype(incomplete: str) -> Iterator[str]:
    """Yield the values of --dtype."""
    return (name for name in DTYPES if name.startswith(incomplete))


Model = Annotated[
    str,
    in_models(
        help="Target: a folder, or the name of a model on this machine or on the Hugging Face Hub.",
        autocompletion=complete_model,
    ),
]
DraftModel = Annotated[
    str | None,
    in_models(
        help="Draft: a folder or a name, with the target's tokenizer; or lookup, which needs no "
        "model and copies from the prompt and the output.",
        show_default="the draft named in the target's config.json, if any",
        autocompletion=complete_draft,
    ),
]
Prefix = Annotated[
    str | None,
    in_models(
        help="Text to put before each prompt that lacks it, for example 'summarize: '.",
        show_default="the prefix named in the model's config.json, if any",
    ),
]
MaxSource = Annotated[
    int | None,
    in_models(
        "--max-source-length",
        "--max-source",
        help="Longest prompt in tokens; a longer one is an error, unless --truncate cuts it.",
        show_default="the length in the model's config.json, else 512 for a T5",
    ),
]
Truncate = Annotated[
    bool,
    in_models(
        "--truncate",
        help="Cut prompts that are too long: a T5's at the end, a decoder-only model's at the "
        "beginning, to leave room for --max-tokens.",
    ),
]
Dtype = Annotated[
    str | None,
    in_models(
        help="Type to compute in: float32, float16 or bfloat16.",
        show_default="float32 on a CPU, bfloat16 elsewhere",
        autocompletion=complete_dtype,
    ),
]
RegularDecode = Annotated[
    bool,
    in_drafting("--regular-decode", help="Plain decoding: use the target alone, without drafts."),
]
Task = Annotated[
    str | None,
    in_models(
        help="Use the options that the checkpoint has for a task, such as summarization; or "
        "default, for those that it has for all tasks. Options given here win.",
        show_default=False,
    ),
]
# The keywords of `GenerationOptions` that are on the command line, not checked yet.
Keywords = Annotated[dict[str, Any], GenerationOptions]


@dataclass(frozen=True)
class DecoderOptions:
    """Which models to load, how to read prompts, and how to draft and verify."""

    model: Model = DEFAULT_MODEL
    draft_model: DraftModel = None
    chat: Annotated[
        bool, in_models("--chat", help="Apply the model's chat template to each prompt.")
    ] = False
    prefix: Prefix = None
    max_source_length: MaxSource = None
    truncate: Truncate = False
    dtype: Dtype = None
    drafting: DraftingOptions = DraftingOptions()

    def load(
        self, *, plain: bool = False, group: mx.distributed.Group | None = None
    ) -> SpeculativeDecoder:
        """Load the models and make a decoder; a plain one has no draft.

        The processes of a group share the target.
        """
        check_utf8("--prefix", self.prefix or "")
        draft = None if plain else draft_of(self.model, self.draft_model)
        lookup = self.drafting.lookup and not plain
        return SpeculativeDecoder.from_pretrained(
            self.model, draft, dtype=self.dtype, group=group, **self._keywords(lookup)
        )

    def facts(self) -> dict[str, str]:
        """Return the facts that must be the same in all processes that do a job together."""
        draft = draft_of(self.model, self.draft_model)
        return process_facts(self.model, draft, dtype=self.dtype)

    def remake(self, first: SpeculativeDecoder) -> SpeculativeDecoder:
        """Make another decoder with the models of one that `load` has made."""
        lookup = self.drafting.lookup or self.draft_model == "lookup"
        return SpeculativeDecoder(
            first.model, first.draft, first.tokenizer, **self._keywords(lookup)
        )

    def _keywords(self, lookup: bool) -> dict[str, Any]:
        names = ("chat", "prefix", "max_source_length", "truncate")
        return {**vars(self.drafting), "lookup": lookup} | {n: getattr(self, n) for n in names}


def choose(
    ctx: typer.Context, options: DecoderOptions, keywords: dict[str, Any], task: str | None
) -> tuple[DecoderOptions, dict[str, Any]]:
    """Return the options of a run, checked; say which of them come from the checkpoint's task."""
    if task is not None:
        found = read_task(options.model, task)
        taken = {name: v for name, v in found.options.items() if not is_given(ctx, name)}
        keywords = keywords | taken
        if found.prefix is not None and options.prefix is None:
            options = replace(options, prefix=found.prefix)
            taken["prefix"] = found.prefix
        shown = ", ".join(f"{name} {value!r}" for name, value in taken.items())
        note(f"task {task}: {one_line(shown) or 'no options'}")
    GenerationOptions(**keywords)
    return options, keywords


def is_given(ctx: typer.Context, name: str) -> bool:
    """Whether an option is on the command line."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def is_plain(options: DecoderOptions, num_beams: int, *, regular_decode: bool) -> bool:
    """Whether the target decodes alone, as a beam search does; refuse a draft for that."""
    if num_beams == 1 or regular_decode:
        return regular_decode
    if options.draft_model is not None or options.drafting.lookup:
        raise ValueError(
            f"num_beams is {num_beams}, and a beam search does not go with a draft: leave "
            "out --draft-model and --lookup"
        )
    return True


def with_groups(
    command: Callable[..., None] | None = None,
    *,
    changes: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> Callable[..., Any]:
    """Let a command take groups of options; typer sees an option for each field of a group.

    A group is a parameter whose type is a dataclass; one that is `Annotated` with a dataclass gets
    the values as a dict. `changes` overrides, by option name, what a group says about an option,
    such as its help.
    """
    if command is None:
        return partial(with_groups, changes=changes)
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, tuple[Any, bool]] = {}  # the dataclass, and whether to make one
    parameters: list[inspect.Parameter] = []
    for name, given in signature.parameters.items():
        first, *more = (*get_args(given.annotation), None)
        group = more[0] if first == dict[str, Any] else given.annotation
        if is_dataclass(group):
            groups[name] = group, group is given.annotation
            parameters += _parameters(group, changes)
        else:
            parameters.append(given.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    if unknown := changes.keys() - {each.name for each in parameters}:
        raise TypeError(f"{command.__name__} has no options {unknown} to change")

    @wraps(command)
    def call(**values: Any) -> None:
        for name, (group, is_made) in groups.items():
            keywords = _taken(group, values)
            values[name] = group(**keywords) if is_made else keywords
        command(**values)

    call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {each.name: each.annotation for each in parameters}
    return call


def _parameters(
    group: Any, changes: Mapping[str, Mapping[str, Any]]
) -> Iterator[inspect.Parameter]:
    """Yield the options of a group, in the order of their panels."""
    hints = get_type_hints(group, include_extras=True)

    def panel(each: Field[Any]) -> int:
        return PANELS.index(each.metadata["panel"]) if each.metadata.get("panel") else 0

    for each in sorted(fields(group), key=panel):
        hint, default = hints[each.name], each.default
        if is_dataclass(hint):
            yield from _parameters(hint, changes)
            continue
        if each.name in FORMS:
            hint, default, _ = FORMS[each.name]
        if each.metadata:
            hint = Annotated[str if get_origin(hint) is Literal else hint, described(each)]
        elif get_origin(hint) is not Annotated:
            continue  # it is not for the command line
        kind, option = get_args(hint)
        option = copy(option)
        vars(option).update(changes.get(each.name, {}))
        yield inspect.Parameter(
            each.name, inspect.Parameter.KEYWORD_ONLY, default=default,
            annotation=Annotated[kind, option],
        )  # fmt: skip


def described(each: Field[Any]) -> Any:
    """Return the option that a field describes, see `errors.option`."""
    about = each.metadata
    names, looks = LOOKS.get(each.name, ((), {}))
    if isinstance(each.default, bool) and each.name not in FORMS:
        names = (f"--{each.name.replace('_', '-')}",)  # without its opposite
    shown = True if about["shown"] is None else about["shown"]
    return typer.Option(
        *names, help=about["help"], show_default=shown, rich_help_panel=about["panel"], **looks
    )


def _taken(group: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Take a group's values out of those of the command line, and give them Python's forms."""
    hints, found = get_type_hints(group), {}
    for each in fields(group):
        if is_dataclass(hints[each.name]):
            found[each.name] = hints[each.name](**_taken(hints[each.name], values))
        elif each.name in values:
            value = values.pop(each.name)
            parse = FORMS[each.name][2] if each.name in FORMS else None
            found[each.name] = parse(each.name, value) if parse else value
    return found


def draft_of(model: str, draft_model: str | None) -> str | None:
    """Return the draft for a target: the one given, else the one that the target names."""
    if draft_model is None and (named := named_draft(model)):
        return str(named)
    return draft_model


def model_name(model: str) -> str:
    """Return the name of a model for people and clients, who need not see where it lies."""
    return Path(model).resolve().name if Path(model).is_dir() else model


def draft_length(name: str, text: str) -> NumDraft:
    """Parse a number of tokens to draft, or "auto"; refuse anything else."""
    if text == "auto":
        return "auto"
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} must be an integer of at least 1 or auto, got {text!r}") from None


def _early_stopping(name: str, text: str) -> EarlyStopping:
    """Parse when a beam search ends."""
    meanings: dict[str, EarlyStopping] = {"on": True, "off": False, "never": "never"}
    if text not in meanings:
        raise ValueError(f"{name} must be on, off or never, got {text!r}")
    return meanings[text]


def _ids(name: str, text: str | None) -> tuple[int, ...]:
    """Parse ids separated by commas."""
    try:
        return tuple(int(part) for part in (text or "").split(",") if text)
    except ValueError:
        raise ValueError(f"{name} must be ids separated by commas, got {text!r}") from None


def _texts(name: str, texts: list[str] | None) -> tuple[str, ...]:
    for text in texts or []:
        check_utf8("--" + name.replace("_", "-"), text)
    return tuple(texts or ())


def _biases(name: str, texts: list[str] | None) -> dict[int, float]:
    """Parse ids with their biases."""
    biases = {}
    for text in texts or []:
        token, _, bias = text.partition("=")
        try:
            biases[int(token)] = float(bias)
        except ValueError:
            raise ValueError(f"{name} must be ID=BIAS, such as 17=-2.5, got {text!r}") from None
    return biases


# Options whose values are typed in another form than Python's: type, default and parser.
FORMS: dict[str, tuple[Any, Any, Callable[[str, Any], Any]]] = {
    "num_draft": (str, str(DraftingOptions.num_draft), draft_length),
    "suppress_tokens": (str | None, None, _ids),
    "bad_words": (list[str] | None, None, _texts),
    "logit_bias": (list[str] | None, None, _biases),
    "forced_tokens": (str | None, None, _ids),
    "stop": (list[str] | None, None, _texts),
    "stop_token_ids": (str | None, None, _ids),
    "early_stopping": (str, "off", _early_stopping),
}
# Names besides their own, and what else --help or a shell needs.
LOOKS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "verify": ((), {"autocompletion": complete_rule}),
    "logit_bias": ((), {"metavar": "ID=BIAS"}),
    "num_return_sequences": (("--num-return-sequences", "-n"), {}),
}
DraftVocab = Annotated[
    int | None, described(next(f for f in fields(DraftingOptions) if f.name == "draft_vocab"))
]
