"""`Engine`: models and how they draft, from requests to rounds and outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice

from ..decoding import EmptyDrafter, LanguageModel, Plan, Request, Round, decode
from ..tokenizers import Tokenizer
from .adaptive import Schedules
from .beams import beam_outputs, check_plain
from .drafting import make_open_plan, make_plan
from .options import DraftingOptions, GenerationOptions
from .outputs import Generation, as_generations
from .sequences import Sequences, Sources
from .shaping import Shaping
from .steady import steady_width


class Engine:
    """Decodes source ids; `SpeculativeDecoder` adds prompts, and options as keywords.

    Attributes:
        model: The target.
        draft: The draft model; None without one.
        tokenizer: For outputs as text; None leaves them empty.
    """

    def __init__(
        self,
        model: LanguageModel,
        draft: LanguageModel | None,
        drafting: DraftingOptions,
        tokenizer: Tokenizer | None,
    ) -> None:
        self.model = model
        self.draft = draft
        self.tokenizer = tokenizer
        self._drafting = drafting
        self._draft_is_implied = False  # and so left out where none may be
        self._schedules = Schedules()
        self._width: int | None = None  # of steady passes, once it is known

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_width": None}  # another device may need another one

    @property
    def drafts(self) -> bool:
        """Whether anything is drafted, by a model or by lookup."""
        return self.draft is not None or self._drafting.lookup

    def plan(self, options: GenerationOptions, requests: Sequence[Request] = ()) -> Plan:
        """Return the plan by which `decode` generates.

        Args:
            options: See `generate`.
            requests: The prompts to calibrate on if num_draft is "auto"; without any, nothing is
                drafted then.
        """
        model, draft, drafting = self.model, self.draft, self._drafting
        shaping, width = self.shaping(options), self._steady_width()
        plan = make_plan(model, draft, drafting, options, shaping, width)
        if isinstance(plan.drafter, EmptyDrafter) or drafting.num_draft != "auto" or not requests:
            return plan
        schedule = self._schedules.calibrated(model, draft, drafting, plan, requests)
        return replace(plan, schedule=schedule)

    def open_plan(self) -> Plan:
        """Return a plan for a `Batch` whose requests have options of their own.

        For the number of tokens to draft see `make_open_plan`.
        """
        return make_open_plan(self.model, self.draft, self._drafting, self._steady_width())

    @property
    def is_steady(self) -> bool:
        """Whether prompts are decoded one at a time, in passes of one width."""
        return self._drafting.steady

    def generations(
        self,
        requests: Iterable[Request],
        options: GenerationOptions,
        batch_size: int = 1,
        watch: Callable[[Iterator[Round]], Iterator[Round]] | None = None,
    ) -> Iterator[tuple[int, Generation]]:
        """Decode prompts, and yield each one's index and output as it ends.

        The options are checked at the call. `watch` sees the rounds, and passes them on.
        """
        shaping, count = self.shaping(options), options.num_return_sequences
        if options.beams:
            chosen = self._drafting.lookup or (self.drafts and not self._draft_is_implied)
            check_plain(options, drafts=chosen, steady=self._drafting.steady)
            model, tokenizer = self.model, self.tokenizer
            return beam_outputs(model, tokenizer, requests, options, shaping, batch_size)
        sources = Sources(self.model, requests, count) if options.scores else None
        several = Sequences(count) if count > 1 else None
        wanted: Iterable[Request] = sources or requests
        if several:
            wanted = several.repeated(wanted)
        rounds = self.rounds(wanted, options, batch_size)
        if watch:
            rounds = watch(rounds)
        score = sources.score if sources else None
        outputs = as_generations(rounds, self.tokenizer, shaping.filter, score)
        return several.gathered(outputs) if several else outputs

    def shaping(self, options: GenerationOptions) -> Shaping:
        """Return what the options mean for the target."""
        return Shaping(options, self.model, self.tokenizer)

    def rounds(
        self, requests: Iterable[Request], options: GenerationOptions, batch_size: int = 1
    ) -> Iterator[Round]:
        """Decode; the options are checked at the call, not at the first round."""
        requests = iter(requests)
        first = list(islice(requests, batch_size)) if self._drafting.num_draft == "auto" else []
        plan = self.plan(options, first)
        return decode(self.model, chain(first, requests), plan, batch_size=batch_size)

    def _steady_width(self) -> int | None:
        """Return the width of all passes of the target; None if they need not be steady."""
        drafting = self._drafting
        if self._width is None and drafting.steady and drafting.num_draft != "auto":
            self._width = steady_width(self.model, drafting.num_draft + 1)
        return self._width
