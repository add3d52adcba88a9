"""Outputs as records: what JSON and tables have of them, by the same names everywhere."""

from collections.abc import Mapping
from typing import Any

from .outputs import Generation

OUTCOME_FIELDS = ("text", "finish_reason", "score", "truncated", "alternatives", "stats", "error")
# Those that only some options give: without them, a field of the input keeps the name.
OPTIONAL_FIELDS = ("score", "truncated", "alternatives")
# Of an output's statistics, in every form of JSON.
STATS_IN_JSON = ("rounds", "drafted", "accepted", "acceptance_rate", "tokens_per_round")


def as_record(done: Generation) -> dict[str, str | float]:
    """Return an output's text, finish_reason and, if there is one, score, by these names."""
    score = {} if done.score is None else {"score": done.score}
    return {"text": done.text, "finish_reason": done.finish_reason, **score}


def as_outcome(done: Generation, *, truncated: bool) -> dict[str, Any]:
    """Return all that a record has of an output; `truncated` says that its prompt was cut."""
    found: dict[str, Any] = dict(as_record(done))
    found |= {"truncated": True} if truncated else {}
    others = [as_record(each) for each in done.alternatives]
    found |= {"alternatives": others} if others else {}
    found["stats"] = {"tokens": done.stats.emitted}
    found["stats"] |= {name: getattr(done.stats, name) for name in STATS_IN_JSON}
    return found


def outcome_of(keywords: Mapping[str, Any], *, truncate: bool) -> tuple[str, ...]:
    """Return the names that a run gives to what it makes of a prompt, by its options."""
    has_scores = keywords.get("scores") or keywords.get("num_beams", 1) > 1
    wanted = (has_scores, truncate, keywords.get("num_return_sequences", 1) > 1)
    left_out = {
        name for name, is_wanted in zip(OPTIONAL_FIELDS, wanted, strict=True) if not is_wanted
    }
    return tuple(name for name in OUTCOME_FIELDS if name not in left_out)
