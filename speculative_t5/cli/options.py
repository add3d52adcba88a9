"""The options that several commands share, in groups, and the decoder that they describe.

What an option does, its default and its range stand in one place, at its field of a dataclass (see
`errors.option`). Here is what only a command line has: the forms in which values are typed, short
names, and completion.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, dataclass, fields, is_dataclass, replace
from functools import partial, wraps
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar, get_origin, get_type_hints

import mlx.core as mx
import typer

from ..checkpoints import DTYPES, ModelFolder, model_folders, named_draft, read_task
from ..decoding import EarlyStopping
from ..errors import check_utf8, option
from ..generation import (
    DraftingOptions,
    GenerationOptions,
    NumDraft,
    SpeculativeDecoder,
    process_facts,
)
from .terminal import note, one_line

Value = TypeVar("Value")

DEFAULT_MODEL = "correct-base"
# Of --help, in order; options without one come first.
PANELS = (None, "Models", "Drafting", "Sampling", "Output", "Constraints", "Beam search")
in_models, in_output = (
    partial(typer.Option, rich_help_panel=panel) for panel in ("Models", "Output")
)
of_models = partial(option, panel="Models")
# For `with_groups`: what needs finished outputs is not shown by commands that refuse it.
UNSHOWN: dict[str, dict[str, Any]] = {
    name: {"hidden": True} for name in ("scores", "num_beams", "length_penalty", "early_stopping")
}


# For a shell that completes values; typer drops those that do not begin as what is typed.
def complete_model() -> Iterator[str]:
    """Yield the values of --model."""
    return (folder.name for folder in model_folders() if ModelFolder(folder).kind != "t5-draft")


def complete_draft() -> Iterator[str]:
    """Yield the values of --draft-model."""
    return chain((folder.name for folder in model_folders()), ["lookup"])


# The keywords of `GenerationOptions` that are on the command line, not checked yet.
Keywords = Annotated[dict[str, Any], GenerationOptions]


@dataclass(frozen=True, kw_only=True)
class DecoderOptions(DraftingOptions):
    """Which models to load, how to read prompts, and how to draft and verify."""

    model: str = of_models(
        DEFAULT_MODEL,
        "Target: a folder, or the name of a model on this machine or on the Hugging Face Hub.",
    )
    draft_model: str | None = of_models(
        None,
        "Draft: a folder or a name, with the target's tokenizer; or lookup, which needs no model "
        "and copies from the prompt and the output.",
        shown="the draft named in the target's config.json, if any",
    )
    chat: bool = of_models(False, "Apply the model's chat template to each prompt.")
    prefix: str | None = of_models(
        None,
        "Text to put before each prompt that lacks it, for example 'summarize: '.",
        shown="the prefix named in the model's config.json, if any",
    )
    max_source_length: int | None = of_models(
        None,
        "Longest prompt in tokens; a longer one is an error, unless --truncate cuts it.",
        shown="the length in the model's config.json, else 512 for a T5",
    )
    truncate: bool = of_models(
        False,
        "Cut prompts that are too long: a T5's at the end, a decoder-only model's at the "
        "beginning, to leave room for --max-tokens.",
    )
    dtype: str | None = of_models(
        None,
        "Type to compute in: float32, float16 or bfloat16.",
        shown="float32 on a CPU, bfloat16 elsewhere",
    )
    task: str | None = of_models(
        None,
        "Use the options that the checkpoint has for a task, such as summarization; or default, "
        "for those that it has for all tasks. Options given here win.",
    )
    regular_decode: bool = option(
        False, "Plain decoding: use the target alone, without drafts.", panel="Drafting"
    )

    def load(self, group: mx.distributed.Group | None = None) -> SpeculativeDecoder:
        """Load the models and make a decoder; the processes of a group share the target."""
        check_utf8("--prefix", self.prefix or "")
        draft = None if self.regular_decode else draft_of(self.model, self.draft_model)
        keywords = self.keywords | {"lookup": self.lookup and not self.regular_decode}
        return SpeculativeDecoder.from_pretrained(
            self.model, draft, dtype=self.dtype, group=group, **keywords
        )

    @property
    def keywords(self) -> dict[str, Any]:
        """Those for making a decoder of models that are loaded."""
        loading = ("model", "draft_model", "dtype", "task", "regular_decode")
        return {name: value for name, value in vars(self).items() if name not in loading}

    def facts(self) -> dict[str, str]:
        """Return the facts that must be the same in all processes that do a job together."""
        draft = draft_of(self.model, self.draft_model)
        return process_facts(self.model, draft, dtype=self.dtype)


def choose(
    ctx: typer.Context, options: DecoderOptions, keywords: dict[str, Any]
) -> tuple[DecoderOptions, dict[str, Any]]:
    """Return the options of a run, checked; say which of them come from the checkpoint's task.

    A beam search decodes plainly; a draft for it is refused.
    """
    if options.task is not None:
        found = read_task(options.model, options.task)
        taken = {name: v for name, v in found.options.items() if not is_given(ctx, name)}
        keywords = keywords | taken
        if found.prefix is not None and options.prefix is None:
            options = replace(options, prefix=found.prefix)
            taken["prefix"] = found.prefix
        shown = ", ".join(f"{name} {value!r}" for name, value in taken.items())
        note(f"task {options.task}: {one_line(shown) or 'no options'}")
    beams = GenerationOptions(**keywords).num_beams
    if beams > 1 and not options.regular_decode:
        if options.draft_model is not None or options.lookup:
            raise ValueError(
                f"num_beams is {beams}, and a beam search does not go with a draft: leave out "
                "--draft-model and --lookup"
            )
        options = replace(options, regular_decode=True)
    return options, keywords


def is_given(ctx: typer.Context, name: str) -> bool:
    """Whether an option is on the command line."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def with_groups(
    command: Callable[..., None] | None = None,
    *,
    changes: Mapping[str, Mapping[str, Any] | None] = MappingProxyType({}),
) -> Callable[..., Any]:
    """Let a command take groups of options; typer sees an option for each field of a group.

    A group is a parameter whose type is a dataclass; one that is `Annotated` with a dataclass gets
    the values as a dict. `changes` overrides, by option name, what a group says about an option,
    such as its help; with None the command does not have the option.
    """
    if command is None:
        return partial(with_groups, changes=changes)
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, Any] = {}
    parameters: list[inspect.Parameter] = []
    for name, given in signature.parameters.items():
        group = getattr(given.annotation, "__metadata__", [given.annotation])[0]
        if is_dataclass(group):
            groups[name] = group
            parameters += _parameters(group, changes)
        else:
            parameters.append(given.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @wraps(command)
    def call(**values: Any) -> None:
        for name, group in groups.items():
            keywords = _taken(group, values)
            is_made = signature.parameters[name].annotation is group
            values[name] = group(**keywords) if is_made else keywords
        command(**values)

    call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {each.name: each.annotation for each in parameters}
    return call


def _parameters(
    group: Any, changes: Mapping[str, Mapping[str, Any] | None]
) -> Iterator[inspect.Parameter]:
    """Yield the options of a group, in the order of their panels."""
    hints = get_type_hints(group)
    # Fields without words for --help are for Python alone.
    told = [f for f in fields(group) if f.metadata and changes.get(f.name, {}) is not None]
    for each in sorted(told, key=lambda each: PANELS.index(each.metadata["panel"])):
        hint, default = hints[each.name], each.default
        if each.name in FORMS:
            hint, default, _ = FORMS[each.name]
        kind = str if get_origin(hint) is Literal else hint
        hint = Annotated[kind, described(each, **(changes.get(each.name) or {}))]
        keyword = inspect.Parameter.KEYWORD_ONLY
        yield inspect.Parameter(each.name, keyword, default=default, annotation=hint)


def described(each: Field[Any], **changes: Any) -> Any:
    """Return the option that a field describes, see `errors.option`."""
    about = each.metadata
    names = NAMES.get(each.name, (f"--{each.name.replace('_', '-')}",))
    looks = {
        "help": about["help"],
        "rich_help_panel": about["panel"],
        "show_default": True if about["shown"] is None else about["shown"],
    }
    return typer.Option(*names, **(looks | LOOKS.get(each.name, {}) | changes))


def _taken(group: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Take a group's values out of those of the command line, and give them Python's forms."""
    found = {each.name: values.pop(each.name) for each in fields(group) if each.name in values}
    for name in FORMS.keys() & found.keys():
        found[name] = FORMS[name][2](name, found[name])
    return found


def draft_of(model: str, draft_model: str | None) -> str | None:
    """Return the draft for a target: the one given, else the one that the target names."""
    if draft_model is None and (named := named_draft(model)):
        return str(named)
    return draft_model


def model_name(model: str) -> str:
    """Return the name of a model for people and clients, who need not see where it lies."""
    return Path(model).resolve().name if Path(model).is_dir() else model


def parsed(name: str, text: str, parse: Callable[[str], Value], expected: str) -> Value:
    """Parse the value of an option; say what was expected if it is none."""
    try:
        return parse(text)
    except (ValueError, KeyError):
        raise ValueError(f"{name} must be {expected}, got {text!r}") from None


def draft_length(name: str, text: str) -> NumDraft:
    """Parse a number of tokens to draft, or "auto"."""
    if text == "auto":
        return "auto"
    return parsed(name, text, int, "an integer of at least 1 or auto")


def _early_stopping(name: str, text: str) -> EarlyStopping:
    meanings: dict[str, EarlyStopping] = {"on": True, "off": False, "never": "never"}
    return parsed(name, text, meanings.__getitem__, "on, off or never")


def _ids(name: str, text: str | None) -> tuple[int, ...]:
    def ids(text: str) -> tuple[int, ...]:
        return tuple(map(int, text.split(",")))

    return parsed(name, text, ids, "ids separated by commas") if text else ()


def _texts(name: str, texts: list[str] | None) -> tuple[str, ...]:
    for text in texts or []:
        check_utf8("--" + name.replace("_", "-"), text)
    return tuple(texts or ())


def _biases(name: str, texts: list[str] | None) -> dict[int, float]:
    def pair(text: str) -> tuple[int, float]:
        token, _, bias = text.partition("=")
        return int(token), float(bias)

    return dict(parsed(name, text, pair, "ID=BIAS, such as 17=-2.5") for text in texts or [])


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
# What else --help or a shell needs.
LOOKS: dict[str, dict[str, Any]] = {
    "model": {"autocompletion": complete_model},
    "draft_model": {"autocompletion": complete_draft},
    "dtype": {"autocompletion": lambda: DTYPES},
    "verify": {"autocompletion": lambda: ("auto", "token", "block")},
    "logit_bias": {"metavar": "ID=BIAS"},
}
NAMES = {
    "max_source_length": ("--max-source-length", "--max-source"),
    "num_return_sequences": ("--num-return-sequences", "-n"),
    "keep_wo": ("--keep-wo/--no-keep-wo",),
}
FIELDS = {each.name: each for each in fields(DecoderOptions)}
# For commands that take some of the options of a decoder.
Model = Annotated[str, described(FIELDS["model"])]
DraftModel = Annotated[str | None, described(FIELDS["draft_model"])]
Prefix = Annotated[str | None, described(FIELDS["prefix"])]
MaxSource = Annotated[int | None, described(FIELDS["max_source_length"])]
Truncate = Annotated[bool, described(FIELDS["truncate"])]
Dtype = Annotated[str | None, described(FIELDS["dtype"])]
DraftVocab = Annotated[int | None, described(FIELDS["draft_vocab"])]
