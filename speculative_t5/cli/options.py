"""The options that several commands share, in groups, and the decoder that they describe.

What an option does, its default and its range stand in one place, at its field of a dataclass (see
`options.option`). Here is what only a command line has: the forms in which values are typed, short
names, and completion.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from functools import partial, wraps
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import mlx.core as mx
import typer

from ..checkpoints import (
    DTYPES,
    ModelFolder,
    find_folder,
    model_folders,
    model_name,
    named_draft,
    read_task,
)
from ..decoding import EarlyStopping
from ..errors import check_utf8
from ..generation import (
    DecodingOptions,
    DraftingOptions,
    GenerationOptions,
    NumDraft,
    SpeculativeDecoder,
    VerifyRule,
    Words,
)
from ..options import OptionError, option, option_error
from .terminal import note, one_line

Value = TypeVar("Value")

DEFAULT_MODEL = "correct-base"
ON_OFF = {"on": True, "off": False}
# Of --help, in order; options without one come first.
PANELS_IN_ORDER = (
    None,
    "Server",
    "Models",
    "Prompts",
    "Drafting",
    "Sampling",
    "Output",
    "Constraints",
    "Beam search",
)
model_option, output_option, server_option = (
    partial(option, panel=panel) for panel in ("Models", "Output", "Server")
)
# For `with_options`: what needs finished outputs is not shown by commands that refuse it.
HIDDEN_OPTIONS: dict[str, dict[str, Any]] = {
    name: {"hidden": True} for name in ("scores", "num_beams", "length_penalty", "early_stopping")
}


# For a shell that completes values; typer drops those that do not begin as what is typed.
def complete_model() -> Iterator[str]:
    return (folder.name for folder in model_folders() if ModelFolder(folder).kind != "t5-draft")


def complete_draft() -> list[str]:
    return [*(folder.name for folder in model_folders()), "lookup"]


# The keywords of `GenerationOptions` that are on the command line, not checked yet.
Keywords = Annotated[dict[str, Any], GenerationOptions]


@dataclass(frozen=True, kw_only=True)
class DecoderOptions(DecodingOptions):
    """Which models to load, how to read prompts, and how to draft and verify."""

    model: str = model_option(
        DEFAULT_MODEL,
        "Target: a folder, or the name of a model on this machine or on the Hugging Face Hub.",
    )
    adapter: str | None = model_option(
        None,
        "LoRA adapter of PEFT to merge into the model: a folder or a name; alone, into the model "
        "that it names.",
    )
    draft_model: str | None = model_option(
        None,
        "Draft: a folder or a name, with the target's tokenizer; or lookup, which needs no model "
        "and copies from the prompt and the output.",
        shown="the draft named in the target's config.json, if any",
    )
    dtype: str | None = model_option(
        None,
        "Type of weights and arithmetic: float32, float16 or bfloat16. On a CPU where the C parts "
        "were built, of weights alone: arithmetic is float32.",
        shown="as stored on such a CPU, float32 on others; elsewhere bfloat16, or float16 for a T5 "
        "v1.0 stored so",
    )
    task: str | None = model_option(
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
        keywords = self.keywords | {"lookup": self.lookup and not self.regular_decode}
        return SpeculativeDecoder.from_pretrained(
            self.model, self.draft, adapter=self.adapter, dtype=self.dtype, group=group, **keywords
        )

    @property
    def corrects(self) -> bool:
        """Whether the model's folder says that it corrects, as far as is known before loading."""
        folder = find_folder(self.model)
        with suppress(ValueError, OSError):  # loading says what is wrong with a folder
            return bool(folder and ModelFolder(folder).corrects)
        return False

    @property
    def name(self) -> str:
        """The name of the model for people and clients, who need not see where it lies."""
        return model_name(self.adapter or self.model)

    @property
    def draft(self) -> str | None:
        """The draft that is meant; one that the model names does not fit it with an adapter."""
        named = self.draft_model if self.adapter else draft_of(self.model, self.draft_model)
        return None if self.regular_decode else named

    @property
    def keywords(self) -> dict[str, Any]:
        """Those for making a decoder of models that are loaded."""
        return {each.name: getattr(self, each.name) for each in fields(DecodingOptions)}


