"""Runs of `distill` with --minutes take those, whatever their pieces cost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

from speculative_t5.distill import Judgement, Task, distill, judge
from speculative_t5.distill import run as stages
from speculative_t5.distill.training import Training

import pytest
from distilling import DATA, SHORT, Stop, Watch, examples, target

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("quick")]


class Clock:
    """A clock that goes on only as a run's work is done, each piece by its own seconds."""

    COSTS: ClassVar = {"valid": 0.5, "train": 0.5, "step": 3.0, "check": 9.0, "save": 6.0}

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.max_seconds = 0.0
        monkeypatch.setattr(stages, "perf_counter", lambda: self.now)
        for name, method in (("step", "step"), ("save", "save")):
            self._slow(monkeypatch, Training, method, self.COSTS[name])
        self._slow(monkeypatch, stages, "agreement", self.COSTS["check"])
        monkeypatch.setattr(stages, "judge", self._judge)

    def _slow(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, cost: float) -> None:
        whole = getattr(owner, name)

        def slow(*args: Any, **options: Any) -> Any:
            self.now += cost
            return whole(*args, **options)

        monkeypatch.setattr(owner, name, slow)

    def _judge(self, *args: Any, max_seconds: float, **options: Any) -> Judgement:
        self.now += max_seconds
        self.max_seconds = max_seconds
        return judge(*args, max_seconds=0.0, turns=1, **options)

    def label(self, kind: str, _: object) -> None:
        self.now += self.COSTS.get(kind, 0.0) if kind in ("valid", "train") else 0.0


def test_a_run_takes_the_minutes_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seconds of processes that were stopped count, too."""
    output, clock = tmp_path / "draft", Clock(monkeypatch)
    options = replace(SHORT, steps=None, minutes=10.0, label_batch=4)

    def act(kind: str, value: Any) -> None:
        clock.label(kind, value)
        if (kind, value) in stops:
            stops.remove((kind, value))
            raise Stop

    stops = [("train", 3), ("trained", 40)]
    data = replace(DATA, train=examples(900, 3), valid=examples(300, 4))
    with mock.patch.multiple(stages, judge=clock._judge, SAVE_EVERY=10, CHECKS=5):
        task = Task(target(), None, "tiny")
        while stops:
            with pytest.raises(Stop):
                distill(task, data, output, options, Watch(act), read_by={})
        watch = Watch(clock.label)
        distill(task, data, output, options, watch, read_by={})
    assert 0.8 * 600 < clock.now < 1.1 * 600
    assert 40 < clock.max_seconds < 90
    done = {split: watch.of(split)[-1] for split in ("valid", "train")}
    assert done["valid"].done < 300 and done["train"].done < 900
    totals = {now.total for now in watch.of("trained")}
    assert len(totals) == 1 and totals.pop() > 50
