"""Build what pyproject.toml cannot express: the extensions, and the shipped models in the package.

The extensions are for Linux only, where MLX computes on the CPU, and they are optional: without a
compiler the package still installs, and MLX gets a copy of OpenBLAS under BLAS's usual names.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

NATIVE = "speculative_t5/kernels/native"
MODELS = ("correct-base", "correct-small")  # in weights/, installed with the package
BLAS_FUNCTIONS = ("cblas_sgemm", "cblas_dgemm", "cblas_cgemm")  # that MLX calls


class Build(build):
    """Builds from scratch: files of an earlier build may be for another Python or MLX."""

    def run(self) -> None:
        shutil.rmtree(self.build_base, ignore_errors=True)
        super().run()


class BuildPackage(build_py):
    """Adds the shipped models, except to an editable install, which finds them in weights/."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            weights = Path(self.build_lib, "speculative_t5", "weights")
            for name in MODELS:
                shutil.copytree(Path("weights", name), weights / name, dirs_exist_ok=True)
            for name in ("README.md", "LICENSE"):  # their attribution
                shutil.copy(Path("weights", name), weights)


class BuildExtensions(build_ext):
    """Compiles every time; if that fails, adds a copy of OpenBLAS instead."""

    def run(self) -> None:
        self.force = True
        products = Path(self.get_ext_fullpath("speculative_t5.kernels._products"))
        openblas = products.parent / "_openblas.so"
        for folder in (products.parent, Path(self.build_lib, "speculative_t5", "kernels")):
            for name in ("_products", "_blocks"):
                Path(folder, self.get_ext_filename(name)).unlink(missing_ok=True)
        openblas.unlink(missing_ok=True)
        super().run()
        if sys.platform.startswith("linux") and not products.exists():
            copy_openblas(openblas)


def copy_openblas(target: Path) -> None:
    """Copy the OpenBLAS of scipy-openblas32, and remove the prefix of the functions MLX calls."""
    try:
        import scipy_openblas32

        library = Path(scipy_openblas32.get_lib_dir(), scipy_openblas32.get_library(fullname=True))
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", suffix=".names") as names:
            names.writelines(f"scipy_{name} {name}\n" for name in BLAS_FUNCTIONS)
            names.flush()
            subprocess.run(
                ["patchelf", "--rename-dynamic-symbols", names.name, "--set-soname", target.name]
                + ["--output", target, library],
                check=True,
            )
    except (ImportError, OSError, subprocess.CalledProcessError) as error:
        target.unlink(missing_ok=True)
        print(f"warning: MLX gets no OpenBLAS, and will be slow on this CPU: {error}")


def description() -> str:
    """Return README.md for a package index, without pictures and links to the repository."""
    text = Path("README.md").read_text(encoding="utf-8")
    text = re.sub(r"!\[[^]]*\]\((?!https?:)[^)]*\)\n*", "", text)
    return re.sub(r"\[([^]]*)\]\((?!https?:)[^)]*\)", r"\1", text)


def products() -> Extension:
    """Return the matrix products and layers in plain C, which do not depend on MLX."""
    return Extension(
        "speculative_t5.kernels._products",
        [f"{NATIVE}/products.c", f"{NATIVE}/layers.c"],
        extra_compile_args=["-O3", "-std=gnu11", "-fvisibility=hidden", "-g0"],
        libraries=["pthread", "m"],
        optional=True,
    )


def blocks() -> list[Extension]:
    """Return the layers as MLX operations, or nothing where MLX or nanobind is not installed."""
    if not (find_spec("mlx") and find_spec("nanobind")):
        return []
    import mlx
    import nanobind

    home = Path(next(iter(mlx.__path__)))
    source = Path(nanobind.source_dir())
    return [
        Extension(
            "speculative_t5.kernels._blocks",
            [f"{NATIVE}/blocks.cpp", f"{NATIVE}/nanobind.cpp"],
            include_dirs=[
                str(home / "include"),
                nanobind.include_dir(),
                str(source),
                str(source.parent / "ext" / "robin_map" / "include"),
            ],
            library_dirs=[str(home / "lib")],
            libraries=["mlx"],
            define_macros=[("NB_DOMAIN", "mlx")],  # to accept MLX's arrays
            extra_compile_args=["-O2", "-std=c++20", "-fvisibility=hidden", "-g0"],
            optional=True,
        )
    ]


setup(
    long_description=description(),
    long_description_content_type="text/markdown",
    ext_modules=[products(), *blocks()] if sys.platform.startswith("linux") else [],
    cmdclass={"build": Build, "build_py": BuildPackage, "build_ext": BuildExtensions},
)
