"""`SpeculativeDecoder`: the class that users call."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from .. import decoding, device
from .._version import __version__
from ..checkpoints import as_dtype, default_type_of, dtype_name, load, locate, named_draft
from ..decoding import Indexed, LanguageModel, Logprob
from ..distributed import ProcessGroup
from ..options import OptionError, check_integer, takes
from ..tokenizers import Prompt, PromptEncoder, Source, Tokenizer, check_prompts
from . import outputs
from .decoder_options import DecodingOptions, LoadingOptions, MakingOptions
from .engine import Engine
from .options import TRANSFORMERS_NAMES, BatchOptions, GenerationOptions, SingleOptions, num_rows
from .outputs import Chunk, Generation

if TYPE_CHECKING:
    from ..documents import Rewritten, TextOptions


class _Rewrite:
    """The method `rewrite` for texts of any length, which `documents` has, the package above."""

    def __get__(self, decoder: object, owner: type) -> Any:
        from ..documents import rewrite  # imported when it is asked for

        return rewrite.__get__(decoder, owner)


class _Moved:
    """A method of `Engine` by the place where it was until version 0.5; it goes with 0.7."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, decoder: SpeculativeDecoder | None, owner: type) -> Any:
        if decoder is None:
            return self
        old, new = f"SpeculativeDecoder.{self._name}", f"SpeculativeDecoder.engine.{self._name}"
        warnings.warn(f"{old} has moved: write {new}", DeprecationWarning, stacklevel=2)
        return getattr(decoder.engine, self._name)

    def __repr__(self) -> str:
        return f"<moved to engine.{self._name}>"


