"""Options of calls as values: checked where they are made, and passed on whole.

An option of a call is a field of a dataclass here, and nothing else: methods take the fields as
keywords, see `options.takes`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from ..checkpoints import RENAMED_OPTIONS
from ..decoding import (
    NO_CONSTRAINTS,
    BeamOptions,
    Constraints,
    EarlyStopping,
    LogitsProcessor,
    LogitsTransform,
    Sampler,
)
from ..errors import check_utf8
from ..options import (
    OptionError,
    check_integer,
    check_options,
    described,
    option,
    option_error,
    python_option,
    settle,
)
from ..tokenizers import Detokenizer, Tokenizer
from .outputs import StoppedText

Words = Sequence[str | Sequence[int]]

for_sampling, for_output, for_constraints, for_beam_search = (
    partial(option, panel=panel) for panel in ("Sampling", "Output", "Constraints", "Beam search")
)

USUAL_BATCH_SIZE, MAX_BATCH_SIZE = 16, 2**16  # prompts side by side
MAX_LOGPROBS = 100  # ids at each token
# Options that change logits.
CONSTRAINT_OPTIONS = (
    "repetition_penalty",
    "no_repeat_ngram_size",
    "min_tokens",
    "suppress_tokens",
    "begin_suppress_tokens",
    "bad_words",
    "logit_bias",
    "forced_tokens",
    "logits_processors",
)
# What transformers' `generate` calls options of ours.
TRANSFORMERS_NAMES = {
    **RENAMED_OPTIONS,
    "max_length": "max_tokens",
    "min_length": "min_tokens",
    "do_sample": "temperature",
    "sequence_bias": "logit_bias",
    "forced_bos_token_id": "forced_tokens",
    "logits_processor": "logits_processors",
    "eos_token_id": "stop_token_ids",
    "output_scores": "scores",
    "assistant_model": "draft",
    "num_assistant_tokens": "num_draft",
    "prompt_lookup_num_tokens": "num_draft",
    "max_matching_ngram_size": "max_ngram",
    # Of programs for decoder-only pairs.
    "gamma": "num_draft",
    "draft_model": "draft",
    "num_draft_tokens": "num_draft",
}
# Options that are lists, and what they may be given as.
EXPECTED_LISTS = {
    "suppress_tokens": "a list of ids",
    "begin_suppress_tokens": "a list of ids",
    "stop_token_ids": "a list of ids",
    "stop": "text or a list of texts",
    "bad_words": "text or a list of texts and of lists of ids",
    "logits_processors": "a list of functions",
}


@described
@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """The options of a call, each in its range.

    A checkpoint may have its own `suppress_tokens`, `begin_suppress_tokens`, `forced_tokens` (its
    forced_bos_token_id) and `decoder_start_token_id`, for calls that give none. For a beam search
    see `BeamOptions`.
    """

    max_tokens: int = for_output(
        256, "Upper bound on the tokens of an output, EOS included.", least=1
    )
    temperature: float = for_sampling(0.0, "0 decodes greedily; above 0, tokens are sampled.")
    top_k: int = for_sampling(
        0,
        "Sample from the K most probable tokens, and any as probable as the last of them; 0 for "
        "all.",
        least=0,
    )
    top_p: float = for_sampling(
        1.0,
        "Of those, sample from the most probable tokens that together have probability P, and any "
        "as probable as the last of them; 1 for all.",
    )
    seed: int = for_sampling(
        0, "Seed for sampling; the same seed gives the same output.", least=0, most=2**63 - 1
    )
    speculative: bool = python_option(True, "False decodes with the target alone.")
    max_new_tokens: int | None = python_option(None, "Another name for max_tokens.")
    repetition_penalty: float = for_constraints(
        1.0,
        "Above 1, tokens that the output already has become less probable.",
        python="Above 1, tokens that the output already has become less probable: their positive "
        "logits are divided by it, and negative ones multiplied; of a decoder-only model those of "
        "the prompt's tokens, too.",
        least=1e-4,
        most=1e4,
    )
    no_repeat_ngram_size: int = for_constraints(
        0, "Let no sequence of N tokens occur twice; 0 is off.", least=0, most=32
    )
    min_tokens: int = for_constraints(
        0, "Let no output end before it has this many tokens.", least=0
    )
    suppress_tokens: Sequence[int] = for_constraints(
        (),
        "Ids that no output may contain, separated by commas.",
        python="Ids that no output may contain.",
    )
    begin_suppress_tokens: Sequence[int] = for_constraints(
        (),
        "Ids that no output may begin with, separated by commas.",
        python="Ids that no output may begin with.",
    )
    bad_words: Words = for_constraints(
        (),
        "Text that no output may contain, as the ids that the tokenizer gives it; may be repeated.",
        python="Sequences of ids that no output may contain, or texts, which stand for the ids "
        "that the tokenizer gives them at the beginning of a text and after a space.",
    )
    logit_bias: Mapping[int, float] | None = for_constraints(
        None,
        "Bias to add to the logit of an id; -inf forbids it; may be repeated.",
        python="Biases to add to the logits of ids, by id; -inf forbids one.",
    )
    forced_tokens: str | Sequence[int] = for_constraints(
        (),
        "Ids that every output begins with, separated by commas.",
        python="What every output begins with: ids, or a text.",
    )
    decoder_start_token_id: int | None = for_constraints(
        None,
        "Id that the decoder reads before the output, as some models are told a language by it.",
        shown="the checkpoint's own",
        least=0,
    )
    logits_processors: Sequence[LogitsProcessor] = python_option(
        (),
        "Functions of (tokens so far (T,) int32, logits (1, V) float32) that return logits (1, V), "
        "as mlx-lm's. They are called for each drafted token, too, and must depend on their "
        "arguments alone.",
    )
    stop: str | Sequence[str] = for_output(
        (),
        "End the output before this text; may be repeated.",
        python="A text or several; the output ends before the first one that is completed.",
    )
    stop_token_ids: Sequence[int] = for_output(
        (), "Ids that end an output, separated by commas.", python="Ids that end an output."
    )
    prediction: str | Sequence[int] = python_option(
        (),
        "A text, or its ids, that the output is expected to resemble, such as the one that a "
        "prompt asks to change: drafts may copy it. It changes what other drafts would: nothing by "
        "default, tokens at a seed by the rules 'token' and 'block', outputs with a delta.",
    )
    num_return_sequences: int = for_output(
        1,
        "Outputs for each prompt; greedy decoding has only one.",
        python="Outputs for each prompt; greedy decoding has only one. Output j of prompt i "
        "samples as prompt num_return_sequences * i + j would.",
        least=1,
    )
    scores: bool = for_output(
        False,
        "Also give the logarithm of each output's probability.",
        python="Also give the logarithm of each output's probability, as `Generation.score`.",
    )
    logprobs: int | None = python_option(
        None,
        "Also give how probable each token is by the target, as `Generation.logprobs`, and as many "
        "of the most probable ids in its place.",
        least=0,
        most=MAX_LOGPROBS,
    )
    num_beams: int = for_beam_search(
        1, "Width of a beam search, which uses no draft; 1 is no search.", least=1
    )
    length_penalty: float = for_beam_search(
        1.0, "Above 0 a search prefers long outputs, below 0 short ones.", least=-20.0, most=20.0
    )
    early_stopping: EarlyStopping = for_beam_search(
        False,
        "When to end a search that has as many outputs as beams: on (at once), off (when a "
        "better one is unlikely) or never (when none can be better).",
        python="When to end a search that has as many outputs as beams: True (at once), False "
        "(when a better one is unlikely) or 'never' (when none can be better).",
    )

    def __post_init__(self) -> None:
        _ = self.sampler  # which refuses what it cannot sample by
        check_options(self)
        self._take_other_name()
        self._settle_lists()
        self._check_stops()
        self._check_constraints()
        if self.num_beams != 1:
            self._check_beams()
        elif self.num_return_sequences > 1 and self.temperature == 0:
            raise OptionError(
                "{num_return_sequences} is {}, and greedy decoding has only one output: give a "
                "{temperature} above 0, or {num_beams}",
                self.num_return_sequences,
            )

    def _take_other_name(self) -> None:
        """Let `max_new_tokens` set `max_tokens`; refuse two numbers."""
        if self.max_new_tokens is None:
            return
        check_integer("max_new_tokens", self.max_new_tokens, 1)
        if self.max_tokens not in (GenerationOptions.max_tokens, self.max_new_tokens):
            raise OptionError(
                "{max_tokens} is {} and {max_new_tokens}, another name for it, is {}: give one "
                "of them",
                self.max_tokens,
                self.max_new_tokens,
            )
        settle(self, max_tokens=self.max_new_tokens, max_new_tokens=None)

    def _settle_lists(self) -> None:
        """Make tuples of lists, which may come as iterators; refuse what is none."""
        values = {name: as_items(name, getattr(self, name)) for name in EXPECTED_LISTS}
        values["bad_words"] = tuple(
            word if isinstance(word, str) else as_items("each of {bad_words}", word)
            for word in values["bad_words"]
        )
        for name in ("forced_tokens", "prediction"):
            if not isinstance(found := getattr(self, name), str):
                values[name] = as_items(name, found)
        for token in values.get("prediction", ()):
            check_integer("an id of {prediction}", token, 0)
        settle(self, **values)

    def _check_stops(self) -> None:
        for token in self.stop_token_ids:
            check_integer("an id of {stop_token_ids}", token, 0)
        for string in self.stop:
            if not isinstance(string, str) or not string:
                raise ValueError(f"a stop string must be text that is not empty, got {string!r}")
            check_utf8("a stop string", string)

    def _check_constraints(self) -> None:
        """Refuse what is wrong whatever the tokenizer: make the transform with all texts empty."""
        bias = self.logit_bias
        if not (bias is None or isinstance(bias, Mapping)):
            raise option_error("logit_bias", "a dict of ids and biases", bias)
        settle(self, logit_bias=bias or None)
        self.transform(lambda name, text: ())

    def _check_beams(self) -> None:
        """Refuse what a beam search does not go with."""
        assert self.beams  # which refuses what it cannot search by
        if self.temperature != 0:
            raise OptionError(
                "{num_beams} is {} and {temperature} is {}, and a beam search does not sample: "
                "leave out one of the two",
                self.num_beams,
                self.temperature,
            )
        if self.stop:
            raise OptionError(
                "{num_beams} is {}, and a beam search has no stop strings: leave out {num_beams} "
                "or {stop}",
                self.num_beams,
            )
        for name, is_set in (
            ("logprobs", self.logprobs is not None),
            ("prediction", self.prediction),
        ):
            if is_set:
                raise OptionError(
                    f"{{num_beams}} is {{}}, and a beam search has no {{{name}}}: leave out one of "
                    "them",
                    self.num_beams,
                )

    @cached_property
    def sampler(self) -> Sampler:
        """Temperature, top-k and top-p; without the options that change logits."""
        return Sampler(self.temperature, self.top_k, self.top_p)

    @cached_property
    def beams(self) -> BeamOptions | None:
        """The options of a beam search; None for greedy decoding and sampling."""
        if self.num_beams == 1:
            return None
        return BeamOptions(
            self.num_beams, self.length_penalty, self.early_stopping, self.num_return_sequences
        )

    def detokenizer(self, tokenizer: Tokenizer | None) -> Detokenizer | None:
        """Return what makes text of one output's ids, up to a stop string; None if nothing can."""
        if tokenizer is None:
            return None
        if not self.stop:
            return Detokenizer(tokenizer)
        return StoppedText(tokenizer, self.stop, self.min_tokens)

    @property
    def _has_constraints(self) -> bool:
        """Whether an option that changes logits is set."""
        return any(
            getattr(self, name) != getattr(GenerationOptions, name) for name in CONSTRAINT_OPTIONS
        )

    @property
    def of_finished(self) -> list[str]:
        """The options that are set and that only finished outputs can have."""
        given = {
            "num_return_sequences": self.num_return_sequences > 1,
            "num_beams": self.num_beams != 1,
            "scores": self.scores,
        }
        return [name for name, is_set in given.items() if is_set]

    def check_stream(self, *, several: bool = False) -> None:
        """Refuse what only finished outputs can have; `several` outputs at a time may be fine."""
        for name in self.of_finished:
            if not (several and name == "num_return_sequences"):
                raise OptionError(
                    f"{{{name}}} is {{}}, which needs finished outputs, and here tokens are sent "
                    "as they are chosen: leave it out, or use generate",
                    getattr(self, name),
                )

    def transform(
        self,
        encode: Callable[[str, str], Sequence[Sequence[int]]],
        end_ids: Iterable[int] = (),
        own: Constraints = NO_CONSTRAINTS,
    ) -> LogitsTransform | None:
        """Return the change of logits; None if there is none.

        `encode` takes an option's name and a text, and returns the ways that ids spell it. A bad
        word that is one of `end_ids` is ignored, as by transformers: an output may be empty. `own`
        are the checkpoint's constraints, for options that are empty.
        """
        if own == NO_CONSTRAINTS and not self._has_constraints:
            return None
        ends = frozenset(end_ids)
        words: list[tuple[int, ...]] = []
        for word in self.bad_words:
            ways = encode("bad_words", word) if isinstance(word, str) else [word]
            words += [tuple(way) for way in ways if not (len(way) == 1 and ends.issuperset(way))]
        forced = self.forced_tokens
        if isinstance(forced, str):
            forced = next(iter(encode("forced_tokens", forced)), ()) if forced else ()
        made = LogitsTransform(
            logit_bias=tuple((self.logit_bias or {}).items()),
            repetition_penalty=self.repetition_penalty,
            no_repeat_ngram_size=self.no_repeat_ngram_size,
            bad_words=tuple(dict.fromkeys(words)),
            min_tokens=self.min_tokens,
            end_ids=tuple(sorted(ends)),
            suppress_tokens=tuple(self.suppress_tokens) or own.suppress_tokens,
            begin_suppress_tokens=tuple(self.begin_suppress_tokens) or own.begin_suppress_tokens,
            forced_tokens=tuple(forced) or own.forced_tokens,
            processors=tuple(self.logits_processors),
        )
        return made or None


