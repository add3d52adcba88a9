"""What importing costs, and what may not be imported."""

from __future__ import annotations

import subprocess
import sys

import pytest
from conftest import REPOSITORY

from speculative_t5 import backend


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


def test_openblas_is_loaded_before_mlx_or_a_tip_says_how() -> None:
    code = (
        "from speculative_t5 import backend\n"
        "maps = open('/proc/self/maps').read()\n"
        "print(backend.openblas_loaded, 'libopenblas' in maps, backend.advice() is None)"
    )
    if not sys.platform.startswith("linux"):
        assert python("from speculative_t5 import backend; print(backend.advice())") == "None"
    else:
        assert python(code) in ("True True True", "False False False")


def test_openblas_is_not_claimed_when_mlx_came_first() -> None:
    assert "mlx.core" in sys.modules
    if sys.platform.startswith("linux"):
        assert backend.load_openblas() is False


def test_a_missing_openblas_is_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    if not sys.platform.startswith("linux"):
        pytest.skip("OpenBLAS is loaded on Linux only")
    monkeypatch.delitem(sys.modules, "mlx.core")
    monkeypatch.setattr(backend, "OPENBLAS_NAMES", ("libnowhere.so.0",))
    assert backend.load_openblas() is False
