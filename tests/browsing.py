"""The server's page in a browser: Chromium or Chrome, driven by Playwright."""

import re
import shutil
from importlib.util import find_spec
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
SECONDS = 60  # for anything that is waited for
needs_browser = pytest.mark.skipif(
    BROWSER is None or find_spec("playwright") is None,
    reason="the test needs Chromium and Playwright",
)


def text(page: Any, id: str) -> str:
    return str(page.text_content(f"#{id}"))


def wait_for(page: Any, id: str, beginning: str) -> None:
    from playwright.sync_api import expect

    text = re.compile(f"^{re.escape(beginning)}")
    expect(page.locator(f"#{id}")).to_have_text(text, timeout=1000 * SECONDS)
