"""Imports, the libraries loaded before MLX, and the number of threads."""

import ast
import ctypes
import os
import re
import shutil
import subprocess
import sys
import tomllib
from functools import partial
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import speculative_t5
from speculative_t5 import device, interpreter, libraries

import mlx.core as mx
import pytest
import yaml
from conftest import REPOSITORY, needs_layers
from messages import check_message

is_linux = sys.platform.startswith("linux")
computes_on_cpu = is_linux and not mx.cuda.is_available()


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")
    for name in (libraries.NATIVE_SWITCH, device.DEVICE_VARIABLE, "MLX_ENABLE_TF32", *threads):
        monkeypatch.delenv(name, raising=False)


def python(code: str, **environment: str) -> list[str]:
    """The lines that code prints in a new process."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=REPOSITORY,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def test_importing_loads_no_heavy_package() -> None:
    code = """
import os, sys
import speculative_t5
assert "importlib.metadata" not in sys.modules, "it would take half of the import"
import speculative_t5.cli, speculative_t5.models
from speculative_t5 import libraries
print([name for name in ("torch", "transformers", "huggingface_hub", "mlx_lm")
       if name in sys.modules], os.environ["MLX_ENABLE_TF32"])
"""
    assert python(code) == ["[] 0"]


def test_all_public_names_are_listed_and_imported_when_they_are_used() -> None:
    assert dir(speculative_t5) == speculative_t5.__all__ == sorted(speculative_t5.__all__)
    assert all(hasattr(speculative_t5, name) for name in speculative_t5.__all__)
    code = """
import sys
from speculative_t5 import DecodingOptions, GenerationOptions, SpeculativeDecoder, Token
print("speculative_t5.documents" in sys.modules)
from speculative_t5 import Rewritten
print(Rewritten.__module__)
"""
    assert python(code) == ["False", "speculative_t5.documents.rewriting"]


# What a Python reads before it is told that it is too old.
READ_FIRST = ("convert.py", "speculative_t5/__init__.py", "speculative_t5/interpreter.py")


def test_an_older_python_can_read_what_tells_it_that_it_is_too_old() -> None:
    for name in READ_FIRST:
        tree = ast.parse((REPOSITORY / name).read_text(), feature_version=(3, 7))
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        assert all(node.module != "__future__" for node in imports), "3.6 lacks annotations"


def older_pythons() -> list[str]:
    """Those of this machine that run, and this one, which is told that it is an older one."""
    found = [shutil.which(f"python3.{minor}") for minor in range(6, 11)]
    run = [path for path in found if path and not subprocess.run([path, "-V"]).returncode]
    return [*run, sys.executable]


@pytest.mark.parametrize("command", [["-m", "speculative_t5"], ["convert.py", "--model", "x"]])
def test_an_older_python_gets_one_line(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nif sys.version_info >= (3, 11):\n"
        "    sys.version_info = (3, 9, 18, 'final', 0)\n"
    )
    for program in older_pythons():
        done = subprocess.run(
            [program, *command],
            cwd=REPOSITORY,
            env=os.environ | {"PYTHONPATH": str(tmp_path)},
            capture_output=True,
            encoding="utf-8",
        )
        (line,) = done.stderr.splitlines()
        assert (done.returncode, done.stdout) == (2, "") and line.startswith("error: ")
        check_message(line.removeprefix("error: "), "Python 3.11 or newer")
        # A notebook shows the last line of an error.
        done = subprocess.run(
            [program, "-c", "import speculative_t5"],
            cwd=REPOSITORY,
            env=os.environ | {"PYTHONPATH": str(tmp_path)},
            stderr=subprocess.PIPE,
            encoding="utf-8",
        )
        assert f"ImportError: {line.removeprefix('error: ')}" == done.stderr.splitlines()[-1]


def test_the_version_that_is_needed_is_that_of_pip() -> None:
    needed = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert needed["requires-python"] == ">=" + ".".join(map(str, interpreter.NEEDED))


def test_a_python_without_the_dependencies_is_told_how_to_get_them() -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-m", "speculative_t5"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    (line,) = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (2, "") and line.startswith("error: ")
    check_message(line.removeprefix("error: "), "is not installed for")


def test_a_program_beside_an_installed_package_gets_an_error_that_it_can_catch(
    tmp_path: Path,
) -> None:
    """As `python -m webapp` does, where both are in site-packages; the package's command ends."""
    shutil.copytree(
        REPOSITORY / "speculative_t5",
        tmp_path / "speculative_t5",
        ignore=shutil.ignore_patterns("*.so", "__pycache__"),
    )
    program = tmp_path / "webapp"
    program.mkdir()
    caught = (
        "try:\n    import speculative_t5\nexcept ImportError as error:\n    print(error.name)\n"
    )
    for name in ("__init__.py", "__main__.py"):
        (program / name).write_text(caught)
    (tmp_path / "speculative-t5").write_text("from speculative_t5.cli import main\nmain()\n")

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-S", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    done = run("-m", "webapp")
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["mlx", "mlx"], "")
    for own in (["-m", "speculative_t5"], ["speculative-t5"]):
        done = run(*own)
        assert done.returncode == 2 and "is not installed for" in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_mlx_looks_for_a_compiler_when_a_model_is_loaded(tmp_path: Path) -> None:
    """And not in the first generation, which would take longer."""
    compiler, called = tmp_path / "g++", tmp_path / "called"
    compiler.write_text(f"#!/bin/sh\ntouch '{called}'\n")
    compiler.chmod(0o755)
    code = f"""
from pathlib import Path
from speculative_t5 import SpeculativeDecoder

called = Path({str(called)!r})
decoder = SpeculativeDecoder.from_pretrained("correct-base", None)
print(called.exists())
called.unlink()
print(decoder.generate("correct: He go home.").text, called.exists())
"""
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    assert python(code, PATH=path, **{device.DEVICE_VARIABLE: "cpu"}) == [
        "True",
        "He goes home. False",
    ]


