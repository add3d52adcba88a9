"""LibreTranslate's protocol: texts from one language into another."""

from __future__ import annotations

from typing import Any

from ..documents import Piece, RewriteOptions, WebPage, identifier
from ..tokenizers import language_name
from .requests import refuse
from .texts import Partly, Remote, detected, ignore, text_field

FORMATS = ("text", "html")


def translate(fields: dict[str, Any], decoder: Remote, _: Partly = ignore) -> dict[str, Any]:
    """Answer POST /translate: translate a text, or each of a list of texts.

    With the format html tags stay, and words within them are translated. Passages in which
    something is seen to be wrong stay as they were: `kept` has them with the reasons.
    """
    source, target = (text_field(fields, name) for name in ("source", "target"))
    form, asked = fields.get("format", "text"), fields.get("q")
    if form not in FORMATS:
        refuse("format", "text or html", form)
    texts: list[Any] = asked if isinstance(asked, list) else [asked]
    if not all(isinstance(text, str) for text in texts):
        refuse("q", "a text or a list of texts", asked)
    answer: dict[str, Any] = {}
    if source == "auto":
        codes = {code for code, _ in decoder.tokenizer.languages.prefixes if code}
        source, sure = detected("\n".join(texts), codes or identifier().labels)
        answer["detectedLanguage"] = {"language": source, "confidence": round(100 * sure, 1)}
    decoder.translate(target, source)
    done = [_translated(text, form, decoder) for text in texts]
    outputs = [output for output, _ in done]
    answer["translatedText"] = outputs if isinstance(asked, list) else outputs[0]
    answer["kept"] = [{"text": p.source, "reason": p.reason} for _, kept in done for p in kept]
    return answer


def _translated(text: str, form: str, decoder: Remote) -> tuple[str, list[Piece]]:
    page = WebPage(text.encode(), "q") if form == "html" else None
    options, given = RewriteOptions(), page.text if page else text
    document = decoder.document(given, options, page.breaks if page else "wrapped")
    result = document.result(document.rewrite())
    return page.rewritten(result.text).decode() if page else result.text, result.kept


def fits(fields: dict[str, Any], tokenizer: Any) -> bool:
    """Whether a model translates what a request asks for."""
    source, target = fields.get("source", "auto"), fields.get("target")
    try:
        if source == "auto":
            codes = {code for code, _ in tokenizer.languages.prefixes if code}
            source = detected(str(fields.get("q")), codes)[0] if codes else None
        tokenizer.languages.pair(target, source)
    except ValueError:
        return False
    return True


def languages(tokenizer: Any) -> list[dict[str, Any]]:
    """Return what GET /languages says of a model: from which languages into which it translates.

    Where it takes texts in any language, those are its targets.
    """
    pairs = tokenizer.languages.prefixes
    targets = sorted({target for _, target in pairs})
    found: dict[str, list[str]] = {}
    for source, target in pairs:
        for each in [source] if source else targets:
            if each != target:
                found.setdefault(each, []).append(target)
    return [{"code": source, "name": language_name(source), "targets": sorted(into)}
            for source, into in sorted(found.items())]  # fmt: skip


def detect(fields: dict[str, Any], _: Remote, __: Partly = ignore) -> list[dict[str, Any]]:
    """Answer POST /detect: in which language a text is, the most probable first."""
    found = identifier().rank(text_field(fields, "q"))[:3]
    return [{"language": code, "confidence": round(100 * float(p), 1)} for code, p in found]
