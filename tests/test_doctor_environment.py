"""`doctor`: what it says about what is installed and what MLX runs on."""

from __future__ import annotations

from speculative_t5.doctor import Subject, environment

import mlx.core as mx
import pytest


def test_an_old_mlx_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "version", lambda package: "0.32.0")
    found = environment.versions(Subject())
    assert found.status == "failed" and "install 0.32.1 or newer" in found.reason


@pytest.mark.parametrize(
    ("architecture", "chip"),
    [("applegpu_g13s", "M1"), ("applegpu_g14g", "M2"), ("applegpu_g17s", "M5"),
     ("applegpu_g99", None), ("sm_90", None), ("", None)],
)  # fmt: skip
def test_chips_are_named(architecture: str, chip: str | None) -> None:
    assert environment.generation(architecture) == chip


def test_a_slow_type_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    info = {"architecture": "applegpu_g13s", "device_name": "Apple M1 Pro", "memory_size": 2**34,
            "resource_limit": 499000}  # fmt: skip
    monkeypatch.delenv(environment.machine.CHOICE)
    monkeypatch.setattr(mx, "device_info", lambda device=None: info)
    monkeypatch.setattr(environment.machine, "on_cpu", lambda: False)
    monkeypatch.setattr(environment.machine, "default_dtype", lambda: mx.bfloat16)
    limits = environment._limits()
    found = environment.device(Subject())
    assert found.reason == "MLX computes on the GPU: Apple M1 Pro, 16 GB of memory"
    assert "at most 499,000 buffers" in found.notes[0]
    assert "bfloat16 by default; some users report float16 to be faster on an M1" in found.notes[1]
    assert environment._limits() == limits, "reading the limits leaves them"