class SpeculativeDecoder:
    """Generates with a target that verifies what a draft proposes.

    The output is distributed exactly as the target's own unless `delta` is above 0; at temperature
    0 it is the target's greedy output. This holds up to rounding: a pass over several tokens and
    one over a single token may round differently, which shows in near-ties: in 16-bit types, on
    GPUs, and in float32 where the C parts are not used. `steady` prevents it.

    Models and a tokenizer come from `load`. What drafts, and all options, are arguments of
    `__init__`; what decodes ids is `engine`.

    Raises:
        ValueError: If an option is out of its range or the models' tokenizers differ.
    """

    @takes(MakingOptions, TRANSFORMERS_NAMES)
    def __init__(self, model: LanguageModel, options: MakingOptions) -> None:
        """Take the target, and what drafts for it."""
        self.engine = Engine(model, options.tokenizer, options.draft, options)
        self.prompts = PromptEncoder(
            model,
            options.tokenizer,
            prefix=options.prefix,
            to=options.to,
            from_=options.from_,
            chat=options.chat,
            max_source_length=options.max_source_length,
            truncate=options.truncate,
        )

    @property
    def model(self) -> LanguageModel:
        """The target."""
        return self.engine.model

    @property
    def draft(self) -> LanguageModel | None:
        """The draft model, if there is one."""
        return self.engine.draft

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None if prompts have to be ids."""
        return self.engine.tokenizer

    @property
    def drafts(self) -> bool:
        """Whether anything is drafted."""
        return self.engine.drafts

    @property
    def draft_vocab(self) -> int | None:
        """The draft model proposes ids below this number; None if it may propose any."""
        return self.engine.drafting.draft_vocab

    @property
    def is_steady(self) -> bool:
        """Whether passes are steady, and so prompts decoded one at a time."""
        return self.engine.drafting.steady

    @property
    def prefix(self) -> str:
        """What goes before prompts that do not begin with it; "" if they go as they are."""
        return self.prompts.prefix or ""

    @property
    def languages(self) -> tuple[str, str] | None:
        """Codes of the languages to translate from ("" if unknown) and to, if it translates."""
        return self.prompts.languages

    @property
    def trained_length(self) -> int | None:
        """How many tokens the model was trained on at most, if it says so."""
        return self.prompts.trained_length

    @property
    def min_probability(self) -> float:
        """The probability below which `rewrite` does not trust a token, if the model has one."""
        return float(getattr(self.model, "min_probability", 0))

    def __repr__(self) -> str:
        drafting, parts = self.engine.drafting, [_name_of(self.model)]
        if not self.drafts:
            return f"SpeculativeDecoder({parts[0]}, draft=None)"
        parts.append(f"draft={_name_of(self.draft) if self.draft else repr('lookup')}")
        parts += ["lookup=True"] if self.draft and drafting.lookup else []
        parts += [f"num_draft={drafting.num_draft!r}", f"verify={drafting.rule!r}"]
        parts += [f"delta={drafting.delta}"] if drafting.delta else []
        parts += ["steady=True"] if drafting.steady else []
        return f"SpeculativeDecoder({', '.join(parts)})"

    @classmethod
    @takes(LoadingOptions, TRANSFORMERS_NAMES)
    def from_pretrained(cls, model: str | Path, options: LoadingOptions) -> SpeculativeDecoder:
        """Load target and draft from folders, or by names that `load` looks up.

        Without `draft`, it is the one that the target's config.json names, if any, and if no
        `adapter` changes the target; None decodes with the target alone. `adapter` and `dtype` are
        passed to `load`, the latter for both models. With a `group` of processes
        (`mx.distributed.init()`), the target is split among them, and each has the whole draft; all
        must then make the same calls. Their versions, weights and options are compared before the
        models are loaded. The other options are those of the class.

        Raises:
            StartError: In all processes, if their versions, weights or options differ.
        """
        own = {each.name: getattr(options, each.name) for each in fields(DecodingOptions)}
        draft, adapter, dtype, group = options.draft, options.adapter, options.dtype, options.group
        if implied := draft is ...:
            draft = named_draft(locate(model, adapter))
        if group is not None:
            facts = process_facts(model, draft, dtype=dtype, adapter=adapter, **own)
            ProcessGroup(group).compare(facts)
        target, tokenizer = load(model, adapter=adapter, dtype=dtype, group=group)
        small: Any = draft
        if draft is not None and draft != "lookup":
            small, _ = load(draft, dtype=dtype, target=target)
        made = cls(target, small, tokenizer, **own)
        made.engine.draft_is_implied = implied
        return made

    @takes(SingleOptions, TRANSFORMERS_NAMES)
    def generate(self, prompt: Prompt, options: SingleOptions) -> Generation:
        """Generate the output for one prompt.

        Args:
            prompt: Text; source ids (EOS included, where a T5 reads them) as a list; or a chat as
                a list of messages, each with its "role" and "content".
            options: Given as keywords, as in all methods here; see Options.

        Raises:
            ValueError: If the prompt is empty, too long or not a prompt, or an option is out of its
                range.
        """
        source = self.prompts.fit(prompt).ids
        # Several outputs are decoded side by side.
        batch_size = min(options.num_return_sequences, num_rows(steady=self.is_steady))
        done = dict(self.engine.generations([(0, source)], options, batch_size))[0]
        if not options.probabilities:
            return done

        def explained(done: Generation) -> Generation:
            found = self.engine.pair_probabilities(source, done.tokens, options)
            return replace(done, probabilities=found)

        others = tuple(map(explained, done.alternatives))
        return replace(explained(done), alternatives=others)

    @takes(BatchOptions, TRANSFORMERS_NAMES)
    def generate_batch(self, prompts: Sequence[Prompt], options: BatchOptions) -> list[Generation]:
        """Generate the outputs for many prompts, in the prompts' order.

        All prompts are checked before the first is decoded. At the same seed the first output is
        that of `generate`.
        """
        check_prompts(prompts)
        batch_size = num_rows(options.batch_size, steady=self.is_steady)
        sources = [self._fit(i, each) for i, each in enumerate(prompts)]
        # Rows of similar length pad less, and those that end last are short.
        window = max(len(sources), 1) if options.by_length else 1
        requests = decoding.in_order_of_length(enumerate(sources), window)
        done = dict(naming_rows(self.engine.generations(requests, options, batch_size), options))
        return [done[index] for index in range(len(sources))]

    @takes(BatchOptions, TRANSFORMERS_NAMES)
    def iter_batch(
        self, prompts: Iterable[tuple[int, Prompt]], options: BatchOptions
    ) -> Iterator[tuple[int, Generation]]:
        """Generate the outputs for any number of prompts; yield index and output as each ends.

        When one of the prompts that are decoded side by side ends, the next takes its row. An
        output depends only on its prompt, its index and the seed, up to rounding.

        `prompts` are pairs of an index, at least 0, and a prompt, as `enumerate` makes them. As
        many prompts as rows are taken ahead, with `by_length` `SORTED_BATCHES` times as many.
        """
        check_prompts(prompts)
        batch_size = num_rows(options.batch_size, steady=self.is_steady)
        requests: Iterator[Indexed] = (
            (index, self._fit(index, prompt)) for index, prompt in map(checked_pair, prompts)
        )
        if options.by_length and batch_size > 1:
            requests = decoding.in_order_of_length(requests, decoding.SORTED_BATCHES * batch_size)
        return naming_rows(self.engine.generations(requests, options, batch_size), options)

    def check_batch(self, options: BatchOptions) -> None:
        """Refuse options that `iter_batch` would refuse, before anything is decoded.

        Raises:
            ValueError: If an option does not fit the models, or another option.
        """
        num_rows(options.batch_size, steady=self.is_steady)
        self.engine.check(options)

    @takes(GenerationOptions, TRANSFORMERS_NAMES)
    def stream(self, prompt: Prompt, options: GenerationOptions) -> Iterator[Chunk]:
        """Generate one output, a chunk for each pass of the target; otherwise as `generate`.

        What needs finished outputs is refused here: `num_return_sequences`, `scores`, `num_beams`.
        """
        options.check_stream()
        source = self.prompts.fit(prompt).ids
        detokenizer = options.detokenizer(self.tokenizer)
        rounds = self.engine.rounds([(0, source)], options)
        return (outputs.as_chunk(done, detokenizer) for done in rounds)

    if TYPE_CHECKING:

        @takes(TextOptions)
        def rewrite(self, text: str, options: TextOptions) -> Rewritten:
            """Rewrite a text of any length, piece by piece; see `documents.rewrite`."""
            ...

    else:
        rewrite = _Rewrite()

    def translating(self, to: str, from_: str | None = None) -> SpeculativeDecoder:
        """Return a decoder of the same models whose prompts are translated to another language.

        Languages are names or codes; see `Languages` for errors.
        """
        other = copy.copy(self)  # with the same engine, which learns for both
        other.prompts = self.prompts.translating(to, from_)
        return other

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the ids of a prompt of any length, EOS included where the model is a T5.

        Raises:
            ValueError: If the prompt is empty or not a prompt, if it is text and there is no
                tokenizer or a chat and there is no template, or if an id is out of range.
        """
        return self.prompts.ids(prompt)

    def fit(self, prompt: Prompt) -> Source:
        """Encode a prompt; cut it if it is too long and may be cut.

        Raises:
            ValueError: See `encode`; and if the prompt is too long and `truncate` is not set.
        """
        return self.prompts.fit(prompt)

    def log_probabilities(
        self,
        source: Sequence[int],
        tokens: Sequence[int],
        top: int = 0,
        *,
        decoder_start_token_id: int | None = None,
    ) -> list[Logprob]:
        """Return how probable each token of any output is by the target, which reads it for that.

        `source` are the ids of a prompt, and `top` is how many of the most probable ids to report
        at each token. With the option `logprobs` outputs come with the same, without another pass.
        """
        start = decoder_start_token_id
        return decoding.log_probabilities(self.model, source, tokens, top, start)

    def _fit(self, index: int, prompt: Prompt) -> list[int]:
        """Return the ids of one of many prompts; errors name its index."""
        try:
            return self.fit(prompt).ids
        except OptionError as error:
            error.put_before(f"at index {index}, ")
            raise
        except ValueError as error:
            error.args = (f"at index {index}, {error}",)
            raise

    bind = _Moved()
    plan = _Moved()
    requests = _Moved()
    rounds = _Moved()
    generations = _Moved()


