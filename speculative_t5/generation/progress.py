"""A bar for long outputs."""

from __future__ import annotations

from collections.abc import Iterator

from ..decoding import Round


def with_bar(rounds: Iterator[Round], max_tokens: int) -> Iterator[Round]:
    """The same rounds of one output, counted in a bar on standard error, in a notebook too."""
    from tqdm import tqdm  # where it is asked for

    with tqdm(total=max_tokens, unit="token", desc="generating") as bar:
        for done in rounds:
            bar.set_postfix_str(f"{done.stats.tokens_per_round:.1f} per round", refresh=False)
            bar.update(done.stats.emitted - bar.n)
            if done.finish_reason == "eos":
                bar.total = bar.n  # max_tokens was no more than a bound
            yield done
