"""How long regular decoding would have taken."""

from __future__ import annotations

from statistics import median

from .decoder import Prompt, SpeculativeDecoder

PASSES, SECONDS = 8, 0.3  # what an estimate may take, of which two passes are the least


def regular_seconds(
    decoder: SpeculativeDecoder,
    prompt: Prompt,
    num_tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
) -> float | None:
    """Seconds that the target alone would need for an output of so many tokens.

    A few tokens are decoded, and the median of their times stands for the rest: attention to the
    longer output that follows is left out.

    Returns:
        None if the output is too short to tell.
    """
    times: list[float] = []
    for chunk in decoder.stream(
        prompt, max_tokens=num_tokens, temperature=temperature, top_k=top_k, top_p=top_p,
        seed=seed, speculative=False,
    ):  # fmt: skip
        times.append(chunk.stats.seconds)
        if len(times) == PASSES or (len(times) > 1 and times[-1] > SECONDS):
            break
    if len(times) < 2:
        return None
    steps = [later - earlier for earlier, later in zip(times, times[1:], strict=False)]
    return times[0] + median(steps) * (num_tokens - 1)
