"""The collection of planted bugs can be planted, and its runner tells which of them are seen."""

import ast
from functools import cache
from pathlib import Path

import planted_bugs
import pytest
from conftest import REPOSITORY
from planted_bugs import Bug

BUGS = planted_bugs.read_bugs(REPOSITORY)


@cache
def defined(file: str) -> set[str]:
    tree = ast.parse((REPOSITORY / file).read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds)}


@cache
def dumped(code: str) -> str:
    return ast.dump(ast.parse(code))


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_bug_can_be_planted(bug: Bug) -> None:
    text = (REPOSITORY / bug.file).read_text(encoding="utf-8")
    planted = bug.planted(text)
    assert dumped(planted) != dumped(text) if bug.file.endswith(".py") else planted != text
    test, *_ = planted_bugs.pytest_arguments(bug.test)
    file, *names = test.partition("[")[0].split("::")
    assert defined(file).issuperset(names)


def test_cases_in_brackets_exist(request: pytest.FixtureRequest) -> None:
    """Those of the files that this run of pytest has collected: all of them in a whole run."""
    config, collected = request.config, {item.nodeid for item in request.session.items}
    if config.option.keyword or any("::" in argument for argument in config.args):
        pytest.skip("some tests of these files were not asked for")
    files = {test.partition("::")[0] for test in collected}
    tests = {bug.test for bug in BUGS if "[" in bug.test and bug.test.partition("::")[0] in files}
    assert tests <= collected


def test_names_are_unique() -> None:
    assert len({bug.name for bug in BUGS}) == len(BUGS)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A tiny project with a function and two tests of it."""
    (tmp_path / "speculative_t5").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    (tmp_path / "speculative_t5" / "__init__.py").write_text("def double(x):\n    return 2 * x\n")
    (tmp_path / "tests" / "test_double.py").write_text(
        "import pytest\nfrom speculative_t5 import double\n\n"
        "def test_strict(): assert double(3) == 6\n\n"
        "def test_lenient(): assert double(0) == 0\n\n"
        "def test_broken(): assert double(0) == 1\n\n"
        "@pytest.mark.skip\ndef test_skipped(): pass\n"
    )
    return tmp_path


def test_runner_tells_which_bugs_are_seen(checkout: Path) -> None:
    def bug(name: str, test: str, replace: str = "return 3 * x") -> Bug:
        return Bug("", name, "speculative_t5/__init__.py", "return 2 * x", replace, test)

    file = "tests/test_double.py"
    bugs = [
        bug("seen", f"{file} -k strict"),
        bug("unseen", f"{file}::test_lenient"),
        bug("no syntax", f"{file} -k strict", "return )"),
        bug("no such name", f"{file} -k strict", "return y"),
        bug("fails anyway", f"{file}::test_broken"),
        bug("not run", f"{file}::test_skipped"),
    ]
    lines: list[str] = []
    verdicts = planted_bugs.check(bugs, checkout, report=lines.append)
    ends = ["seen", "NOT SEEN (passed)", "NOT SEEN (pytest ended", "NOT SEEN (NameError: name 'y'",
            "NOT SEEN (without the bug", "skipped"]  # fmt: skip
    for line, (name, verdict), end in zip(lines, verdicts.items(), ends, strict=True):
        assert line.startswith(f"{name} ") and line.endswith(verdict) and end in verdict
    assert "3 * x" not in (checkout / "speculative_t5" / "__init__.py").read_text()


def test_wrong_entries_are_refused(tmp_path: Path) -> None:
    collection = tmp_path / planted_bugs.COLLECTION
    collection.mkdir(parents=True)
    (collection / "room.toml").write_text('[[bug]]\nname = "half an entry"\n')
    for call, message in (
        (lambda: planted_bugs.read_bugs(tmp_path), "room.toml: an entry has the fields name"),
        (lambda: planted_bugs.read_bugs(tmp_path, ["hall"]), "no .*/hall.toml, .* one of: room"),
        (lambda: Bug("", "", "a.py", "x", "y", "").planted("x = x"), "occurs 2 times in a.py"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
