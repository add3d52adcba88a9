"""The options that several commands share, in groups, and the decoder that they describe."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import Field, dataclass, fields, is_dataclass
from functools import partial, wraps
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_origin, get_type_hints

import mlx.core as mx
import typer

from ..checkpoints import DTYPES, ModelFolder, model_folders, named_draft
from ..errors import check_utf8
from ..generation import NumDraft, SpeculativeDecoder, process_facts

DEFAULT_MODEL = "correct-base"
# Options by the panels of --help.
in_models, in_drafting, in_sampling, in_output = (
    partial(typer.Option, rich_help_panel=panel)
    for panel in ("Models", "Drafting", "Sampling", "Output")
)


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
DraftVocab = Annotated[
    int | None,
    in_drafting(
        help="Let the draft model propose only the first N ids, which is faster.",
        show_default="all",
    ),
]
RegularDecode = Annotated[
    bool,
    in_drafting("--regular-decode", help="Plain decoding: use the target alone, without drafts."),
]


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
    num_draft: Annotated[
        str,
        in_drafting(
            help="Tokens to draft for each pass of the target: a number; or auto, which measures "
            "what they cost here and chooses for each pass."
        ),
    ] = "5"
    lookup: Annotated[
        bool,
        in_drafting(
            "--lookup",
            help="After the draft model's tokens, also propose tokens copied from the prompt or "
            "the output.",
        ),
    ] = False
    min_ngram: Annotated[
        int, in_drafting(help="Prompt lookup: fewest last tokens of the output that must match.")
    ] = 1
    max_ngram: Annotated[
        int,
        in_drafting(help="Prompt lookup: most last tokens to match; it prefers longer matches."),
    ] = 8
    delta: Annotated[
        float,
        in_drafting(
            help="Lenience from 0 to 1; above 0 the output is no longer exactly the target's."
        ),
    ] = 0.0
    verify: Annotated[
        str,
        in_drafting(
            help="Rule that verifies drafts when sampling: token, block (accepts more), or auto.",
            autocompletion=complete_rule,
        ),
    ] = "auto"
    draft_vocab: DraftVocab = None
    steady: Annotated[
        bool,
        in_drafting(
            "--steady",
            help="Give all passes the same width, so that for a given --num-draft the greedy "
            "output is the same with any draft or none, in any --dtype; decodes one prompt at a "
            "time.",
        ),
    ] = False

    def load(
        self, *, plain: bool = False, group: mx.distributed.Group | None = None
    ) -> SpeculativeDecoder:
        """Load the models and make a decoder; a plain one has no draft.

        The processes of a group share the target.
        """
        check_utf8("--prefix", self.prefix or "")
        draft = None if plain else draft_of(self.model, self.draft_model)
        lookup = self.lookup and not plain
        return SpeculativeDecoder.from_pretrained(
            self.model, draft, dtype=self.dtype, lookup=lookup, group=group, **self._keywords()
        )

    def facts(self) -> dict[str, str]:
        """Return the facts that must be the same in all processes that do a job together."""
        draft = draft_of(self.model, self.draft_model)
        return process_facts(self.model, draft, dtype=self.dtype)

    def remake(self, first: SpeculativeDecoder) -> SpeculativeDecoder:
        """Make another decoder with the models of one that `load` has made."""
        lookup = self.lookup or self.draft_model == "lookup"
        return SpeculativeDecoder(
            first.model, first.draft, first.tokenizer, lookup=lookup, **self._keywords()
        )

    def _keywords(self) -> dict[str, Any]:
        names = ("delta", "verify", "min_ngram", "max_ngram", "draft_vocab", "steady", "chat",
                 "prefix", "max_source_length", "truncate")  # fmt: skip
        keywords = {name: getattr(self, name) for name in names}
        return keywords | {"num_draft": draft_length(self.num_draft)}


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are chosen, and how many."""

    temperature: Annotated[
        float, in_sampling(help="0 decodes greedily; above 0, tokens are sampled.")
    ] = 0.0
    top_k: Annotated[
        int, in_sampling(help="Sample from the K most probable tokens; 0 for all.")
    ] = 0
    top_p: Annotated[
        float,
        in_sampling(
            help="Of those, sample from the most probable tokens that together have probability P; "
            "1 for all."
        ),
    ] = 1.0
    max_tokens: Annotated[
        int, in_output(help="Upper bound on the tokens of an output, EOS included.")
    ] = 256
    seed: Annotated[
        int, in_sampling(help="Seed for sampling; the same seed gives the same output.")
    ] = 0


def with_groups(
    command: Callable[..., None] | None = None,
    *,
    changes: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> Callable[..., Any]:
    """Let a command take groups of options; typer sees an option for each field of a group.

    `changes` overrides, by option name, what a group says about an option, such as its help.
    """
    if command is None:
        return partial(with_groups, changes=changes)
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, Any] = {}
    parameters: list[inspect.Parameter] = []
    for name, given in signature.parameters.items():
        if not is_dataclass(given.annotation):
            parameters.append(given.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        groups[name] = given.annotation
        hints = get_type_hints(given.annotation, include_extras=True)
        for each in fields(given.annotation):
            option = inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY)
            hint = _as_option(each, hints[each.name]) if each.metadata else hints[each.name]
            hint = _changed(hint, changes.get(each.name, {}))
            parameters.append(option.replace(default=each.default, annotation=hint))

    if unknown := changes.keys() - {each.name for each in parameters}:
        raise TypeError(f"{command.__name__} has no options {unknown} to change")

    @wraps(command)
    def call(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{each.name: values.pop(each.name) for each in fields(group)})
        command(**values)

    call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {each.name: each.annotation for each in parameters}
    return call


def _as_option(each: Field[Any], hint: Any) -> Any:
    """Return the type of an option whose field describes it, see `option`."""
    about = each.metadata
    kind = str if get_origin(hint) is Literal else hint
    shown = True if about["shown"] is None else about["shown"]
    return Annotated[kind, typer.Option(help=about["help"], show_default=shown)]


def _changed(hint: Any, values: Mapping[str, Any]) -> Any:
    """Return the type of an option whose description has other values."""
    (option,) = hint.__metadata__
    option = copy(option)
    vars(option).update(values)
    return Annotated[hint.__origin__, option]


def draft_of(model: str, draft_model: str | None) -> str | None:
    """Return the draft for a target: the one given, else the one that the target names."""
    if draft_model is None and (named := named_draft(model)):
        return str(named)
    return draft_model


def model_name(model: str) -> str:
    """Return the name of a model for people and clients, who need not see where it lies."""
    return Path(model).resolve().name if Path(model).is_dir() else model


def draft_length(text: str) -> NumDraft:
    """Parse a number of tokens to draft, or "auto"; refuse anything else."""
    if text == "auto":
        return "auto"
    try:
        return int(text)
    except ValueError:
        raise ValueError(
            f"num_draft must be an integer of at least 1 or auto, got {text!r}"
        ) from None
