"""The decoding loop and its rules: drafting, verifying, sampling, draft lengths, statistics.

Knows arrays and ids; no model, no text. Models and drafters take part by the protocols in
`protocols` and `drafters`. Imports `errors` and `device` only.
"""

from .calibration import Padded, cache_folder, calibrate
from .drafters import CombinedDrafter, Draft, Drafter, EmptyDrafter, LookupDrafter, ModelDrafter
from .lookup import check_ngrams
from .loop import WINDOW, Plan, Request, decode, in_order_of_length
from .protocols import Encoded, LanguageModel, Session, Vocabulary, fingerprint
from .results import FinishReason, Origin, Round, Stats, origins_of_round
from .sampling import Sampler, argmax
from .schedule import AdaptiveSchedule, FixedSchedule, Outcome, Schedule
from .scoring import pair_probabilities
from .verify import Odds, Verifier, block_odds, residual, token_odds, verify_block, verify_tokens
from .waits import Waits, count_waits, read

__all__ = [
    "AdaptiveSchedule",
    "CombinedDrafter",
    "Draft",
    "Drafter",
    "EmptyDrafter",
    "Encoded",
    "FinishReason",
    "FixedSchedule",
    "LanguageModel",
    "LookupDrafter",
    "ModelDrafter",
    "Odds",
    "Origin",
    "Outcome",
    "Padded",
    "Plan",
    "Request",
    "Round",
    "Sampler",
    "Schedule",
    "Session",
    "Stats",
    "Verifier",
    "Vocabulary",
    "WINDOW",
    "Waits",
    "argmax",
    "block_odds",
    "cache_folder",
    "calibrate",
    "check_ngrams",
    "count_waits",
    "decode",
    "fingerprint",
    "in_order_of_length",
    "origins_of_round",
    "pair_probabilities",
    "read",
    "residual",
    "token_odds",
    "verify_block",
    "verify_tokens",
]