@pytest.mark.linux
def test_mlx_calls_the_blas_that_was_loaded() -> None:
    code = """
import ctypes
from speculative_t5.kernels import native_parts
print(native_parts()["OpenBLAS"])
function = ctypes.CDLL(None).cblas_sgemm  # the one that MLX finds first
address = ctypes.cast(function, ctypes.c_void_p).value
for line in open("/proc/self/maps"):
    first, last = (int(part, 16) for part in line.split()[0].split("-"))
    if first <= address < last:
        print(line.split("/")[-1].strip())
"""
    state, library = python(code)
    assert state == "loaded"
    assert library.startswith(
        "_products" if any(libraries.KERNELS_FOLDER.glob("_products*.so")) else "_openblas"
    )


@pytest.mark.linux
def test_switches_leave_mlx_as_it_is() -> None:
    code = """
import os
from speculative_t5 import libraries
from speculative_t5.kernels import layers, native_parts
maps = open("/proc/self/maps").read()
print(libraries.products, layers.library, *sorted(native_parts()), "scipy_openblas32" in maps,
      os.environ["MLX_ENABLE_TF32"])
"""
    found = python(code, **{libraries.NATIVE_SWITCH: "0", "MLX_ENABLE_TF32": "1"})
    assert found == ["None None OpenBLAS layers products False 1"]


FREED = """
import resource
import speculative_t5
import mlx.core as mx

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    mx.eval([mx.random.uniform(shape=(2**19 + 1024 * i,)) for i in range(24)])
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

first = faults()
print(first, min(faults() for _ in range(3)))
"""


@pytest.mark.linux
def test_freed_memory_is_kept_unless_the_environment_says_otherwise() -> None:
    """Memory that is mapped anew costs a fault for each page, of 4 KiB."""
    if not hasattr(ctypes.CDLL(None), "mallopt"):
        pytest.skip("another C library than glibc")
    found = {}
    for name, changes in (("kept", {}), ("not", {"MALLOC_TRIM_THRESHOLD_": "131072"})):
        command = [sys.executable, "-c", FREED]
        out = subprocess.check_output(command, cwd=REPOSITORY, env=os.environ | changes, text=True)
        first, found[name] = map(int, out.split())
        assert first > 24 * 2**19 * 4 / 4096 / 2
    assert found["kept"] < 100 < 1000 < found["not"]


@needs_layers
@pytest.mark.parametrize(("limit", "most"), [("portable", 0), ("AVX2", 1), ("vnni", 3), ("", 4)])
def test_instructions_may_be_limited(limit: str, most: int) -> None:
    code = "from speculative_t5 import libraries; print(libraries.products.products_level())"
    (every,) = python(code, **{libraries.NATIVE_SWITCH: ""})
    assert python(code, **{libraries.NATIVE_SWITCH: limit}) == [str(min(most, int(every)))]


@needs_layers
def test_unknown_instructions_give_a_warning() -> None:
    code = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from speculative_t5 import libraries
print(*[warning.message for warning in caught])
"""
    (said,) = python(code, **{libraries.NATIVE_SWITCH: "avx3"})
    assert "must be one of 0, 1, portable, avx2, avx512, vnni, amx, got 'avx3': all" in said


OTHER = "SPECULATIVE_T5_DEVICE must be cpu or gpu, got 'metal': MLX's own choice is used"


@pytest.mark.parametrize(
    ("choice", "said"), [("", []), ("cpu", ["DeviceType.cpu"]), ("metal", [OTHER])]
)
def test_the_device_may_be_the_cpu_and_importing_mlx_first_gives_a_warning(
    choice: str, said: list[str]
) -> None:
    code = """
