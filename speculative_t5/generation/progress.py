"""A progress bar for long outputs."""

from __future__ import annotations

from collections.abc import Iterator

from ..decoding import Round


def with_bar(rounds: Iterator[Round], max_tokens: int) -> Iterator[Round]:
    """Yield the rounds of one output unchanged, and count their tokens in a bar on stderr."""
    from tqdm import tqdm  # only where a bar is wanted

    with tqdm(total=max_tokens, unit="token", desc="generating") as bar:
        for done in rounds:
            bar.set_postfix_str(f"{done.stats.tokens_per_round:.1f} per round", refresh=False)
            bar.update(done.stats.emitted - bar.n)
            if done.finish_reason == "eos":
                bar.total = bar.n  # max_tokens is only an upper bound
            yield done
