"""Tips on speed: who is given them, how often, and when they apply."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from speculative_t5 import device
from speculative_t5.cli import terminal, tips
from speculative_t5.cpu.blocks import BUILT_FOR

import pytest


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine that lacks everything, where no tip has been given yet."""
    for name in (tips.SWITCH, device.SWITCH):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(device, "on_cpu", lambda: True)
    monkeypatch.setattr(device, "parts", {"products": "not built", "OpenBLAS": "not built"})
    return tmp_path


def test_every_tip_that_applies_is_given_with_its_reason() -> None:
    products, openblas = tips.tips()
    assert "compiler" in products and "(products: not built)" in products
    assert "scipy-openblas32" in openblas


def test_missing_products_and_layers_are_one_tip(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = {"products": "not built", "layers": "not loaded", "OpenBLAS": "loaded"}
    monkeypatch.setattr(device, "parts", state)
    assert len(tips.tips()) == 1
    monkeypatch.setattr(device, "parts", state | {"products": "loaded, AVX2"})
    (only,) = tips.tips()
    assert only.startswith("the package's layers")


def test_layers_for_another_mlx_need_that_mlx(monkeypatch: pytest.MonkeyPatch) -> None:
    why = f"{BUILT_FOR} 0.32.4, and 0.32.5 is installed"
    state = {"products": "loaded", "layers": why, "OpenBLAS": "loaded"}
    monkeypatch.setattr(device, "parts", state)
    (only,) = tips.tips()
    assert "pip install 'mlx[cpu]==" in only and "compiler" not in only and why in only


def test_no_tips_on_a_gpu_or_if_all_is_loaded_or_switched_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device, "on_cpu", lambda: False)
    assert tips.tips() == []
    monkeypatch.setattr(device, "on_cpu", lambda: True)
    monkeypatch.setenv(device.SWITCH, "0")
    assert tips.tips() == []
    monkeypatch.delenv(device.SWITCH)
    monkeypatch.setattr(device, "parts", dict.fromkeys(device.PARTS, "loaded"))
    assert tips.tips() == []


def test_tips_are_given_once_a_day_unless_silenced(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(tips.due_tips()) == 2
    assert tips.due_tips() == []
    stamp = here / "speculative_t5" / "tips-given"
    os.utime(stamp, (0, stamp.stat().st_mtime - tips.DAY - 1))
    assert len(tips.due_tips()) == 2
    stamp.unlink()
    monkeypatch.setenv(tips.SWITCH, "0")
    assert tips.due_tips() == []


def test_tips_are_for_terminals(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal.give_tips()
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    terminal.give_tips()
    lines = capsys.readouterr().err.splitlines()
    assert [line[:5] for line in lines] == ["tip: "] * 2
    assert all(f"{tips.SWITCH}=0" in line for line in lines)
