"""The C products of few rows against numpy in float64, and all of the C code under sanitizers."""

import ctypes
import itertools
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from speculative_t5 import libraries
from speculative_t5.kernels import layers

import numpy as np
import pytest
from conftest import REPOSITORY

ROW_MAJOR, COLUMN_MAJOR, NO_TRANSPOSE, TRANSPOSE = 101, 102, 111, 112
SIZES = [(n, k) for n in (1, 3, 4, 17, 64, 384) for k in (1, 7, 16, 33, 384)]
ARRAY, NUMBER, REAL = ctypes.c_void_p, ctypes.c_int, ctypes.c_float
SGEMM = [*[NUMBER] * 6, REAL, ARRAY, NUMBER, ARRAY, NUMBER, REAL, ARRAY, NUMBER]

Product = Callable[..., np.ndarray]


@pytest.fixture(params=[0, 1, 2, 3], ids=["plain", "avx2", "avx512", "vnni"])
def product(request: pytest.FixtureRequest, tmp_path: Path) -> Product:
    return own_copy(tmp_path, level=request.param)


@contextmanager
def using_layers(library: Any) -> Iterator[None]:
    """Let the layers compute by a copy of the library that MLX uses."""
    assert libraries.products
    library.layers.restype = libraries.products.layers.restype = ctypes.c_void_p
    layers.library.initialize(library.layers())
    yield
    layers.library.initialize(libraries.products.layers())


def own_copy(folder: Path, *, rows: int = 10**6, level: int = 2) -> Product:
    """Return a function for alpha x w + beta y, by a copy of the library that MLX uses."""
    built = next(iter(sorted(libraries.KERNELS_FOLDER.glob("_products*.so"))), None)
    if built is None:  # the package works without it, and slower
        pytest.skip("built without a C compiler")
    copy = shutil.copy(built, folder / f"copy{rows}-{level}.so")
    library = ctypes.CDLL(str(copy))
    library.products_init(None, 0, rows, 2, level)
    library.cblas_sgemm.argtypes = SGEMM

    def multiply(
        x: np.ndarray,
        w: np.ndarray,
        transposed: bool = True,
        alpha: float = 1.0,
        beta: float = 0.0,
        y: np.ndarray | None = None,
    ) -> np.ndarray:
        (m, k), n = x.shape, w.shape[0] if transposed else w.shape[1]
        out = np.full((m, n), np.nan, np.float32) if y is None else y.astype(np.float32)
        library.cblas_sgemm(
            ROW_MAJOR,
            NO_TRANSPOSE,
            TRANSPOSE if transposed else NO_TRANSPOSE,
            m,
            n,
            k,
            alpha,
            x.ctypes.data,
            x.strides[0] // 4,
            w.ctypes.data,
            w.strides[0] // 4,
            beta,
            out.ctypes.data,
            n,
        )
        return out

    multiply.library = library  # type: ignore[attr-defined]
    return multiply


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([*shape, seed]).normal(size=shape).astype(np.float32)


def close(found: np.ndarray, x: Any, w: Any) -> bool:
    """Whether an output is within float32's rounding of a sum of products."""
    exact = x.astype(np.float64) @ w.astype(np.float64)
    bound = 1e-6 * (np.abs(x).astype(np.float64) @ np.abs(w) + 1e-3)
    return bool((np.abs(found - exact) <= bound).all())


def test_products_match_numpy(product: Product) -> None:
    for m, (n, k) in itertools.product((1, 2, 5, 6, 7, 12, 13, 17), SIZES):
        x, w = random(m, k), random(n, k, seed=1)
        assert close(product(x, w), x, w.T), (m, n, k)
        assert close(product(x, np.ascontiguousarray(w.T), transposed=False), x, w.T), (m, n, k)


def test_rows_have_the_same_bits_with_any_neighbours(product: Product) -> None:
    """A pass over several tokens gives what passes over each of them give."""
    for n, k in [(384, 384), (70, 50), (1000, 33)]:
        x, w = random(17, k), random(n, k, seed=1)
        for transposed, b in ((True, w), (False, np.ascontiguousarray(w.T))):
            rows = [product(x[i : i + 1], b, transposed=transposed) for i in range(17)]
            alone = np.concatenate(rows)
            for m in (2, 5, 6, 7, 12, 17):
                assert (product(x[:m], b, transposed=transposed) == alone[:m]).all(), (n, k, m)


def test_rows_may_be_part_of_wider_ones_and_scaled(product: Product) -> None:
    x, w, y = random(5, 100)[:, 3:67], random(90, 100, seed=1)[:, :64], random(5, 90, seed=2)
    found = product(x, w, alpha=0.5, beta=2.0, y=y)
    assert np.allclose(found, 0.5 * (x @ w.T) + 2 * y, atol=1e-4)
    b = random(64, 120, seed=3)[:, :90]
    found = product(x, b, transposed=False, alpha=0.5, beta=2.0, y=y)
    assert np.allclose(found, 0.5 * (x @ b) + 2 * y, atol=1e-4)


