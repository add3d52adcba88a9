"""How a `batch` goes: what it shows on standard error."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from typing import Literal

import mlx.core as mx
from tqdm import tqdm

from ..errors import count
from .job import Earlier, Record
from .terminal import a_few_of, cut_at, note, one_line

Shown = Literal["all", "errors", "nothing"]
MAX_ERRORS_SHOWN = 10  # on standard error


class Progress:
    """Shows on standard error how a run goes: a bar, errors, and a summary at the end."""

    def __init__(
        self,
        total: int | None,
        earlier: Earlier,
        max_tokens: int,
        *,
        resumable: bool,
        shown: Shown = "all",
        label: str = "",
    ) -> None:
        self.written = earlier.done - len(earlier.kept)
        self.failed, self._cut = earlier.failed, earlier.cut.copy()
        self._total = total
        self._earlier = earlier.done
        self._max_tokens = max_tokens
        self._resumable = resumable
        self._unknown: dict[str, None] = {}  # characters, in the order they were found
        self._lacking = 0  # prompts with some of them
        self._shown = self._tokens = self._rounds = self._drafted = self._accepted = 0
        self._began = time.perf_counter()
        self._label = label
        self._shows_errors = shown != "nothing"
        hidden = None if shown == "all" else True  # None: if it is not a terminal
        self._bar = tqdm(total=total, initial=earlier.done, unit=" prompts", disable=hidden)

    def count(self, record: Record) -> None:
        """Count a record, unless an earlier run has made it."""
        if record.earlier:
            return
        if record.done is None:
            self.failed += 1
            self._show(f"line {record.line.number}: {record.error}")
        else:
            for done in (record.done, *record.done.alternatives):
                stats = done.stats
                self._tokens += stats.emitted
                self._rounds += stats.rounds
                self._drafted += stats.drafted
                self._accepted += stats.accepted
            self._cut[record.done.stats.emitted] += record.done.finish_reason == "length"
            rate = self._tokens / (time.perf_counter() - self._began)
            self._bar.set_postfix_str(f"{rate:,.0f} tokens/s", refresh=False)
        self._lacking += bool(record.unknown)
        self._unknown |= dict.fromkeys(record.unknown)
        self._bar.update()

    def _show(self, error: str) -> None:
        if not self._shows_errors:
            return
        self._shown += 1
        if self._shown <= MAX_ERRORS_SHOWN:
            tqdm.write(one_line(error), file=sys.stderr)
        elif self._shown == MAX_ERRORS_SHOWN + 1:
            tqdm.write("further errors are only in the output", file=sys.stderr)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close the bar and show the summary."""
        self._bar.close()
        if self._lacking:
            note(
                f"prompts with characters that the model's vocabulary lacks: {self._lacking:,} "
                f"({a_few_of(self._unknown)}); it sees the unknown token instead"
            )
        note(f"{self._label}[{', '.join(self._parts())}]")
        if kind is not None and self.written and self._resumable:
            note("the records written so far are kept; --resume decodes the other lines")

    def _parts(self) -> Iterator[str]:
        seconds = time.perf_counter() - self._began
        if self._total in (None, self.written):
            yield count(self.written, "prompt")
        else:
            yield f"{self.written:,} of {count(self._total, 'prompt')}"
        if self._earlier:
            yield f"{self._earlier:,} of them earlier"
        if self.failed:
            yield f"{self.failed:,} with errors"
        if at_most := self._cut[self._max_tokens]:
            yield f"{at_most:,} {cut_at(self._max_tokens)}"
        if others := self._cut.total() - at_most:
            yield f"{others:,} {cut_at(None)}"
        if self._rounds:
            yield f"{self._tokens:,} tokens in {seconds:.1f} s"
            yield f"{self._tokens / seconds:,.0f} tokens/s"
            drafted = self._drafted
            yield f"acceptance {self._accepted / drafted:.0%}" if drafted else "no draft"
            yield f"{self._tokens / self._rounds:.1f} tokens per round"
            resident, arrays = peak_memory() / 1e6, mx.get_peak_memory() / 1e6
            yield f"peak memory {resident:,.0f} MB, MLX's {arrays:,.0f}"


def peak_memory() -> int:
    """Return the peak resident size of this process, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
