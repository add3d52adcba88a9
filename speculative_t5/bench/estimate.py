"""How much longer regular decoding would have taken."""

from __future__ import annotations

from statistics import median

from ..decoding import Stats
from ..generation import SpeculativeDecoder
from ..tokenizers import Prompt

PASSES, SECONDS = 8, 0.3  # what looking at regular decoding may take; two passes are the least


def speedup(
    decoder: SpeculativeDecoder,
    prompt: Prompt,
    stats: Stats,
    *,
    max_tokens: int = 256,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
) -> float | None:
    """Estimate how many times as long the target alone would need for an output.

    A few tokens are decoded regularly, and the median of their times stands for the rest: attention
    to the longer output that follows is left out. The first use of everything is slower, so that
    what takes little time is done once more before it counts.

    Args:
        decoder: Has made the output.
        prompt: Its prompt.
        stats: What it cost.
        max_tokens: The options it was made with, as all that follow.
        temperature: See `SpeculativeDecoder.generate`.
        top_k: See there.
        top_p: See there.
        seed: See there.

    Returns:
        None if the output is too short to tell.
    """
    seconds = stats.seconds
    if seconds < SECONDS:
        again = decoder.generate(
            prompt, max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p,
            seed=seed,
        )  # fmt: skip
        seconds = min(seconds, again.stats.seconds)
    times: list[float] = []
    for _ in range(2):
        times = []
        for chunk in decoder.stream(
            prompt, max_tokens=stats.emitted, temperature=temperature, top_k=top_k, top_p=top_p,
            seed=seed, speculative=False,
        ):  # fmt: skip
            times.append(chunk.stats.seconds)
            if len(times) == PASSES or (len(times) > 1 and times[-1] > SECONDS):
                break
        if times[-1] > SECONDS:
            break
    if len(times) < 2 or not seconds:
        return None
    steps = [later - earlier for earlier, later in zip(times, times[1:], strict=False)]
    return (times[0] + median(steps) * (stats.emitted - 1)) / seconds
