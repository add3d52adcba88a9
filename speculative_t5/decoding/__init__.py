"""The decoding loop and its rules: drafting, verifying, sampling, draft lengths, statistics.

`loop.decode` repeats the rounds of a `Batch`: a drafter proposes tokens, the target checks them in
one pass, and a rule (`rules`) decides which of them stand, so that outputs are distributed as the
target's own. The code handles arrays and ids, never models' insides or text: models take part
through the protocols in `protocols`, drafters through `Drafter`. `beams` has beam search, which
drafts nothing. Imports `device` and `options`.
"""

from .adaptive import SHARES, AdaptiveSchedule, SplitSchedule
from .beams import BeamOptions, BeamResult, EarlyStopping, Hypothesis, beam_search
from .draft import Draft
from .draft_length import FixedSchedule, Schedule
from .drafters import CombinedDrafter, Drafter, EmptyDrafter, ExpectingDrafter, LookupDrafter
from .faults import RowError
from .history import TokenHistory
from .logits import NOTHING_LEFT, LogitsProcessor, LogitsTransform
from .logprobs import best_logprobs
from .lookup import MAX_NGRAM
from .loop import (
    PREFETCH_TOKENS,
    SORTED_BATCHES,
    Batch,
    Indexed,
    Plan,
    Request,
    RowOptions,
    decode,
    in_order_of_length,
)
from .model_drafter import ModelDrafter
from .outcomes import GUESSED, LENGTHS, LONGEST_RUN, Outcome
from .protocols import (
    NO_CONSTRAINTS,
    Constraints,
    LanguageModel,
    ModelInfo,
    Session,
    Vocabulary,
    fingerprint,
)
from .results import (
    Broadcast,
    FinishReason,
    Logprob,
    Origin,
    Round,
    Stats,
    counters,
    identity,
    origins_of_round,
    read,
    total,
)
from .rules import Acceptance, Rule, block_acceptance, token_acceptance
from .sampling import Groups, Sampler, argmax, best, check_temperature
from .scoring import log_probabilities, pair_probabilities
from .verify import Verifier
