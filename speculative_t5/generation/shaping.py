"""From generation options to what a model and its tokenizer need of them: transform and stops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..decoding import LanguageModel, LogitsTransform, Sampler, Stopper
from ..tokenizers import Tokenizer
from .options import GenerationOptions, as_items
from .stops import StopFilter, StopSearch


class Shaping:
    """What the options of one call mean for a model.

    Args:
        options: See `SpeculativeDecoder.generate`.
        model: The target.
        tokenizer: Needed for options that are text.

    Raises:
        ValueError: If an option is out of its range, or is text and there is no tokenizer.
    """

    def __init__(
        self, options: GenerationOptions, model: LanguageModel, tokenizer: Tokenizer | None
    ) -> None:
        self._options = options
        self._tokenizer = tokenizer
        self._model = model
        self.stop_ids = frozenset(options.stop_token_ids)
        bias = {} if options.logit_bias is None else options.logit_bias
        if not isinstance(bias, Mapping):
            raise ValueError(f"logit_bias must be a dict of ids and biases, got {bias!r}")
        ends = tuple(model.eos_token_ids | self.stop_ids) if options.min_tokens else ()
        transform = LogitsTransform(
            logit_bias=tuple(bias.items()),
            repetition_penalty=options.repetition_penalty,
            no_repeat_ngram_size=options.no_repeat_ngram_size,
            bad_words=tuple(
                self._ids("bad_words", word) for word in as_items("bad_words", options.bad_words)
            ),
            min_tokens=options.min_tokens,
            end_ids=ends,
            suppress_tokens=as_items("suppress_tokens", options.suppress_tokens),
            forced_tokens=self._ids("forced_tokens", options.forced_tokens),
            processors=as_items("logits_processors", options.logits_processors),
        )
        largest = max(transform.largest_id, *self.stop_ids, -1)
        if largest >= model.vocab_size:
            raise ValueError(
                f"an option names the id {largest}, and the model has ids below "
                f"{model.vocab_size}: give ids of its tokenizer"
            )
        if options.stop_strings and tokenizer is None:
            raise ValueError("stop strings need a tokenizer: give the decoder one")
        kept = transform if transform else None
        self.sampler = Sampler(options.temperature, options.top_k, options.top_p, kept)

    def _ids(self, name: str, value: str | Sequence[int]) -> tuple[int, ...]:
        """Return ids, those of a text without EOS and other control tokens."""
        if not isinstance(value, str):
            return as_items(name, value)
        if self._tokenizer is None:
            raise ValueError(f"{name} has the text {value!r}: give ids, or a tokenizer")
        ids, special = self._tokenizer.encode(value), self._model.special_tokens
        return tuple(token for token in ids if token not in special)

    def filter(self) -> StopFilter | None:
        """Return a new filter for one output's text; None without stop strings."""
        options = self._options
        strings = options.stop_strings
        return StopFilter(strings, options.min_tokens) if strings else None

    def stopper(self) -> Stopper:
        """Return a new search for stop strings in one output."""
        found = self.filter()
        assert found is not None and self._tokenizer is not None
        return StopSearch(self._tokenizer, found)