def _name_of(model: object) -> str:
    """Return the name that a model was loaded by, or else its class."""
    name = getattr(model, "name", None)
    return repr(name) if isinstance(name, str) else f"<{type(model).__name__}>"


def naming_rows(
    outputs: Iterator[tuple[int, Generation]], options: GenerationOptions
) -> Iterator[tuple[int, Generation]]:
    """Yield outputs; name the index of the prompt in the error of one that cannot go on."""
    try:
        yield from outputs
    except decoding.RowError as error:
        # Beams of a prompt have its index, and samples one each.
        count = 1 if options.beams else options.num_return_sequences
        error.index //= count
        error.args = (f"at index {error.index}, {error.reason}",)
        raise


def checked_pair(item: object) -> tuple[int, Prompt]:
    """Return an index and its prompt; refuse anything else in their place."""
    if isinstance(item, tuple | list) and len(item) == 2:
        return check_integer("a prompt's index", item[0], 0), item[1]
    raise ValueError(
        "each of prompts must be an index with its prompt, as enumerate makes them, got "
        f"{type(item).__name__}"
    )


def process_facts(
    model: str | Path,
    draft: str | Path | None,
    *,
    dtype: mx.Dtype | str | None = None,
    adapter: str | Path | None = None,
    **options: object,
) -> dict[str, str]:
    """Return the facts that must be the same in all processes, see `ProcessGroup.compare`."""
    facts = {"the version of speculative_t5": __version__, "the version of MLX": device.MLX_VERSION}
    target = locate(model, adapter)
    facts["the type to compute in"] = dtype_name(as_dtype(dtype) or default_type_of(target).dtype)
    facts["the target"] = f"weights {target.digest()}"
    if draft is None or draft == "lookup":
        facts["the draft"] = str(draft or "none")
    else:
        facts["the draft"] = f"weights {locate(draft).digest()}"
    return facts | {name: repr(value) for name, value in options.items()}
