"""How much longer plain decoding would have taken."""

from __future__ import annotations

from dataclasses import asdict, replace
from statistics import median

from ..decoding import Stats
from ..generation import GenerationOptions, SpeculativeDecoder
from ..tokenizers import Prompt

PASSES, SECONDS = 8, 0.3  # at most, of plain decoding; but at least two passes


def speedup(
    decoder: SpeculativeDecoder,
    prompt: Prompt,
    stats: Stats,
    options: GenerationOptions = GenerationOptions(),  # noqa: B008  (frozen)
) -> float | None:
    """Estimate how many times as long the target alone would take for an output.

    A few tokens are decoded plainly, and the median of their times stands for the rest, although
    attention to a longer output takes more. Since the first use of everything is slower, a quick
    output is made once more before its time counts. `options` are those that it was made with.

    Returns:
        None if the output is too short for an estimate.
    """
    seconds = stats.seconds
    if seconds < SECONDS:
        again = decoder.generate(prompt, **asdict(options))
        seconds = min(seconds, again.stats.seconds)
    plain = replace(options, max_tokens=stats.emitted, speculative=False)
    times = _pass_ends(decoder, prompt, plain)
    if times[-1] <= SECONDS:
        times = _pass_ends(decoder, prompt, plain)
    if len(times) < 2 or not seconds:
        return None
    steps = [later - earlier for earlier, later in zip(times, times[1:], strict=False)]
    return (times[0] + median(steps) * (stats.emitted - 1)) / seconds


def _pass_ends(
    decoder: SpeculativeDecoder, prompt: Prompt, options: GenerationOptions
) -> list[float]:
    """Return the seconds until the end of each of the first few passes."""
    times: list[float] = []
    for chunk in decoder.stream(prompt, **asdict(options)):
        times.append(chunk.stats.seconds)
        if len(times) == PASSES or (len(times) > 1 and times[-1] > SECONDS):
            break
    return times
