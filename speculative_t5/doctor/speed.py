"""The check `speed`: what passes cost here, and what a draft gains."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from .. import measure
from ..checkpoints import dtype_name
from ..decoding import Plan
from ..generation import SpeculativeDecoder
from ..kernels import without_kernels
from ..measure import PLAIN_DECODING, PassCosts, tokens_per_second
from .checks import DRAFTED_TOKENS, Finding, Subject, dtype_of
from .outputs import SENTENCES_OF_LEARNERS

SHOWN_LENGTHS = (1, 2, 3, 5, 6, 9, 13, 17)  # of passes, in the usual report
SENTENCE_STEP, OUTPUT_TOKENS = 11, 32  # which sentences are decoded, and how far
MOST_TURNS, SECONDS_OF_TURNS = 9, 15.0  # no turn begins after so many seconds
WORTHWHILE_GAIN = 1.05  # a smaller speed-up is none


def speed(subject: Subject) -> Finding:
    """Time passes and a few sentences; it never fails."""
    decoder = subject.decoder()
    prompts = [decoder.encode(sentence) for sentence in SENTENCES_OF_LEARNERS[::SENTENCE_STEP]]
    costs = measure.measure_passes(decoder, prompts[0])
    with without_kernels(decoder.model) as had_some:
        plain = measure.measure_passes(decoder, prompts[0]).passes if had_some else {}
    adaptive = SpeculativeDecoder(decoder.model, decoder.draft or "lookup", decoder.tokenizer)
    plans = {"drafted": decoder.engine.plan(), "auto": adaptive.engine.plan()}
    details = _measured(decoder, plans, prompts, costs)
    details["pass_seconds_by_mlx_alone"] = {str(length): each for length, each in plain.items()}
    auto, gain = details["auto"], details["measured_speedup"]
    drafts = "this draft" if decoder.draft else "prompt lookup"
    reason = f"{drafts} does not pay here: plain decoding is as fast"
    if max(gain, auto["speedup"]) >= WORTHWHILE_GAIN:
        reason = (
            f"{drafts} gives {gain:.1f} times the speed of plain decoding here with "
            f"{DRAFTED_TOKENS} tokens drafted, {auto['speedup']:.1f} times with auto"
        )
    notes = [
        _line("tokens in a pass", SHOWN_LENGTHS),
        _line("milliseconds", [as_ms(costs.passes[length]) for length in SHOWN_LENGTHS]),
        *([_line("by MLX alone", [as_ms(plain[each]) for each in SHOWN_LENGTHS])] if plain else []),
        f"a step of the draft takes {as_ms(costs.draft_step)} ms",
        f"{details['acceptance']:.0%} of the tokens that are reached are accepted",
        f"auto drafts {usual(auto)} tokens most often",
    ]
    return Finding("speed", "ok", reason, notes, details)


def _measured(
    decoder: SpeculativeDecoder,
    plans: Mapping[str, Plan],
    prompts: Sequence[list[int]],
    costs: PassCosts,
) -> dict[str, Any]:
    """Decode prompts plainly, and by plans: "drafted", and "auto", whose lengths adapt."""
    variants = measure.variants_of(dict.fromkeys(plans, decoder), OUTPUT_TOKENS, plans)
    comparison = measure.compare_with_plain(
        variants, prompts, turns=MOST_TURNS, seconds=SECONDS_OF_TURNS
    )
    last = comparison.turns[-1]
    # An output's last round may be shorter than was chosen.
    rounds = [run.outcomes[:-1] or run.outcomes for run in last["auto"]]
    chosen = Counter(each.num_draft for outcomes in rounds for each in outcomes)
    return {
        "dtype": dtype_name(dtype_of(decoder.model)),
        "pass_seconds": {str(length): seconds for length, seconds in costs.passes.items()},
        "draft_step_seconds": costs.draft_step,
        "acceptance": measure.acceptance(last["drafted"]),
        "plain_tokens_per_second": comparison.typical(PLAIN_DECODING, tokens_per_second),
        "tokens_per_second": comparison.typical("drafted", tokens_per_second),
        "measured_speedup": comparison.gain("drafted", tokens_per_second),
        "auto": {
            "tokens_per_second": comparison.typical("auto", tokens_per_second),
            "speedup": comparison.gain("auto", tokens_per_second),
            "rounds": {str(length): rounds for length, rounds in chosen.most_common()},
        },
    }


def usual(auto: Mapping[str, Any], most: int = 1) -> str:
    """Return the lengths that were drafted most often."""
    return ", ".join([*auto["rounds"]][:most])


def as_ms(seconds: float) -> str:
    """Return milliseconds with about three digits."""
    return f"{1e3 * seconds:.{2 if seconds < 0.01 else 1 if seconds < 0.1 else 0}f}"


def _line(name: str, values: Sequence[object]) -> str:
    return name.ljust(17) + "".join(str(value).rjust(6) for value in values)
