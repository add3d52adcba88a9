"""What a draft gives on the machine that measures it, in numbers and in words."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .. import device, libraries, measure
from ..checkpoints import dtype_name
from ..decoding import LanguageModel
from ..errors import count
from ..generation import NumDraft, SpeculativeDecoder
from ..measure import PLAIN_DECODING, tokens_per_pass, tokens_per_second
from ..models import EncoderDecoder, SharingDraft
from ..tokenizers import Tokenizer
from .training import Agreement

WORTHWHILE_SPEEDUP = 1.05  # a smaller speed-up is none
FEW_PROMPTS = 8  # prompts; figures of fewer are rough
MAX_DRAFTED = 8  # tokens to draft
MEASURED_TURNS, MAX_PROMPTS = 3, 24  # that are measured
TABLE_HEAD = ("K", "tokens per pass", "right at place K", "tokens/s", "speed-up", "same output")
TABLE_LEGEND = (
    "K: tokens drafted for each pass of the target. Right at place K: the chance that the K-th "
    "drafted token is right, given that those before it are. This and the tokens per pass of each "
    "K follow from all held-out outputs; at auto, passes were counted in the measured ones."
)


@dataclass(frozen=True)
class DistillTask:
    """A target to distill a draft for, and what the draft begins as."""

    target: EncoderDecoder
    tokenizer: Tokenizer | None
    name: str  # the target's, which is written into the draft's folder
    start: SharingDraft | None = None  # to train further, instead of copies of the target's layers


@dataclass(frozen=True)
class Speed:
    """One way to draft over all measured prompts; medians over the turns."""

    num_draft: NumDraft
    tokens_per_second: float  # over the whole time that a user waits, encoding included
    speedup: float  # its tokens per second over those of the same turn without a draft
    tokens_per_pass: float  # emitted tokens, EOS included, over passes of the target
    same: int  # outputs that equal those without a draft

    @property
    def option(self) -> str:
        """How to ask for it on the command line."""
        return f"--num-draft {self.num_draft}"


@dataclass(frozen=True)
class Judgement:
    """What a draft gives: agreement on held-out prompts, and speeds on this machine."""

    target: str
    draft: str
    held_out: int  # outputs of which the agreement is known
    held_out_tokens: int  # in these, EOS included
    agreement: float  # the share of them that the draft has right
    # Chances that the first, the second and further drafted tokens are right, given that those
    # before them are; up to the last place that a draft came to.
    by_place: list[float]
    tokens_per_pass: list[float]  # of the target, if 1, 2 and more tokens are drafted
    unmeasured: str | None  # why there are no speeds
    prompts: int  # that speeds were measured on
    turns: int  # how often each was decoded in each way
    max_tokens: int  # upper bound on tokens of each output
    plain: float  # tokens per second without a draft; 0.0 if not measured
    speeds: list[Speed]  # of this draft, for each K and then for "auto"
    machine: str  # the device and the processor
    dtype: str  # the target's
    made_by: Mapping[str, Any]  # options that the draft was made with, by name

    @property
    def best(self) -> Speed | None:
        """The K with the most tokens per second; None if speeds were not measured."""
        return fastest(self.speeds[:-1])

    @property
    def auto(self) -> Speed | None:
        """What "auto" gives; None if speeds were not measured."""
        return self.speeds[-1] if self.speeds else None

    @property
    def pays(self) -> bool:
        """Whether the draft makes decoding more than `WORTHWHILE_SPEEDUP` times as fast."""
        return any(speed.speedup > WORTHWHILE_SPEEDUP for speed in (self.best, self.auto) if speed)

    @property
    def verdict(self) -> str:
        """One sentence on whether the draft pays, and on what to do."""
        best, auto = self.best, self.auto
        if best is None or auto is None:
            return f"What it gives could not be measured: {self.unmeasured}."
        if not self.pays:
            return (
                f"It does not pay: decoding is {best.speedup:.2f} times as fast as without a draft "
                f"with {best.option}, the best fixed number, and {auto.speedup:.2f} times with "
                f"{auto.option}; distill from more prompts or for more steps, or try "
                "--draft-model lookup."
            )
        first, second = sorted((best, auto), key=lambda speed: speed.speedup, reverse=True)
        return (
            f"It pays: decoding is {first.speedup:.2f} times as fast as without a draft with "
            f"{first.option}, and {second.speedup:.2f} times with {second.option}."
        )

    @property
    def notes(self) -> list[str]:
        """Sentences on what limits these figures."""
        notes = []
        if self.held_out < FEW_PROMPTS:
            notes.append(
                f"The figures are rough: they come from {count(self.held_out, 'held-out output')}; "
                f"give enough prompts to hold out at least {FEW_PROMPTS}."
            )
        elif self.speeds and self.prompts < FEW_PROMPTS:
            notes.append(f"Speeds are rough: they come from {count(self.prompts, 'prompt')}.")
        same = min((speed.same for speed in self.speeds), default=self.prompts)
        if different := self.prompts - same:
            notes.append(
                f"Up to {different} of {count(self.prompts, 'output')} differ from those without a "
                "draft, in near-ties that rounding decides; --steady prevents it."
            )
        return notes

    def summary(self) -> list[str]:
        """Return a few lines for a terminal."""
        lines = [f"{self.draft} has {self._agreement()} right"]
        if self.speeds:
            lines.append(f"measured here: {self._conditions()}")
        return [*lines, _table_of_lengths([TABLE_HEAD, *self._rows()]), self.verdict, *self.notes]

    def as_markdown(self) -> str:
        """Return a short README for the draft's folder."""
        parts = [
            f"# {self.draft}, a draft for {self.target}",
            f"It proposes tokens that {self.target} checks, several in one pass (speculative "
            f"decoding). The output stays {self.target}'s own.",
            f"**{self.verdict}**",
            *self.notes,
            f"Given the tokens before, it has {self._agreement()} right.",
            _table_of_lengths([TABLE_HEAD, *self._rows()]),
            TABLE_LEGEND,
        ]
        if self.speeds:
            parts.append(
                f"Speeds are of one machine, and other machines give others: {self._conditions()}. "
                "`python -m speculative_t5 bench` measures yours."
            )
        made = [(f"`{name}`", str(value)) for name, value in self.made_by.items()]
        parts += ["## How it was made", _table_of_lengths([("option", "value"), *made])]
        return "\n\n".join(parts) + "\n"

    def to_json(self) -> dict[str, Any]:
        """Return the attributes, and what follows from them, as JSON can hold them."""
        best = self.best.num_draft if self.best else None
        return asdict(self) | {"best": best, "pays": self.pays, "verdict": self.verdict}

    def _agreement(self) -> str:
        return (
            f"{100 * self.agreement:.1f} % of {count(self.held_out_tokens, 'token')} in "
            f"{count(self.held_out, 'held-out output')}"
        )

    def _conditions(self) -> str:
        return (
            f"{self.machine}, {self.dtype}, greedy, one prompt at a time, encoding included, "
            f"medians of {count(self.turns, 'turn')} over {count(self.prompts, 'prompt')}, "
            f"at most {count(self.max_tokens, 'token')} each"
        )

    def _rows(self) -> list[Sequence[str]]:
        """Return rows for the table: without a draft, each K, "auto"."""
        by_number = {
            speed.num_draft: (
                f"{speed.tokens_per_second:.0f}",
                f"{speed.speedup:.2f}",
                f"{speed.same}/{self.prompts}",
            )
            for speed in self.speeds
        }
        rows: list[Sequence[str]] = []
        if self.speeds:
            rows.append(("no draft", "1.00", "", f"{self.plain:.0f}", "1.00", ""))
        for k, tokens in enumerate(self.tokens_per_pass, 1):
            place = f"{100 * self.by_place[k - 1]:.1f} %" if k <= len(self.by_place) else ""
            rows.append((str(k), f"{tokens:.2f}", place, *by_number.get(k, ("", "", ""))))
        if self.auto:
            rows.append(("auto", f"{self.auto.tokens_per_pass:.2f}", "", *by_number["auto"]))
        return rows