def choose(
    ctx: typer.Context, options: DecoderOptions, keywords: dict[str, Any]
) -> tuple[DecoderOptions, dict[str, Any]]:
    """Return the options of a run, checked; say which of them come from the checkpoint's task.

    A beam search decodes plainly; a draft for it is refused.
    """
    options = with_base(ctx, options)
    if options.task is not None:
        found = read_task(options.model, options.task)
        taken = {name: v for name, v in found.options.items() if not is_given(ctx, name)}
        keywords = keywords | taken
        if found.prefix is not None and options.prefix is None and options.to is None:
            options = replace(options, prefix=found.prefix)
            taken["prefix"] = found.prefix
        shown = ", ".join(f"{name} {value!r}" for name, value in (taken | found.ids).items())
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


def with_base(ctx: typer.Context, options: DecoderOptions) -> DecoderOptions:
    """Let an adapter that is given alone stand for its model, too; see `checkpoints.locate`."""
    if options.adapter is None or is_given(ctx, "model"):
        return options
    return replace(options, model=options.adapter)


def is_given(ctx: typer.Context, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def with_options(
    command: Callable[..., None] | None = None,
    *,
    changes: Mapping[str, Mapping[str, Any] | None] = MappingProxyType({}),
) -> Callable[..., Any]:
    """Let a command take what `options.option` describes: groups, and single options as defaults.

    A group is a parameter whose type is a dataclass; typer sees an option for each field. One that
    is `Annotated` with a dataclass gets the values as a dict. `changes` overrides, by option name,
    what a group says about an option, such as its help; with None the command does not have it.
    """
    if command is None:
        return partial(with_options, changes=changes)
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, Any] = {}
    parameters: list[inspect.Parameter] = []
    for name, given in signature.parameters.items():
        group = getattr(given.annotation, "__metadata__", [given.annotation])[0]
        if is_dataclass(group):
            groups[name], hints = group, get_type_hints(group)
            # Fields without words for --help are for Python alone.
            told = [f for f in fields(group) if f.metadata.get("help")]
            told = [f for f in told if changes.get(f.name, {}) is not None]
            told.sort(key=lambda each: PANELS_IN_ORDER.index(each.metadata["panel"]))
            parameters += [_parameter(f.name, hints[f.name], f, changes) for f in told]
        elif isinstance(given.default, Field):
            parameters.append(_parameter(name, given.annotation, given.default, changes))
        else:
            parameters.append(given.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @wraps(command)
    def call(**values: Any) -> None:
        values = {each.name: each.default for each in parameters} | values
        try:
            call_with(values)
        except OptionError as error:
            raise ValueError(error.spelled(spell)) from error

    def spell(name: str) -> str:
        is_option = any(each.name == name for each in parameters)
        return flag(name) if is_option else IN_PYTHON.get(name, name)

    def call_with(values: dict[str, Any]) -> None:
        for name, group in groups.items():
            hints = get_type_hints(group)
            keywords = {each: values.pop(each) for each in hints if each in values}
            for each in keywords:
                if hints[each] in TYPED_FORMS:
                    keywords[each] = TYPED_FORMS[hints[each]][2](each, keywords[each])
            is_made = signature.parameters[name].annotation is group
            values[name] = group(**keywords) if is_made else keywords
        command(**values)

    call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {each.name: each.annotation for each in parameters}
    return call


def flag(name: str) -> str:
    """Return an option of the command line as one types it."""
    return SPELLINGS.get(name, (f"--{name.replace('_', '-')}",))[0].partition("/")[0]


def _parameter(
    name: str, hint: Any, each: Field[Any], changes: Mapping[str, Mapping[str, Any] | None]
) -> inspect.Parameter:
    """Return the parameter in which typer sees an option."""
    about, spelled = each.metadata, name.replace("_", "-")
    switch = f"--{spelled}/--no-{spelled}" if each.default is True else f"--{spelled}"
    looks: dict[str, Any] = {
        "help": about["help"],
        "rich_help_panel": about["panel"],
        "show_default": True if about["shown"] is None else about["shown"],
    }
    looks |= HELP_LOOKS.get(name, {}) | dict(changes.get(name) or {})
    hint = looks.pop("hint", hint)
    hint, default, _ = TYPED_FORMS.get(hint, (hint, each.default, None))
    kind = str if get_origin(hint) is Literal else hint
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if default is MISSING else default,
        annotation=Annotated[kind, typer.Option(*SPELLINGS.get(name, (switch,)), **looks)],
    )


