"""From generation options to what a model and its tokenizer need of them: transform and stops."""

from __future__ import annotations

from ..decoding import LanguageModel, LogitsTransform, Sampler, Stopper
from ..errors import check_utf8
from ..tokenizers import Tokenizer, unknown_characters
from .options import GenerationOptions
from .outputs import StopFilter, StopSearch


class Shaping:
    """What the options of one call mean for a model.

    Args:
        options: See `SpeculativeDecoder.generate`.
        model: The target.
        tokenizer: Needed for options that are text.

    Raises:
        ValueError: If an option names an id that the model lacks, or is text and there is no
            tokenizer, or text that the vocabulary lacks.
    """

    def __init__(
        self, options: GenerationOptions, model: LanguageModel, tokenizer: Tokenizer | None
    ) -> None:
        self._options = options
        self._model = model
        self._tokenizer = tokenizer
        self.stop_ids = frozenset(options.stop_token_ids)
        transform = options.transform(self._spelled, self.stop_ids | model.eos_token_ids)
        largest = max(transform.largest_id, *self.stop_ids, -1)
        if largest >= model.vocab_size:
            raise ValueError(
                f"{self._name_of(largest, transform)} has the id {largest}, and the model has ids "
                f"below {model.vocab_size}: give ids of its tokenizer"
            )
        if options.stop and tokenizer is None:
            raise ValueError("stop strings need a tokenizer: give the decoder one")
        kept = transform if transform else None
        self.sampler = Sampler(options.temperature, options.top_k, options.top_p, kept)

    def _name_of(self, token: int, transform: LogitsTransform) -> str:
        """Return the name of an option that has this id."""
        named = {
            "stop_token_ids": self.stop_ids,
            "suppress_tokens": transform.suppress_tokens,
            "logit_bias": dict(transform.logit_bias),
            "forced_tokens": transform.forced_tokens,
            "bad_words": {each for word in transform.bad_words for each in word},
        }
        return next((name for name, ids in named.items() if token in ids), "an option")

    def _spelled(self, name: str, text: str) -> list[tuple[int, ...]]:
        """Return the ids of a text at the beginning of another one, and those after a space."""
        check_utf8(name, text)
        if self._tokenizer is None:
            raise ValueError(f"{name} has the text {text!r}: give ids, or a tokenizer")
        ways = dict.fromkeys(self._ids(self._tokenizer, name, each) for each in (text, f" {text}"))
        return list(ways)

    def _ids(self, tokenizer: Tokenizer, name: str, text: str) -> tuple[int, ...]:
        """Return the ids of a text, without EOS and a BOS before them."""
        ids = tokenizer.encode(text)
        if lacking := unknown_characters(tokenizer, text, ids):
            raise ValueError(
                f"{name} has the text {text!r}, and the vocabulary lacks {lacking[0]!r}: leave it "
                "out, or give ids"
            )
        if not self._model.is_decoder_only:
            ids = ids[:-1]
        elif ids and ids[0] in self._model.special_tokens and not tokenizer.decode(ids[:1]):
            ids = ids[1:]
        if not ids:
            raise ValueError(f"{name} has the text {text!r}, which has no ids: leave it out")
        return tuple(ids)

    def filter(self) -> StopFilter | None:
        """Return a new filter for one output's text; None without stop strings."""
        options = self._options
        return StopFilter(tuple(options.stop), options.min_tokens) if options.stop else None

    def stopper(self) -> Stopper:
        """Return a new search for stop strings in one output."""
        found = self.filter()
        assert found is not None and self._tokenizer is not None
        return StopSearch(self._tokenizer, found)