def fastest(speeds: Sequence[Speed]) -> Speed | None:
    """Return the one with the most tokens per second; None if there are none."""
    return max(speeds, key=lambda speed: speed.tokens_per_second, default=None)


def _table_of_lengths(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    head, *body = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in rows]
    return "\n".join([head, "|" + "".join("-" * (width + 2) + "|" for width in widths), *body])


def judge(
    task: DistillTask,
    draft: LanguageModel,
    name: str,
    prompts: Sequence[list[int]],
    agreement: Agreement,
    *,
    max_tokens: int,
    max_seconds: float,
    made_by: Mapping[str, Any],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Judgement:
    """Measure greedy decoding of held-out prompts with 1 to `MAX_DRAFTED` tokens, and with "auto".

    Everything runs one prompt at a time and interleaved, see `measure.compare_with_plain`. Where
    there is nothing to measure, the judgement says so.

    `prompts` are source ids in a random order; of the first `MAX_PROMPTS` fewer are taken, but at
    least one, where all would need more than about `max_seconds`. `progress` receives how many
    outputs are done, and how many there are in all at most.
    """
    measured = _measure(task, draft, prompts[:MAX_PROMPTS], max_tokens, max_seconds, progress)
    reason = "every output ends with its first token, which leaves nothing to speed up"
    kind = "CPU" if device.on_cpu() else "GPU"
    return Judgement(
        target=task.name,
        draft=name,
        held_out=len(agreement.rows),
        held_out_tokens=agreement.num_tokens,
        agreement=agreement.rate,
        by_place=agreement.by_place(MAX_DRAFTED),
        tokens_per_pass=[agreement.tokens_per_pass(k) for k in range(1, MAX_DRAFTED + 1)],
        unmeasured=None if measured else reason,
        prompts=len(measured.turns[0][PLAIN_DECODING]) if measured else 0,
        turns=MEASURED_TURNS,
        max_tokens=max_tokens,
        plain=measured.typical(PLAIN_DECODING, tokens_per_second) if measured else 0.0,
        speeds=[speed_of(measured, number) for number in numbers()] if measured else [],
        machine=f"{kind}, {device.chip()}, {count(libraries.num_threads(), 'thread')}",
        dtype=dtype_name(task.target.dtype),
        made_by=made_by,
    )


def _measure(
    task: DistillTask,
    draft: LanguageModel,
    prompts: Sequence[list[int]],
    max_tokens: int,
    max_seconds: float,
    progress: Callable[[int, int], None],
) -> measure.Comparison | None:
    """Decode plainly and with each K; return nothing if nothing can be sped up."""
    done = total = 0

    def count_one() -> None:
        nonlocal done
        done += 1
        progress(done, total)

    decoders = {
        str(k): SpeculativeDecoder(task.target, draft, task.tokenizer, num_draft=k)
        for k in numbers()
    }
    plain, *_ = variants = measure.variants_of(decoders, max_tokens)
    passes = 1 + MEASURED_TURNS * len(variants)  # of each prompt: to warm up, and in the turns
    total = len(variants) + passes * len(prompts)
    warm, order = list[measure.Run](), random.Random(0)
    for prompt in prompts:
        warm += measure.sweep([plain], [prompt], order, progress=count_one)[PLAIN_DECODING]
        if late := sum(run.seconds for run in warm) * passes > max_seconds:
            break
    if not any(len(run.emitted) > 1 for run in warm):
        return None
    prompts = prompts[: max(1, len(warm) - late)]
    total = len(warm) + len(variants) + (passes - 1) * len(prompts)
    return measure.compare_with_plain(
        variants, prompts, turns=MEASURED_TURNS, warm_up=1, progress=count_one
    )


def numbers() -> list[NumDraft]:
    """Return the numbers of drafted tokens that are measured."""
    return [*range(1, MAX_DRAFTED + 1), "auto"]


def speed_of(comparison: measure.Comparison, num_draft: NumDraft) -> Speed:
    """Sum up one variant against plain decoding, which ran in each turn as well."""
    name = str(num_draft)
    return Speed(
        num_draft=num_draft,
        tokens_per_second=comparison.typical(name, tokens_per_second),
        speedup=comparison.gain(name, tokens_per_second),
        tokens_per_pass=comparison.typical(name, tokens_per_pass),
        same=comparison.num_same(name),
    )
