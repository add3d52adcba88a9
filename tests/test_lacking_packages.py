"""What an environment without all packages of the extra `test` runs, and what it skips."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from conftest import REPOSITORY
from lacking_packages import NEEDED_BY_SOME

CONFTEST = """
import lacking_packages
from lacking_packages import pytest_make_collect_report, pytest_runtest_makereport
lacking_packages.NEEDED_BY_SOME.add("not_to_be_had")
"""
AT_ITS_TOP = "import not_to_be_had\ndef test_of_it(): pass\n"
WITHIN = """
import pytest

@pytest.fixture
def made():
    import not_to_be_had.part

def test_by_fixture(made): pass
def test_by_itself(): import not_to_be_had
def test_of_another_error(): import misspelt_name
def test_that_needs_nothing(): pass
"""


def test_tests_that_lack_a_package_are_skipped_and_name_it(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_top.py").write_text(AT_ITS_TOP)
    (tmp_path / "test_within.py").write_text(WITHIN)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", "."],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY / "tests")},
    )
    assert "1 failed, 1 passed, 3 skipped" in done.stdout
    assert len(re.findall(r"SKIPPED.*: not_to_be_had is not installed", done.stdout)) == 2
    assert "No module named 'misspelt_name'" in done.stdout


@pytest.mark.parametrize("extra", ["dev", "test"])
def test_only_the_extra_for_all_tests_has_large_packages(extra: str) -> None:
    """The extra `test` has every package without which tests are skipped; `dev` has none."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras, found, left = project["optional-dependencies"], set[str](), [extra]
    while left:
        for requirement in extras[left.pop()]:
            name, inner = re.findall(r"^([\w-]+)(?:\[([\w,-]+)\])?", requirement)[0]
            if name == project["name"]:
                left += inner.split(",")
            else:
                found.add(name.replace("-", "_"))
    assert NEEDED_BY_SOME & found == (set() if extra == "dev" else NEEDED_BY_SOME)
