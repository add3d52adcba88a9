"""A test that needs a package which is not installed is skipped, and names it.

So an environment with the extra `dev` alone runs what it can (CONTRIBUTING.md). With the extra
`test` there is nothing to skip: each of these packages is there, and an error stays an error.
"""

import re
from collections.abc import Generator
from importlib.util import find_spec

import pytest

NEEDED_BY_SOME = set(
    "aiohttp cohere ctranslate2 ipykernel jinja2 language_tool_python libretranslatepy matplotlib "
    "mlx_lm nbclient nbformat openai peft pyarrow pylanguagetool ray sacrebleu "
    "sentence_transformers torch transformers".split()
)
NOT_FOUND = re.compile(r"No module named '(\w+)")


def lacking(text: str) -> str | None:
    """Return the package of the set that an error did not find, unless it is installed."""
    found = NOT_FOUND.search(text)
    name = found.group(1) if found else ""
    return name if name in NEEDED_BY_SOME and find_spec(name) is None else None


def skip(report: pytest.CollectReport | pytest.TestReport, path: str, name: str) -> None:
    report.outcome = "skipped"
    report.longrepr = (path, 0, f"Skipped: {name} is not installed")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    name = lacking(str(report.longrepr)) if report.failed else None
    if name:
        skip(report, str(collector.path), name)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    error = call.excinfo.value if call.excinfo and report.failed else None
    while error is not None:
        name = lacking(str(error)) if isinstance(error, ModuleNotFoundError) else None
        if name:
            skip(report, str(item.path), name)
        error = error.__cause__ or error.__context__
    return report
