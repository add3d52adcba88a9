"""What a build contains: everything without a compiler, and nothing of an earlier build."""

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import mlx.core as mx
import pytest
from conftest import REPOSITORY

BUILT_FROM = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "weights")
TEXTS = ("CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "SECURITY.md", "convert.py")
FOLDERS = ("docs", "notebooks", "scripts", "tests")
MODELS = ("correct-base", "correct-small")


def run_setup(source: Path, *arguments: str, path: str = "", **environment: str) -> str:
    path = path or f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        [sys.executable, "setup.py", "-q", *arguments],
        cwd=source,
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | {"PATH": path} | environment,
    ).stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources, with files that an earlier build left."""
    source = tmp_path_factory.mktemp("source")
    for name in (*BUILT_FROM, *TEXTS, *FOLDERS):
        (source / name).symlink_to(REPOSITORY / name)
    for path in (REPOSITORY / "speculative_t5").glob("**/*"):
        if path.suffix in (".py", ".c", ".h", ".cpp", ".metal", ".typed", ".html"):
            copy = source / path.relative_to(REPOSITORY)
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
    options = ("--dist-dir", "dist", "--compression", "stored")  # compressing takes long
    run_setup(source, "bdist_wheel", *options, **without_compiler)
    (wheel,) = (source / "dist").glob("*.whl")
    folder = tmp_path_factory.mktemp("installed")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def test_wheel_has_the_modules_and_models_and_nothing_else(installed: Path) -> None:
    package, ours = installed / "speculative_t5", REPOSITORY / "speculative_t5"
    found, modules = ({p.relative_to(f) for p in f.rglob("*.py")} for f in (package, ours))
    assert found == modules
    assert not {path.suffix for path in package.rglob("*")} & {".c", ".h", ".cpp"}
    assert (package / "serve" / "page.html").is_file()
    kernels = {path.name for path in (ours / "kernels" / "metal").glob("*.metal")}
    assert {path.name for path in package.rglob("*.metal")} == kernels != set()
    assert "Tatoeba" in (package / "weights" / "README.md").read_text()
    assert "CC BY 2.0 FR" in (package / "weights" / "LICENSE").read_text()
    for name in MODELS:
        files = {path.name for path in (package / "weights" / name).iterdir()}
        assert files == {"config.json", "spiece.model", "weights.npz"}
    (metadata,) = installed.glob("*.dist-info/METADATA")
    text = metadata.read_text()
    assert "Description-Content-Type: text/markdown" in text
    assert "python -m speculative_t5" in text
    links = re.findall(r"\]\(([^)]*)\)", text)
    assert links and all(link.startswith("https://") for link in links)


def test_metadata_names_the_authors_and_both_licences(installed: Path) -> None:
    (folder,) = installed.glob("*.dist-info")
    head, _, _ = (folder / "METADATA").read_text().partition("\n\n")
    about = head.splitlines()
    assert "License-Expression: MIT AND LicenseRef-CC-BY-2.0-FR" in about, "code, and weights"
    licences = {line.partition(": ")[2] for line in about if line.startswith("License-File: ")}
    assert licences == {"LICENSE", "weights/LICENSE"}
    assert all((folder / "licenses" / name).is_file() for name in licences)
    (author,) = [line.partition(": ")[2] for line in about if line.startswith("Author: ")]
    assert author in (REPOSITORY / "CITATION.cff").read_text()
    assert author in (REPOSITORY / "LICENSE").read_text()


USES_BLAS = """
from speculative_t5 import libraries as found
from speculative_t5.kernels import native_parts
import ctypes, numpy as np, mlx.core as mx
print(found.__file__, native_parts()["products"], native_parts()["OpenBLAS"], sep="\\n")
print(bool(ctypes.CDLL(None).cblas_sgemm and ctypes.CDLL(None).cblas_dgemm))
x = np.random.default_rng(0).normal(size=(50, 70)).astype(np.float32)
print(np.allclose(np.array(mx.array(x) @ mx.array(x.T)), x @ x.T, atol=1e-4))
"""


@pytest.mark.linux
@pytest.mark.skipif(mx.cuda.is_available(), reason="MLX for CUDA brings a BLAS of its own")
def test_mlx_gets_openblas_without_a_compiler(installed: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", USES_BLAS],
        cwd=installed,
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": str(installed)},
    )
    file, *states = done.stdout.splitlines()
    assert Path(file) == installed / "speculative_t5" / "libraries.py"
    assert states == ["not built", "loaded", "True", "True"]


def test_source_distribution_has_everything_that_tests_need(source: Path) -> None:
    run_setup(source, "sdist", "--dist-dir", "dist", "--formats", "tar")
    (archive,) = (source / "dist").glob("*.tar")
    with tarfile.open(archive) as files:
        given = {name.partition("/")[2] for name in files.getnames()}
    wanted = {*BUILT_FROM, *TEXTS, "weights/README.md", "weights/LICENSE"}
    for folder in (*FOLDERS, "speculative_t5"):
        for path in (REPOSITORY / folder).glob("**/*"):
            if path.is_file() and path.suffix not in (".pyc", ".so"):
                wanted.add(str(path.relative_to(REPOSITORY)))
    for name in MODELS:
        wanted |= {f"weights/{name}/{file}" for file in ("config.json", "weights.npz")}
    assert wanted <= given
    assert not {name for name in given if name.endswith((".so", ".pyc"))}


def test_an_image_is_built_from_what_a_wheel_is() -> None:
    lines = (REPOSITORY / ".dockerignore").read_text().splitlines()
    kept = {line.removeprefix("!") for line in lines if line.startswith("!")}
    assert all((REPOSITORY / name).exists() for name in kept)
    wanted = {*BUILT_FROM, "speculative_t5", "weights/LICENSE"} - {"weights"}
    assert wanted | {f"weights/{name}" for name in MODELS} <= kept
    recipe = (REPOSITORY / "Dockerfile").read_text()
    assert recipe.rstrip().endswith('speculative-t5", "serve", "--host", "0.0.0.0"]')
    assert "ARG EXTRAS=serve" in recipe


@pytest.mark.linux
def test_package_is_built_where_openblas_cannot_be_copied(source: Path, tmp_path: Path) -> None:
    (tmp_path / "patchelf").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "patchelf").chmod(0o755)
    package = source / "speculative_t5" / "kernels"
    for name in ("_products", "_blocks"):  # of this Python, and of another one
        (package / f"{name}{EXTENSION_SUFFIXES[0]}").touch()
        (package / f"{name}.another.so").touch()
    shown = run_setup(
        source, "build_ext", "--inplace", path=f"{tmp_path}:/usr/bin:/bin", CC="false", CXX="false"
    )
    assert "warning: MLX gets no OpenBLAS" in shown
    left = {path.name for path in package.iterdir() if path.name.startswith(("_pro", "_bl", "_op"))}
    assert left == {"_products.another.so", "_blocks.another.so"}
