"""Imports, the parts that are loaded ahead of MLX, and the number of threads."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from speculative_t5 import device
from speculative_t5.cpu import blocks

import pytest
from conftest import REPOSITORY


@pytest.fixture(autouse=True)
def with_all_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if these tests run with the parts switched off."""
    monkeypatch.delenv(device.SWITCH, raising=False)


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
        for path in (REPOSITORY / "speculative_t5").rglob("*.py")
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
def test_mlx_calls_our_products_or_else_openblas() -> None:
    code = (
        "from speculative_t5 import device\n"
        "import ctypes\n"
        "function = ctypes.CDLL(None).cblas_sgemm  # the one that MLX finds first\n"
        "address = ctypes.cast(function, ctypes.c_void_p).value\n"
        "for line in open('/proc/self/maps'):\n"
        "    first, last = (int(part, 16) for part in line.split()[0].split('-'))\n"
        "    if first <= address < last:\n"
        "        print(line.split('/')[-1].strip())\n"
        "print(device.parts['OpenBLAS'])"
    )
    library, openblas = python(code).splitlines()
    built = any(device.FOLDER.glob("_products*.so"))
    assert library.startswith("_products" if built else "_openblas")
    assert openblas == "loaded"


@linux_only
def test_importing_mlx_first_is_warned_of() -> None:
    code = (
        "import warnings, mlx.core\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    from speculative_t5 import device\n"
        "print(*(w.message for w in caught))"
    )
    assert python(code) == device.LATE


@linux_only
def test_the_switch_leaves_mlx_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(device.SWITCH, "0")
    code = (
        "from speculative_t5 import device\n"
        "from speculative_t5.cpu import blocks\n"
        "print(device.products, blocks.library, *sorted(device.parts), 'scipy_openblas32' in "
        "open('/proc/self/maps').read())"
    )
    assert python(code) == "None None OpenBLAS layers products False"


@linux_only
def test_missing_parts_are_not_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(device, "FOLDER", tmp_path)
    monkeypatch.delenv(device.SWITCH, raising=False)
    missing = {"products": "not built", "OpenBLAS": "not built"}
    assert device.load_blas() == (None, missing)
    (tmp_path / f"_products{EXTENSION_SUFFIXES[0]}").write_text("not a library")
    (tmp_path / "_openblas.so").write_text("not a library")
    products, parts = device.load_blas()
    assert products is None
    assert all(state.startswith("not loaded: ") for state in parts.values())


@linux_only
def test_layers_built_for_another_mlx_are_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    if not blocks.library:
        pytest.skip("the layers were not built")
    monkeypatch.setattr(blocks, "version", lambda package: "0.1")
    built = blocks.library.mlx_version
    assert blocks.load() == (None, f"built for MLX {built}, and 0.1 is installed")


def test_layers_are_built_for_the_version_of_mlx_that_is_installed() -> None:
    project = (REPOSITORY / "pyproject.toml").read_text()
    pinned = re.findall(r'"mlx\[\w+\]==([\w.]+); sys_platform', project)
    assert len(pinned) == 4  # to build, to run, and on two kinds of GPU
    assert len(set(pinned)) == 1


def test_the_environment_sets_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert device.num_threads() == 3
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    assert device.num_threads() == 1
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "many")
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert 1 <= device.num_threads() <= (os.cpu_count() or 1)


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
    monkeypatch.setattr(device, "CPU_MAX", tmp_path / "cpu.max")
    monkeypatch.setattr(device, "CPU_CFS", tmp_path)
    if version_2:
        (tmp_path / "cpu.max").write_text(f"{quota}\n")
    elif quota:
        (tmp_path / "cpu.cfs_quota_us").write_text(f"{quota}\n")
        (tmp_path / "cpu.cfs_period_us").write_text("100000\n")
    assert device.num_threads() == threads
