"""The page at `/`, which shows outputs as they come, each token shaded by its origin.

`PAGE_HTML` is the whole page, and `PAGE_HEADERS` are to be sent with it: the page loads nothing,
runs no script but its own, and connects to its own server only.
"""

import re
from base64 import b64encode
from hashlib import sha256
from html import escape
from pathlib import Path

from ..generation import ORIGIN_CSS, ORIGIN_MEANINGS


def _made_page() -> str:
    """Return page.html with the colours and the legend that notebooks have."""
    rules = "\n".join(
        f".{kind} {{ {style}; border-radius: 3px }}" for kind, style in ORIGIN_CSS.items() if style
    )
    legend = "\n".join(
        f'      <li><b class="{kind}">{kind}</b> {escape(meaning)}</li>'
        for kind, meaning in ORIGIN_MEANINGS.items()
    )
    page = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    return page.replace("/* origins */", rules).replace("<!-- legend -->", legend)


def _hash(tag: str) -> str:
    """Return the hash by which a policy allows the page's one element of a kind."""
    (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", PAGE_HTML, re.DOTALL)
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"


PAGE_HTML = _made_page()
CONTENT_POLICY = (
    f"default-src 'none'; style-src '{_hash('style')}'; script-src '{_hash('script')}'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
PAGE_HEADERS = {
    "Content-Security-Policy": CONTENT_POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