def as_typed(error: Exception) -> str:
    """Return the message of an error, with options as one types them."""
    if not isinstance(error, OptionError):
        return str(error)
    known = {each.name for group in (DecoderOptions, GenerationOptions) for each in fields(group)}
    return error.spelled(lambda name: flag(name) if name in known else IN_PYTHON.get(name, name))


def draft_of(model: str, draft_model: str | None) -> str | None:
    """Return the draft for a target: the one given, else the one that the target names."""
    folder = find_folder(model)
    named = named_draft(ModelFolder(folder)) if draft_model is None and folder else None
    return str(named) if named else draft_model


def parsed(name: str, text: str, parse: Callable[[str], Value], expected: str) -> Value:
    """Parse the value of an option; say what was expected if it is none."""
    try:
        return parse(text)
    except (ValueError, KeyError):
        raise option_error(name, expected, text) from None


def draft_length(name: str, text: str) -> NumDraft:
    """Parse a number of tokens to draft, or "auto"."""
    if text == "auto":
        return "auto"
    return parsed(name, text, int, "an integer of at least 1 or auto")


def _typed_early_stopping(name: str, text: str) -> EarlyStopping:
    if text == "never":
        return "never"
    return parsed(name, text, ON_OFF.__getitem__, "on, off or never")


def _typed_ids(name: str, text: str | None) -> tuple[int, ...]:
    expected = "ids separated by commas"
    return parsed(name, text, lambda ids: tuple(map(int, ids.split(","))), expected) if text else ()


def _typed_texts(_: str, texts: list[str] | None) -> tuple[str, ...]:
    return tuple(texts or ())


def _typed_biases(name: str, texts: list[str] | None) -> dict[int, float]:
    def pair(text: str) -> tuple[int, float]:
        token, _, bias = text.partition("=")
        return int(token), float(bias)

    return dict(parsed(name, text, pair, "ID=BIAS, such as 17=-2.5") for text in texts or [])


# The types of options that are typed in another form than Python's: type, default and parser.
TYPED_FORMS: dict[Any, tuple[Any, Any, Callable[[str, Any], Any]]] = {
    NumDraft: (str, str(DraftingOptions.num_draft), draft_length),
    Sequence[int]: (str | None, None, _typed_ids),
    str | Sequence[int]: (str | None, None, _typed_ids),
    str | Sequence[str]: (list[str] | None, None, _typed_texts),
    Words: (list[str] | None, None, _typed_texts),
    Mapping[int, float] | None: (list[str] | None, None, _typed_biases),
    EarlyStopping: (str, "off", _typed_early_stopping),
}
# What else --help or a shell needs.
HELP_LOOKS: dict[str, dict[str, Any]] = {
    "model": {"autocompletion": complete_model},
    "draft_model": {"autocompletion": complete_draft},
    "start_from": {"autocompletion": complete_draft},
    "only": {"metavar": "NAME"},
    "skip": {"metavar": "NAME"},
    "dtype": {"autocompletion": lambda: DTYPES},
    "verify": {"autocompletion": lambda: get_args(VerifyRule)},
    "logit_bias": {"metavar": "ID=BIAS"},
    "random_weights": {"metavar": "TARGET:DRAFT"},
}
# What Python has as a method, and the command line as a command.
IN_PYTHON = {"rewrite": "the command document"}
SPELLINGS = {
    "max_source_length": ("--max-source-length", "--max-source"),
    "num_return_sequences": ("--num-return-sequences", "-n"),
    "keep_wo": ("--keep-wo/--no-keep-wo",),
    "as_json": ("--json",),
    "output": ("--output", "-o"),
    "prompt_field": ("--prompt-field", "--field"),
    "from_": ("--from",),
    "list_checks": ("--list",),
    "only_inspect": ("--inspect",),
    "random_weights": ("--random",),
}


def decoder_option(name: str) -> Any:
    """Return an option of `DecoderOptions` for a command that takes only some of them."""
    (found,) = (each for each in fields(DecoderOptions) if each.name == name)
    return field(default=found.default, metadata=found.metadata)