@pytest.mark.parametrize("order", [ROW_MAJOR, COLUMN_MAJOR])
def test_other_layouts_work_without_a_library(order: int, product: Product) -> None:
    m, n, k = 5, 70, 40
    x, w = random(m, k), random(k, n, seed=1)
    layout: Any = "C" if order == ROW_MAJOR else "F"
    for flips in itertools.product((False, True), repeat=2):
        a, b = (
            np.array(s.T if flip else s, order=layout)
            for s, flip in zip((x, w), flips, strict=True)
        )
        out = np.zeros((m, n), np.float32, order=layout)
        lda, ldb, ldc = (max(s.strides) // 4 for s in (a, b, out))
        transposes = [TRANSPOSE if flip else NO_TRANSPOSE for flip in flips]
        product.library.cblas_sgemm(  # type: ignore[attr-defined]
            order,
            *transposes,
            m,
            n,
            k,
            1.0,
            a.ctypes.data,
            lda,
            b.ctypes.data,
            ldb,
            0.0,
            out.ctypes.data,
            ldc,
        )
        assert close(out, x, w)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(("m", "n"), [(90, 300), (300, 90), (200, 200)])
def test_many_rows_are_shared_only_where_the_library_allows_it(
    tmp_path: Path, shared: bool, m: int, n: int
) -> None:
    """Some builds of OpenBLAS give wrong numbers when two threads call them at once."""
    library, why = libraries.load_openblas()
    assert library, why
    product = own_copy(tmp_path)
    calls: list[tuple[int, int]] = []

    def call(*arguments: Any) -> None:
        calls.append(arguments[3:5])
        function(*arguments)

    signature = ctypes.CFUNCTYPE(None, *SGEMM)
    function = signature(ctypes.cast(library.scipy_cblas_sgemm, ctypes.c_void_p).value)
    given = signature(call)
    product.library.products_init(  # type: ignore[attr-defined]
        ctypes.cast(given, ctypes.c_void_p), shared, 4, 2, 2
    )
    product(random(4, 16), random(8, 16))
    assert not calls, "few rows are multiplied here"
    product(random(5, 16), random(8, 16))
    assert calls == [(5, 8)]
    x, w = random(m, 200), random(n, 200, seed=1)
    for transposed, b in ((True, w), (False, np.ascontiguousarray(w.T))):
        calls.clear()
        assert close(product(x, b, transposed=transposed), x, w.T)
        assert len(calls) > 1 if shared else calls == [(m, n)]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_products_work_in_a_forked_process(tmp_path: Path) -> None:
    product = own_copy(tmp_path)
    x, w = random(3, 384), random(800, 384)
    expected = product(x, w)
    child = os.fork()
    if child == 0:
        same = all((product(x, w) == expected).all() for _ in range(50))
        os._exit(0 if same else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (product(x, w) == expected).all()


NATIVE = REPOSITORY / "speculative_t5" / "kernels" / "native"
SOURCES = [REPOSITORY / "tests" / "native_driver.c", NATIVE / "products.c", NATIVE / "layers.c"]
# Of each its kinds, checks that pass, and a planted fault with its report. Of "undefined" the
# other kinds take most of the time to compile, and see what "address" sees.
SANITIZERS = {
    "address": ("address,alignment,bounds,shift,signed-integer-overflow",
                "all", "overrun", "heap-buffer-overflow"),
    "thread": ("thread", "threads", "race", "data race"),
}  # fmt: skip


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    # Leaks are looked for by a means that containers may forbid.
    settings = os.environ | {"ASAN_OPTIONS": "detect_leaks=0"}
    return subprocess.run(command, env=settings, capture_output=True, text=True, timeout=120)


@pytest.mark.linux  # sanitizers differ elsewhere
@pytest.mark.parametrize("name", SANITIZERS)
def test_sanitizers_report_planted_faults_only(name: str, tmp_path: Path) -> None:
    kinds, checks, fault, report = SANITIZERS[name]
    empty, program = tmp_path / "empty.c", tmp_path / "program"
    empty.write_text("int main(void) { return 0; }\n")
    compiler = ["cc", "-std=gnu11", "-O0", f"-fsanitize={kinds}", f"-I{NATIVE}", "-o", program]
    if shutil.which("cc") is None or run(*compiler, empty).returncode or run(program).returncode:
        pytest.skip(f"no C compiler, or no {name} sanitizer that works on this system")
    built = run(*compiler, "-fno-sanitize-recover=all", *SOURCES, "-lm", "-lpthread")
    assert built.returncode == 0, built.stderr
    done = run(program, checks)
    assert (done.returncode, done.stdout, done.stderr) == (0, "right\n", "")
    done = run(program, fault)
    assert done.returncode and report in done.stderr
