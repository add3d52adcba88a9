"""What importing costs, and what may not be imported."""

from __future__ import annotations

import subprocess
import sys

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


def test_the_public_names_are_there() -> None:
    code = (
        "import speculative_t5 as s; print(all(hasattr(s, name) for name in s.__all__))\n"
        "from speculative_t5 import SpeculativeDecoder, load"
    )
    assert python(code) == "True"


linux_only = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="OpenBLAS is loaded on Linux only"
)


@linux_only
def test_openblas_is_loaded_before_mlx_or_a_tip_says_how() -> None:
    code = (
        "from speculative_t5 import backend\n"
        "maps = open('/proc/self/maps').read()\n"
        "print(backend.openblas, 'libopenblas' in maps, backend.advice())"
    )
    out = python(code)
    assert out == "loaded True None" or out.startswith("missing False OpenBLAS was not found")


@linux_only
def test_importing_mlx_first_is_warned_of() -> None:
    code = (
        "import warnings, mlx.core\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    from speculative_t5 import backend\n"
        "print(backend.openblas, *(w.message for w in caught))"
    )
    out = python(code)
    assert out == "missing" or out.startswith("late mlx.core was imported before speculative_t5")


@linux_only
def test_a_missing_openblas_is_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "OPENBLAS_NAMES", ("libnowhere.so.0",))
    assert backend.load_openblas() == "missing"
    monkeypatch.setattr(backend, "openblas", "missing")
    assert "apt-get install libopenblas0" in str(backend.advice())
