"""Imports, the libraries loaded before MLX, and the number of threads."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import partial
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import speculative_t5
from speculative_t5 import device
from speculative_t5.cpu import libraries

import mlx.core as mx
import pytest
from conftest import REPOSITORY


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (libraries.SWITCH, "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


def python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_importing_loads_no_heavy_package() -> None:
    code = (
        "import sys, speculative_t5, speculative_t5.cli, speculative_t5.models.opt\n"
        "heavy = ('torch', 'transformers', 'huggingface_hub', 'mlx_lm')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    assert python(code) == "[]"
    assert all(hasattr(speculative_t5, name) for name in speculative_t5.__all__)


def test_one_file_imports_mlx_lm() -> None:
    files = (REPOSITORY / "speculative_t5").rglob("*.py")
    pattern = re.compile(r"^\s*(import|from) mlx_lm\b", re.MULTILINE)
    assert [path.name for path in files if pattern.search(path.read_text())] == ["decoder_only.py"]


linux_only = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="MLX's BLAS is replaced on Linux only"
)


@linux_only
def test_mlx_calls_our_products_or_openblas() -> None:
    code = (
        "from speculative_t5.cpu import libraries\n"
        "import ctypes\n"
        "function = ctypes.CDLL(None).cblas_sgemm  # the one that MLX finds first\n"
        "address = ctypes.cast(function, ctypes.c_void_p).value\n"
        "for line in open('/proc/self/maps'):\n"
        "    first, last = (int(part, 16) for part in line.split()[0].split('-'))\n"
        "    if first <= address < last:\n"
        "        print(line.split('/')[-1].strip())\n"
        "print(libraries.parts()['OpenBLAS'])"
    )
    library, openblas = python(code).splitlines()
    built = any(libraries.FOLDER.glob("_products*.so"))
    assert library.startswith("_products" if built else "_openblas")
    assert openblas == "loaded"


@linux_only
def test_importing_mlx_first_gives_a_warning() -> None:
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
    monkeypatch.setenv(libraries.SWITCH, "0")
    code = (
        "from speculative_t5.cpu import layers, libraries\n"
        "maps = open('/proc/self/maps').read()\n"
        "print(libraries.products, layers.library, *sorted(libraries.parts()), end=' ')\n"
        "print('scipy_openblas32' in maps)"
    )
    assert python(code) == "None None OpenBLAS layers products False"


@linux_only
def test_missing_parts_are_not_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(libraries, "FOLDER", tmp_path)
    missing = {"products": "not built", "OpenBLAS": "not built"}
    assert libraries.load_blas() == (None, missing)
    (tmp_path / f"_products{EXTENSION_SUFFIXES[0]}").write_text("not a library")
    (tmp_path / "_openblas.so").write_text("not a library")
    products, parts = libraries.load_blas()
    assert products is None
    assert all(state.startswith("not loaded: ") for state in parts.values())


@pytest.mark.parametrize(("choice", "made"), [("cpu", "DeviceType.cpu"), ("", "")])
def test_the_environment_keeps_mlx_off_a_gpu(
    choice: str, made: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(device.CHOICE, choice)
    code = "import mlx.core; mlx.core.set_default_device = print; import speculative_t5"
    assert python(code) == made


def test_layers_are_built_for_the_version_of_mlx_that_is_installed() -> None:
    project = (REPOSITORY / "pyproject.toml").read_text()
    pinned = re.findall(r'"mlx\[\w+\]==([\w.]+); sys_platform', project)
    assert len(pinned) == 4 and len(set(pinned)) == 1  # to build, to run, on two kinds of GPU


def test_the_environment_sets_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert libraries.num_threads() == 3
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    assert libraries.num_threads() == 1
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "many")
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert 1 <= libraries.num_threads() <= (os.cpu_count() or 1)


@linux_only
@pytest.mark.parametrize(
    ("file", "quota", "threads"),
    [
        ("cpu.max", "200000 100000", 2),
        ("cpu.max", "150000 100000", 2),
        ("cpu.max", "max 100000", 64),
        ("cpu.max", "nonsense", 64),
        ("cpu.cfs_quota_us", "300000", 3),
        ("cpu.cfs_quota_us", "-1", 64),
        ("no such file", "", 64),
    ],
)
def test_threads_stay_within_the_quota_of_a_container(
    file: str, quota: str, threads: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    monkeypatch.setattr(libraries, "CPU_MAX", tmp_path / "cpu.max")
    monkeypatch.setattr(libraries, "CPU_CFS", tmp_path)
    (tmp_path / "cpu.cfs_period_us").write_text("100000\n")
    (tmp_path / file).write_text(f"{quota}\n")
    assert libraries.num_threads() == threads


def test_rooms_import_each_others_faces_only() -> None:
    package = REPOSITORY / "speculative_t5"
    for path in package.glob("*/**/*.py"):
        depth = len(path.relative_to(package).parts)
        deep = re.findall(rf"^\s*from \.{{{depth}}}(\w+\.\w+)", path.read_text(), re.MULTILINE)
        assert not deep, f"{path} imports {deep}"


@pytest.mark.parametrize("chosen", [None, "1"])
def test_float32_is_not_tf32_unless_the_user_says_so(
    chosen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLX_ENABLE_TF32", raising=False)
    if chosen:
        monkeypatch.setenv("MLX_ENABLE_TF32", chosen)
    code = "import speculative_t5.device, os; print(os.environ['MLX_ENABLE_TF32'])"
    assert python(code) == (chosen or "0")


def test_another_device_than_the_cpu_cannot_be_chosen() -> None:
    code = (
        "import os, warnings\n"
        "os.environ['SPECULATIVE_T5_DEVICE'] = 'metal'\n"
        "with warnings.catch_warnings(record=True) as found:\n"
        "    import speculative_t5.device\n"
        "print(found[0].message)"
    )
    message = "SPECULATIVE_T5_DEVICE must be cpu or gpu, got 'metal': MLX's own choice is used"
    assert python(code) == message


class Limits:
    """MLX's memory limits on a Mac that recommends 800 bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, wired: int, cache: int) -> None:
        self.wired, self.cache = wired, cache
        monkeypatch.setattr(device._Process, "limited", False)
        monkeypatch.setattr(device, "on_cpu", lambda: False)
        monkeypatch.setattr(mx.metal, "is_available", lambda: True)
        info = {"max_recommended_working_set_size": 800}
        monkeypatch.setattr(mx, "device_info", lambda: info)
        monkeypatch.setattr(mx, "set_wired_limit", partial(self.set, "wired"))
        monkeypatch.setattr(mx, "set_cache_limit", partial(self.set, "cache"))

    def set(self, name: str, limit: int) -> int:
        before = int(getattr(self, name))
        setattr(self, name, limit)
        return before


@pytest.mark.parametrize(
    ("before", "after"), [((0, 1200), (800, 100)), ((300, 1200), (300, 100)), ((0, 50), (800, 50))]
)
def test_memory_limits_on_metal_are_set_once_and_not_over_the_users(
    before: tuple[int, int], after: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = Limits(monkeypatch, *before)
    device.limit_memory()
    assert (limits.wired, limits.cache) == after
    limits.wired = 7
    device.limit_memory()
    assert limits.wired == 7
    monkeypatch.setattr(device._Process, "limited", False)
    monkeypatch.setattr(device, "on_cpu", lambda: True)
    device.limit_memory()
    assert limits.wired == 7