@dataclass(frozen=True, kw_only=True)
class SingleOptions(GenerationOptions):
    """The options of `generate`, which has one prompt."""

    probabilities: bool = python_option(
        False,
        "Add each token's probabilities, see `Token`, by one more pass of each model over the "
        "output.",
    )


@dataclass(frozen=True, kw_only=True)
class BatchOptions(GenerationOptions):
    """The options of `generate_batch` and `iter_batch`."""

    batch_size: int | None = python_option(
        None,
        "Prompts to decode side by side, from 1 to 65,536; None is 16, or 1 if the decoder is "
        "steady.",
    )
    by_length: bool = python_option(
        True, "Begin prompts in order of length: rows of similar length pad less."
    )


def num_rows(batch_size: int | None = None, *, steady: bool) -> int:
    """Return how many prompts to decode side by side, given the number asked for."""
    if batch_size is None:
        return 1 if steady else USUAL_BATCH_SIZE
    if check_integer("batch_size", batch_size, 1, MAX_BATCH_SIZE) > 1 and steady:
        raise OptionError(
            "{steady} decodes one prompt at a time, got {batch_size} {}: leave out one of the two",
            batch_size,
        )
    return batch_size


def as_items(name: str, value: object) -> tuple[Any, ...]:
    """Return an option's items, of which a text is one; refuse what has none."""
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, Iterable) or isinstance(value, bytes | Mapping):
        expected = EXPECTED_LISTS.get(name, "text or a list of ids")
        raise option_error(name, expected, value)
    return tuple(value)