import warnings, mlx.core
mlx.core.set_default_device = print
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import speculative_t5
for warning in caught:
    print(warning.message)
"""
    found = python(code, **{device.DEVICE_VARIABLE: choice})
    assert sorted(found) == sorted([*said, *[device.LATE_IMPORT] * computes_on_cpu])


@pytest.mark.linux
def test_missing_parts_are_not_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(libraries, "KERNELS_FOLDER", tmp_path)
    missing = {"products": "not built", "OpenBLAS": "not built"}
    assert libraries.load_blas() == (None, missing)
    (tmp_path / f"_products{EXTENSION_SUFFIXES[0]}").write_text("not a library")
    (tmp_path / "_openblas.so").write_text("not a library")
    products, parts = libraries.load_blas()
    assert products is None
    assert all(state.startswith("not loaded: ") for state in parts.values())


def test_layers_are_built_for_the_version_of_mlx_that_is_installed() -> None:
    project = (REPOSITORY / "pyproject.toml").read_text()
    pinned = re.findall(r'"mlx\[\w+\]==([\w.]+); sys_platform', project)
    assert len(pinned) == 4 and len(set(pinned)) == 1  # to build, to run, on two kinds of GPU


def test_no_system_gets_an_mlx_that_nobody_has_read() -> None:
    """What is relied on was read in the sources of MLX 0.32."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    needed = [each for each in project["dependencies"] if re.match(r"mlx\b(?!-)", each)]
    assert len(needed) == 2
    assert all("==0.32." in each or ",<0.33;" in each for each in needed)


@pytest.mark.parametrize("name", ["test", "wheels"])
def test_jobs_have_time_limits_and_use_float32_on_a_hosted_mac(name: str) -> None:
    text = (REPOSITORY / ".github" / "workflows" / f"{name}.yml").read_text()
    jobs = yaml.safe_load(text)["jobs"]
    assert all(0 < job["timeout-minutes"] <= 120 for job in jobs.values())
    if name == "wheels":
        (*_, run, _) = jobs["macos"]["steps"]
        assert run["run"].splitlines()[-1] == "venv/bin/speculative-t5 --dtype float32"


def test_threads_are_as_the_environment_says_or_the_quota_of_a_container(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert libraries.num_threads() == 3
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    assert libraries.num_threads() == 1
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "many")
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert 1 <= libraries.num_threads() <= (os.cpu_count() or 1)
    if not is_linux:
        return
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    monkeypatch.setattr(libraries, "CPU_MAX", tmp_path / "cpu.max")
    assert libraries.num_threads() == 64, "no control groups"
    for quota, threads in (
        ("200000 100000", 2),
        ("150000 100000", 2),
        ("max 100000", 64),
        ("nonsense", 64),
    ):
        (tmp_path / "cpu.max").write_text(f"{quota}\n")
        assert libraries.num_threads() == threads, quota


def test_rooms_import_each_others_faces_only() -> None:
    package = REPOSITORY / "speculative_t5"
    for path in package.rglob("*.py"):
        depth, text = len(path.relative_to(package).parts), path.read_text()
        deep = rf"^\s*from \.{{{depth}}}(\w+\.\w+)"
        assert depth == 1 or not re.findall(deep, text, re.MULTILINE), path


@pytest.mark.parametrize(
    ("before", "after"), [((0, 1200), (800, 100)), ((300, 1200), (300, 100)), ((0, 50), (800, 50))]
)
def test_memory_limits_on_metal_are_set_once_and_not_over_the_users(
    before: tuple[int, int], after: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a Mac that recommends 800 bytes."""
    limits = dict(zip(("wired", "cache"), before, strict=True))

    def replaced(name: str, limit: int) -> int:
        previous, limits[name] = limits[name], limit
        return previous

    monkeypatch.setattr(device, "on_cpu", lambda: False)
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": 800})
    for name in limits:
        monkeypatch.setattr(mx, f"set_{name}_limit", partial(replaced, name))
    monkeypatch.setattr(device._Process, "limited", False)
    device.limit_memory()
    assert tuple(limits.values()) == after
    limits["wired"] = 7
    device.limit_memory()
    assert limits["wired"] == 7
    monkeypatch.setattr(device._Process, "limited", False)
    monkeypatch.setattr(device, "on_cpu", lambda: True)
    device.limit_memory()
    assert limits["wired"] == 7
