"""The page at `/`, which shows outputs as they come, each token shaded by its origin.

`PAGE_HTML` is the whole page, and `PAGE_HEADERS` are to be sent with it: the page loads nothing,
runs no script but its own, and connects to its own server only.
"""

import json
import re
from base64 import b64encode
from hashlib import sha256
from html import escape
from pathlib import Path

from ..documents import DOCUMENT_NAMES, DOCUMENT_SUFFIXES, FILE_FORMATS, NOT_READ
from ..generation import ORIGIN_CSS, ORIGIN_MEANINGS


def _made_page() -> str:
    """Return page.html with notebooks' colours and legend, and with the files that are read."""
    rules = "\n".join(
        f".{kind} {{ {style}; border-radius: 3px }}" for kind, style in ORIGIN_CSS.items() if style
    )
    legend = "\n".join(
        f'      <li><b class="{kind}">{kind}</b> {escape(meaning)}</li>'
        for kind, meaning in ORIGIN_MEANINGS.items()
    )
    page = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    parts = {
        "/* origins */": rules,
        "<!-- legend -->": legend,
        "/* suffixes */": ",".join((*DOCUMENT_SUFFIXES, *_suffixes_of_names(), "text/*")),
        "[/* whole */]": json.dumps(_sent_whole()),
        "{/* refused */}": json.dumps(NOT_READ),
    }
    for place, part in parts.items():
        page = page.replace(place, part)
    return page


def _sent_whole() -> list[str]:
    """Return what the names of files end in, or are, that are more than the text in them."""
    forms = (form for name, form in FILE_FORMATS.items() if name not in TYPED_FORMATS)
    return [*(suffix for form in forms for suffix in form.suffixes), *DOCUMENT_NAMES]


def _suffixes_of_names() -> list[str]:
    """Return the endings of names that browsers may choose files by, for formats told by a name."""
    return sorted({Path(name).suffix for name in DOCUMENT_NAMES})


def _hash(tag: str) -> str:
    """Return the hash by which a policy allows the page's one element of a kind."""
    (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", PAGE_HTML, re.DOTALL)
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"


TYPED_FORMATS = ("txt", "md")  # that people read and write as they are: they open in the box
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
