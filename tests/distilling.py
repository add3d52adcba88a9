"""Runs of `distill` on a tiny target, for tests: what they are given, and what watches them."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from speculative_t5.distill import (
    Data,
    DistillOptions,
    DistillTask,
    Example,
    Judgement,
    StageProgress,
    distill,
    judgement,
)
from speculative_t5.distill import run as stages
from speculative_t5.models import SharingDraft
from speculative_t5.models.t5 import T5

import pytest
from conftest import EOS, tiny_model

SHORT = DistillOptions(steps=14, batch_tokens=100, learning_rate=3e-3, max_tokens=8)


def target(**changes: Any) -> T5:
    """A target whose outputs vary, some ending and some cut."""
    return tiny_model(**{"vocab_size": 20, "seed": 18, "layers": 2} | changes)


def examples(count: int, seed: int) -> list[Example]:
    rng = random.Random(seed)
    prompts = [[rng.randrange(2, 20) for _ in range(rng.randrange(1, 7))] for _ in range(count)]
    return [Example(line, [*ids, EOS], None) for line, ids in enumerate(prompts, 1)]


DATA = Data(examples(60, 1), examples(8, 2), 70, {"empty": 2}, "0123456789abcdef" * 4)
STAGES = {
    "labelling held-out prompts": "valid", "labelling prompts": "train", "training": "trained",
    "judging": "judging",
}  # fmt: skip


class Watch:
    """Keeps all that a run reports, and calls `act` at each report."""

    def __init__(self, act: Callable[[str, Any], None] = lambda kind, at: None) -> None:
        self.seen: list[StageProgress] = []
        self._act = act

    def __call__(self, now: StageProgress) -> None:
        self.seen.append(now)
        self._act(STAGES[now.stage], now.done)
        if now.tokens_per_pass is not None:
            self._act("checked", now.done)

    def of(self, kind: str) -> list[StageProgress]:
        return [now for now in self.seen if STAGES[now.stage] == kind]


def go(
    output: Path,
    watch: Watch | None = None,
    options: DistillOptions = SHORT,
    data: Data = DATA,
    model: T5 | None = None,
    start: SharingDraft | None = None,
    **read_by: Any,
) -> Judgement:
    task = DistillTask(model or target(), None, "tiny", start=start)
    short: Any = {"LABEL_CHUNK": 16, "SAVE_EVERY": 4, "MAX_CHECKS": 5, "SAVE_SECONDS": 1e9}
    few: Any = {"MEASURED_TURNS": 1, "MAX_PROMPTS": 2, "MAX_DRAFTED": 2}
    with mock.patch.multiple(stages, **short), mock.patch.multiple(judgement, **few):
        return distill(task, data, output, options, watch or Watch(), read_by=read_by)


class Stop(Exception):
    """Ends a run at a report."""


def labels_of(folder: Path, **changes: Any) -> tuple[list[Any], list[Any]]:
    """The held-out labels and the others of a run with some options."""

    def act(kind: str, _: object) -> None:
        if kind == "trained":
            raise Stop

    output = folder / "draft"
    with pytest.raises(Stop):
        go(output, Watch(act), replace(SHORT, **changes.pop("options", {})), **changes)
    valid, train = (
        [json.loads(line)["tokens"] for line in path.read_text().splitlines()]
        for path in (folder / "draft.distill" / f"{name}.jsonl" for name in ("valid", "train"))
    )
    return valid, train
