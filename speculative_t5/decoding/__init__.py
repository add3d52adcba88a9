"""The decoding loop and its rules: drafting, verifying, sampling, draft lengths, statistics.

`loop.decode` repeats the rounds of a `Batch`: a drafter proposes tokens, the target checks them in
one pass, and a rule (`verify`) decides which of them stand, so that outputs are distributed as the
target's own. The code handles arrays and ids, never models' insides or text: models take part
through the protocols in `protocols`, drafters through `Drafter`. `beams` has beam search, which
drafts nothing. The room imports `errors` and `device` only.
"""

from .beams import (
    BeamOptions,
    BeamPlan,
    BeamResult,
    EarlyStopping,
    Hypothesis,
    beam_search,
)
from .calibration import Padded, cache_folder, calibrate
from .draft import Draft
from .drafters import CombinedDrafter, Drafter, EmptyDrafter, LookupDrafter
from .lookup import check_ngrams
from .loop import AHEAD_TOKENS, Batch, decode
from .model_drafter import ModelDrafter
from .plan import WINDOW, OwnRequest, Plan, Request, in_order_of_length
from .protocols import (
    Agree,
    Encoded,
    LanguageModel,
    Session,
    SharingModel,
    Vocabulary,
    alone,
    fingerprint,
)
from .results import FinishReason, Origin, Round, Stats, origins_of_round, total
from .rows import Row, RowOptions, Stopper
from .sampling import RowSamplers, Sampler, argmax
from .schedule import AdaptiveSchedule, FixedSchedule, Outcome, Schedule
from .scoring import log_probability, pair_probabilities
from .transform import NOTHING_LEFT, History, LogitsProcessor, LogitsTransform
from .verify import Odds, Verifier, block_odds, residual, token_odds
from .waits import Waits, count_waits, read
