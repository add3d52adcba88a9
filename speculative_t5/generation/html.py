"""Outputs in notebooks: HTML without scripts, and without anything loaded from elsewhere."""

from collections.abc import Sequence
from dataclasses import replace
from html import escape

from ..decoding import Origin
from .tokens import ORIGIN_MEANINGS, Token

# Half-transparent for light and dark pages; underlines tell origins apart without colour.
ORIGIN_CSS: dict[Origin, str] = {
    "accepted": "background:rgba(46,160,67,.28)",
    "recovered": "background:rgba(219,109,40,.38);border-bottom:2px solid #db6d28",
    "bonus": "background:rgba(56,139,253,.30);border-bottom:2px dotted #388bfd",
    "regular": "",
}
STYLE_SHEET = "".join(
    f".speculative-t5 .{kind}{{{style};border-radius:3px}}" for kind, style in ORIGIN_CSS.items()
)


def as_html(tokens: Sequence[Token], summary: str) -> str:
    """Return HTML with each token shaded by its origin, a legend and a line of totals."""
    if not any(token.text for token in tokens):  # no tokenizer: show ids
        tokens = [replace(token, text=f" {token.id}") for token in tokens]
    text = "".join(map(_token, tokens))
    kinds = [kind for kind in ORIGIN_CSS if any(token.origin == kind for token in tokens)]
    legend = "".join(
        f'<span class="{kind}" style="padding:0 4px;margin-right:6px">{kind}</span>'
        f'<span style="margin-right:14px">{escape(ORIGIN_MEANINGS[kind])}</span>'
        for kind in kinds
    )
    hint = "hover over a token for its round"
    if all(token.p is None for token in tokens):
        hint += "; generate(..., probabilities=True) tells p and q, too"
    return (
        f"<style>{STYLE_SHEET}</style>"
        '<div class="speculative-t5" style="max-width:60em;line-height:1.7">'
        f'<div style="white-space:pre-wrap;font-size:1.1em">{text}</div>'
        f'<div style="font-size:.85em;opacity:.85;margin-top:6px">{legend}</div>'
        f'<div style="font-size:.85em;opacity:.85">{escape(summary)} - {hint}</div>'
        "</div>"
    )


def _token(token: Token) -> str:
    hover = f"round {token.round}: {token.origin}&#10;id {token.id}"
    if token.p is not None:
        q = "" if token.q is None else f", q = {token.q:.3g}"
        hover += f"&#10;p = {token.p:.3g}{q}"
    return f'<span class="{token.origin}" title="{hover}">{escape(token.text)}</span>'
