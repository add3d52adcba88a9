"""What importing costs, and what may not be imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from speculative_t5 import backend

import pytest
from conftest import REPOSITORY


def python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_importing_brings_in_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, speculative_t5, speculative_t5.cli\n"
        "print([m for m in ('torch', 'transformers', 'huggingface_hub') if m in sys.modules])"
    )
    assert python(code) == "[]"


def test_one_file_imports_mlx_lm() -> None:
    found = [
        path.name
        for path in (REPOSITORY / "speculative_t5").glob("*.py")
        if re.search(r"^\s*(import|from) mlx_lm\b", path.read_text(), re.MULTILINE)
    ]
    assert found == ["causal.py"]


def test_the_public_names_are_there() -> None:
    code = (
        "import speculative_t5 as s; print(all(hasattr(s, name) for name in s.__all__))\n"
        "from speculative_t5 import SpeculativeDecoder, load"
    )
    assert python(code) == "True"


linux_only = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="MLX's BLAS is replaced on Linux only"
)


@linux_only
def test_products_and_openblas_are_loaded_before_mlx_or_a_tip_says_how() -> None:
    code = (
        "from speculative_t5 import backend\n"
        "maps = open('/proc/self/maps').read()\n"
        "print('_products' in maps, 'libopenblas' in maps, *backend.tips)"
    )
    tips = {
        ("True", "True"): "",
        ("True", "False"): "no openblas",
        ("False", "True"): "no products",
        ("False", "False"): "no products no openblas",
    }
    products, openblas, *found = python(code).split(" ", 2)
    assert " ".join(found) == tips[products, openblas]


@linux_only
def test_importing_mlx_first_is_warned_of() -> None:
    code = (
        "import warnings, mlx.core\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    from speculative_t5 import backend\n"
        "print(*backend.tips, *(w.message for w in caught))"
    )
    out = python(code)
    assert out == "" or out.startswith("late mlx.core was imported before speculative_t5")


@linux_only
def test_what_is_missing_is_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "mlx.core")
    monkeypatch.setattr(backend, "OPENBLAS_NAMES", ("libnowhere.so.0",))
    monkeypatch.setattr(backend, "EXTENSION_SUFFIXES", [".nowhere"])
    assert backend.load_blas() == (None, ["no products", "no openblas"])
    tips = {"no products": "C part", "no openblas": "libopenblas0", "no blocks": "of MLX"}
    assert tips.keys() == backend.TIPS.keys() - {"late"}
    for tip, part in tips.items():
        monkeypatch.setattr(backend, "tips", [tip])
        assert part in str(backend.advice())


def test_threads_are_those_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert backend.num_threads() == 3
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    assert backend.num_threads() == 1
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "many")
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert 1 <= backend.num_threads() <= (os.cpu_count() or 1)


@linux_only
@pytest.mark.parametrize(
    ("version_2", "quota", "threads"),
    [
        (True, "200000 100000", 2),
        (True, "150000 100000", 2),
        (True, "max 100000", 64),
        (True, "nonsense", 64),
        (False, "300000", 3),
        (False, "-1", 64),
        (False, None, 64),
    ],
)
def test_threads_are_no_more_than_a_container_may_use(
    version_2: bool,
    quota: str | None,
    threads: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    monkeypatch.setattr(backend, "CPU_MAX", tmp_path / "cpu.max")
    monkeypatch.setattr(backend, "CPU_CFS", tmp_path)
    if version_2:
        (tmp_path / "cpu.max").write_text(f"{quota}\n")
    elif quota:
        (tmp_path / "cpu.cfs_quota_us").write_text(f"{quota}\n")
        (tmp_path / "cpu.cfs_period_us").write_text("100000\n")
    assert backend.num_threads() == threads
