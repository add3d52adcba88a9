"""LibreTranslate's protocol: texts from one language into another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..documents import PLAIN_LINES, Piece, RewriteOptions, WebPage, identifier
from ..tokenizers import Languages, language_name, same_language
from .fields import text_field
from .requests import refuse
from .texts import (
    MIN_WORDS,
    SURE_PROBABILITY,
    Partly,
    Remote,
    detected,
    ignore,
    is_surely_other,
    number_of_words,
)

TEXT_FORMATS = ("text", "html")


def translate(fields: dict[str, Any], decoder: Remote, _: Partly = ignore) -> dict[str, Any]:
    """Answer POST /translate: translate a text, or each of a list of texts.

    With the format html tags stay, and words within them are translated. Passages in which
    something is seen to be wrong stay as they were: `kept` has them with the reasons, `passages` is
    how many there are in all, and the `warnings` say so. With the source auto each text of a list
    is in a language of its own. A text that is in the target language already stays as it is.
    """
    source, target = (text_field(fields, name) for name in ("source", "target"))
    form, asked = fields.get("format", "text"), fields.get("q")
    if form not in TEXT_FORMATS:
        refuse("format", "text or html", form)
    texts = _texts_sent(asked)
    given = [Given(text, form) for text in texts]
    sources, answer = [source] * len(texts), dict[str, Any]()
    if source == "auto":
        found = _detected(given, target, decoder.tokenizer.languages)
        sources = [code for code, _ in found]
        said = [_as_json(*each) for each in found]
        answer["detectedLanguage"] = said if isinstance(asked, list) else said[0]
    done = [
        each.translated(code, target, decoder) for each, code in zip(given, sources, strict=True)
    ]
    outputs = [output for output, _ in done]
    pieces = [piece for _, some in done for piece in some]
    kept = [piece for piece in pieces if piece.status == "kept"]
    answer["translatedText"] = outputs if isinstance(asked, list) else outputs[0]
    answer["kept"] = [{"text": piece.source, "reason": piece.reason} for piece in kept]
    answer["passages"] = len(pieces)
    return answer | {"warnings": _warnings(len(kept), len(pieces))}


def _texts_sent(asked: object) -> list[str]:
    texts: list[Any] = asked if isinstance(asked, list) else [asked]
    if not all(isinstance(text, str) for text in texts):
        refuse("q", "a text or a list of texts", asked)
    return texts


class Given:
    """A text to translate, or a page of HTML."""

    def __init__(self, text: str, form: str) -> None:
        self._text = text
        self._page = WebPage(text.encode(), "q") if form == "html" else None

    @property
    def words(self) -> str:
        """What there is to translate."""
        return self._page.text if self._page else self._text

    def translated(self, source: str, target: str, decoder: Remote) -> tuple[str, Sequence[Piece]]:
        """Return the translation and its pieces; a text in the target language has none."""
        if same_language(target, source):
            return self._text, ()
        decoder.translate(target, source)
        lines = self._page.lines if self._page else PLAIN_LINES
        document = decoder.document(self.words, RewriteOptions(), lines)
        result = document.result(document.rewrite())
        text = self._page.rewritten(result.text).decode() if self._page else result.text
        return text, result.pieces


def _warnings(kept: int, pieces: int) -> dict[str, Any]:
    """Say in the way of LanguageTool that not all has been translated."""
    if not kept:
        return {"incompleteResults": False}
    part = f"{kept:,} of {pieces:,} passages stayed as they were"
    reason = "nothing was translated" if kept == pieces else part
    return {"incompleteResults": True, "incompleteResultsReason": f"{reason}: see kept"}


def _as_json(code: str, probability: float) -> dict[str, Any]:
    return {"language": code, "confidence": round(100 * float(probability), 1)}


def source_codes(languages: Languages) -> set[str]:
    """Return the languages from which a model translates; the targets, if it takes any."""
    pairs = languages.prefixes
    return {source for source, _ in pairs if source} or {target for _, target in pairs}


def _detected(given: Sequence[Given], target: str, languages: Languages) -> list[tuple[str, float]]:
    """Return the language of each text, and how probable it is.

    Texts of a list that are too short to tell, or seem to be in a language that is not translated,
    are in that of all texts together.
    """
    codes = source_codes(languages)
    whole = detected("\n".join(each.words for each in given), codes)
    if len(given) == 1:
        return [whole]
    found = []
    for each in given:
        own = detected(each.words, codes)
        tells = number_of_words(each.words) >= MIN_WORDS or own[1] >= SURE_PROBABILITY
        found.append(own if tells and _translates(languages, target, own[0]) else whole)
    return found


def _translates(languages: Languages, target: str, source: str | None) -> bool:
    try:
        if not (languages.prefixes and source and same_language(target, source)):
            languages.pair(target, source)
    except ValueError:
        return False
    return True


def translates(fields: dict[str, Any], tokenizer: Any) -> bool:
    """Whether a model translates what a request asks for."""
    source, target, asked = fields.get("source", "auto"), fields.get("target"), fields.get("q")
    languages: Languages = tokenizer.languages
    if source == "auto" and (codes := source_codes(languages)):
        form = str(fields.get("format", "text"))
        texts = map(str, asked if isinstance(asked, list) else [asked])
        source = detected("\n".join(Given(text, form).words for text in texts), codes)[0]
    return isinstance(target, str) and _translates(languages, target, source)


def languages_translated(tokenizer: Any) -> list[dict[str, Any]]:
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
    return [
        {"code": source, "name": language_name(source), "targets": sorted(into)}
        for source, into in sorted(found.items())
    ]


def detect(fields: dict[str, Any], decoder: Remote, _: Partly = ignore) -> list[dict[str, Any]]:
    """Answer POST /detect: which of the served languages a text is in, the most probable first.

    A text that is surely in none of them has a confidence near 0 in each. The texts of a list are
    taken together.
    """
    text = "\n".join(_texts_sent(fields.get("q")))
    known = {code.partition("-")[0]: code for code in decoder.served}
    labels = sorted(known.keys() & {*identifier().labels})
    if len(labels) < 2 or is_surely_other(text, known):
        found = identifier().rank(text)
        found = [(code, p) for code, p in found if code in labels or len(labels) < 2]
    else:
        found = identifier(*labels).rank(text)
    return [_as_json(known.get(code, code), p) for code, p in found[:3]]
