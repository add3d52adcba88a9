"""What building gives: the package without a compiler, and nothing of an earlier build."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest
from conftest import REPOSITORY

BUILT_FROM = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "weights")
TEXTS = ("CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "SECURITY.md")
GIVEN_ALONG = (*TEXTS, "convert.py", "docs", "notebooks", "scripts", "tests")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources, with what an earlier build left."""
    source = tmp_path_factory.mktemp("source")
    for name in BUILT_FROM + GIVEN_ALONG:
        (source / name).symlink_to(REPOSITORY / name)
    package = source / "speculative_t5"
    for path in (REPOSITORY / "speculative_t5").glob("**/*"):
        if path.suffix in (".py", ".c", ".h", ".cpp", ".typed"):
            copy = package / path.relative_to(REPOSITORY / "speculative_t5")
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.symlink_to(path)
    tag = f"{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
    for folder in ("lib", f"lib.{tag}"):
        stale = source / "build" / folder / "speculative_t5"
        stale.mkdir(parents=True)
        (stale / "left_over.py").touch()
    return source


@pytest.fixture(scope="module")
def installed(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The contents of a wheel that was built without a compiler."""
    without_compiler = {"CC": "false", "CXX": "false"} if sys.platform == "linux" else {}
    build(source, "bdist_wheel", **without_compiler)
    (wheel,) = (source / "dist").glob("*.whl")
    folder = tmp_path_factory.mktemp("installed")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def build(source: Path, what: str, **environment: str) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    subprocess.run(
        [sys.executable, "setup.py", "-q", what, "--dist-dir", "dist"],
        cwd=source, check=True, capture_output=True,
        env=os.environ | {"PATH": path} | environment,
    )  # fmt: skip


def test_a_wheel_has_the_modules_the_models_and_nothing_else(installed: Path) -> None:
    package = installed / "speculative_t5"
    ours = REPOSITORY / "speculative_t5"
    modules = {path.relative_to(ours) for path in ours.rglob("*.py")}
    assert {path.relative_to(package) for path in package.rglob("*.py")} == modules
    assert not list(package.glob("**/*.[ch]*"))
    assert "Tatoeba" in (package / "weights" / "README.md").read_text()
    for name in ("correct-base", "correct-small"):
        files = {path.name for path in (package / "weights" / name).iterdir()}
        assert files == {"config.json", "spiece.model", "weights.npz"}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="MLX's BLAS is Linux's alone")
def test_without_a_compiler_mlx_gets_openblas(installed: Path) -> None:
    code = (
        "from speculative_t5 import device\n"
        "import ctypes, numpy as np, mlx.core as mx\n"
        "print(device.FOLDER, device.parts['products'], device.parts['OpenBLAS'], sep='\\n')\n"
        "print(bool(ctypes.CDLL(None).cblas_sgemm and ctypes.CDLL(None).cblas_dgemm))\n"
        "x = np.random.default_rng(0).normal(size=(50, 70)).astype(np.float32)\n"
        "print(np.allclose(np.array(mx.array(x) @ mx.array(x.T)), x @ x.T, atol=1e-4))\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code] if sys.version_info >= (3, 11) else
        [sys.executable, "-c", code],
        cwd=installed, capture_output=True, text=True, check=True,
        env=os.environ | {"PYTHONPATH": str(installed)},
    )  # fmt: skip
    folder, *states = done.stdout.splitlines()
    assert Path(folder) == installed / "speculative_t5" / "cpu"
    assert states == ["not built", "loaded", "True", "True"]


def test_the_description_has_no_links_that_lead_nowhere(installed: Path) -> None:
    (metadata,) = installed.glob("*.dist-info/METADATA")
    text = metadata.read_text()
    assert "Description-Content-Type: text/markdown" in text
    assert "python -m speculative_t5" in text
    links = re.findall(r"\]\(([^)]*)\)", text)
    assert links
    assert all(link.startswith("https://") for link in links)


def test_the_sources_that_are_given_away_have_what_tests_need(source: Path) -> None:
    build(source, "sdist")
    (archive,) = (source / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as files:
        given = {name.partition("/")[2] for name in files.getnames()}
    wanted = {*BUILT_FROM, *TEXTS, "convert.py", "weights/README.md"}
    for folder in ("docs", "notebooks", "scripts", "tests", "speculative_t5"):
        for path in (REPOSITORY / folder).glob("**/*"):
            if path.is_file() and path.suffix not in (".pyc", ".so"):
                wanted.add(str(path.relative_to(REPOSITORY)))
    for name in ("correct-base", "correct-small"):
        wanted |= {f"weights/{name}/{file}" for file in ("config.json", "weights.npz")}
    assert wanted <= given
    assert not {name for name in given if name.endswith((".so", ".pyc"))}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="extensions are Linux's alone")
def test_the_package_is_built_even_where_openblas_cannot_be_copied(
    source: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "patchelf"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    package = source / "speculative_t5" / "cpu"
    for name in ("_products", "_blocks"):  # of this Python, and of another one
        (package / f"{name}{EXTENSION_SUFFIXES[0]}").touch()
        (package / f"{name}.another.so").touch()
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
        cwd=source, check=True, capture_output=True, text=True,
        env=os.environ | {"CC": "false", "CXX": "false"} | {"PATH": f"{tmp_path}:/usr/bin:/bin"},
    )  # fmt: skip
    assert "warning: MLX gets no OpenBLAS" in done.stdout
    left = {path.name for path in package.iterdir() if path.name.startswith(("_pro", "_bl", "_op"))}
    assert left == {"_products.another.so", "_blocks.another.so"}
