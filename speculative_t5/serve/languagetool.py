"""LanguageTool's protocol, which editors speak: a text goes in, and what may be wrong comes out.

A model says how a text should be, not what is wrong with it: each match is one of the shortest
edits that make the one of the other, and the words of the edit decide its rule.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from .._version import __version__
from ..documents import SENTENCE_LANGUAGES, Piece, RewriteOptions, edits, lines
from ..errors import shown
from ..tokenizers import is_code, language_name, main_region
from .edit_rules import EditRule, message_of, rule_of
from .fields import text_field
from .requests import Refused
from .texts import Partly, Remote, detected, ignore

CONTEXT_AROUND = 40  # characters of a match's context on each side
# Editors check only texts whose language and region are listed. Others have their main region.
LISTED_REGIONS = {
    "en": "US GB AU CA IE IN NZ ZA",
    "de": "DE AT CH",
    "fr": "FR BE CA CH",
    "es": "ES AR MX",
    "pt": "PT BR",
    "nl": "NL BE",
}
SOFTWARE_NAME = {"name": "speculative_t5", "version": __version__, "apiVersion": 1}


def check(fields: dict[str, Any], decoder: Remote, partly: Partly = ignore) -> dict[str, Any]:
    """Answer POST /v2/check: correct a text, and return the edits as matches.

    There are none in a text that is found to be in another language than the model's, and the
    warnings say so.
    With the level picky also those that the model is not sure of. Offsets and lengths are in UTF-16
    code units of what was sent, markup included. `partly` is told of the answer without matches,
    then of the matches of each piece.
    """
    given, text, places = _text_sent(fields)
    codes = codes_corrected(decoder.tokenizer)
    language, sure = text_field(fields, "language"), 1.0
    auto = language == "auto"
    if auto:
        language, sure = detected(text, codes)
    code = re.split("[-_]", language)[0].casefold()
    if not auto and not (code in codes and is_code(language)):
        raise Refused(
            400,
            f"language is {shown(language)}, and the model corrects {_listed_languages(codes)}: "
            "give one of its languages, or auto",
            param="language",
        )
    about: dict[str, Any] = {"name": language_name(language), "code": language}
    about["detectedLanguage"] = {**about, "confidence": sure}
    warnings: dict[str, Any] = {"incompleteResults": code not in codes}
    if code not in codes:
        warnings["incompleteResultsReason"] = (
            f"the text seems to be {language_name(language)} ({language}), and the model corrects "
            f"{_listed_languages(codes)}"
        )
    answer = {"software": SOFTWARE_NAME, "language": about, "warnings": warnings, "matches": []}
    partly(answer)
    options = RewriteOptions(language=code if code in SENTENCE_LANGUAGES else "en")
    document = decoder.document(text if code in codes else "", options)
    units = [0, *accumulate(len(c.encode("utf-16-le")) // 2 for c in given)]
    matches, is_wanted = list[dict[str, Any]](), _wanted(fields)
    for piece in document.rewrite():
        own = [*_matches(piece, code, fields, is_wanted, given, places, units)]
        partly({"matches": own})
        matches += own
    return answer | {"matches": sorted(matches, key=lambda match: match["offset"])}


def _matches(
    piece: Piece,
    language: str,
    fields: dict[str, Any],
    is_wanted: Callable[[EditRule], bool],
    given: str,
    places: Sequence[int],
    units: Sequence[int],
) -> Iterator[dict[str, Any]]:
    """Yield the wanted edits of a piece; `places` and `units` are those of `check`."""
    sentence = " ".join(piece.source.split())
    for start, end, new, rule, message in _edits(
        piece, language, picky=fields.get("level") == "picky"
    ):
        first, last = places[start], places[end - 1] + 1
        is_text = first >= 0 and [*places[start:end]] == [*range(first, last)]
        if not (is_text and is_wanted(rule)):  # or it would change markup
            continue
        before = given[max(0, first - CONTEXT_AROUND) : first]
        behind = given[last : last + CONTEXT_AROUND]
        context = "".join((before, given[first:last], behind))
        yield {
            "message": message,
            "shortMessage": rule.name,
            "offset": units[first],
            "length": units[last] - units[first],
            "replacements": [{"value": new}],
            "context": {
                "text": re.sub(r"\s", " ", context),
                "offset": len(before.encode("utf-16-le")) // 2,
                "length": units[last] - units[first],
            },
            "sentence": sentence,
            "rule": rule.as_json(),
        }


def _listed_languages(codes: Sequence[str]) -> str:
    return ", ".join(f"{language_name(each)} ({each})" for each in codes) or "no language"


def _text_sent(fields: dict[str, Any]) -> tuple[str, str, Sequence[int]]:
    """Return what was sent, the text in it, and where in the one each character of the other is.

    `data` has a text, or parts of text and of markup, which may be read as something else: of
    that, the place is negative.
    """
    if "data" not in fields:
        text = text_field(fields, "text")
        return text, text, range(len(text))
    if fields.get("text"):
        raise Refused(400, "there are both text and data: send one of them", param="data")
    given, text, places = "", "", list[int]()
    try:
        data = fields["data"]
        found = json.loads(data) if isinstance(data, str) else data
        if "text" in found and "annotation" in found:
            raise Refused(400, "data has both text and annotation: send one of them", param="data")
        for part in [{"text": found["text"]}] if "text" in found else found["annotation"]:
            read = part["text"] if "text" in part else part.get("interpretAs") or ""
            start = len(given) if "text" in part else -len(given) - len(read) - 1
            places += range(start, start + len(read))
            given += part["text"] if "text" in part else part["markup"]
            text += read
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise Refused(
            400,
            "data must be an object with text, or with a list annotation of objects with text or "
            "markup: send that, or send text",
            param="data",
        ) from error
    return given, text, places


def _edits(
    piece: Piece, language: str, *, picky: bool
) -> Iterator[tuple[int, int, str, EditRule, str]]:
    """Yield where each edit of a piece begins and ends in the text, its words, rule and message."""
    made, refused = edits(piece.source, piece.output), piece.refused or ""
    fits = refused and len(lines(refused)) == len(lines(piece.source))
    is_held_back = picky and piece.reason and piece.retried is None and fits
    for start, end, new in edits(piece.source, refused) if is_held_back else made:
        previous = piece.source[:start].rsplit(maxsplit=1)[-1:]
        following = piece.source[end:].split(maxsplit=1)[:1]
        rule = rule_of(piece.source[start:end], new, "".join(previous), language)
        message = message_of(rule, [*previous, *new.split(), *following])
        doubt = "" if (start, end, new) in made else f" Held back: {piece.reason}."
        yield piece.start + start, piece.start + end, new, rule, message + doubt


def _wanted(fields: Mapping[str, Any]) -> Callable[[EditRule], bool]:
    """Return what tells whether a request wants the matches of a rule."""
    only = str(fields.get("enabledOnly")).casefold() == "true"
    kind = "enabled" if only else "disabled"
    rules, categories = (
        {*str(fields.get(f"{kind}{what}", "")).split(",")} for what in ("Rules", "Categories")
    )

    def is_wanted(rule: EditRule) -> bool:
        return only == (f"T5_{rule.kind}" in rules or rule.category in categories)

    return is_wanted


def codes_corrected(tokenizer: Any) -> list[str]:
    if tokenizer.corrects is not None:
        return [*tokenizer.corrects]
    return [] if tokenizer.languages.prefixes else [*SENTENCE_LANGUAGES]


def corrects(fields: dict[str, Any], tokenizer: Any) -> bool:
    """Whether a model corrects the language of a request."""
    language, codes = str(fields.get("language")), codes_corrected(tokenizer)
    if language == "auto" and codes:
        language, _ = detected(_text_sent(fields)[1], codes)
    return re.split("[-_]", language)[0].casefold() in codes


def languages_corrected(tokenizer: Any) -> list[dict[str, str]]:
    """Return what GET /v2/languages says of a model.

    One that translates corrects nothing, unless it says so; others may correct any language.
    """
    found = []
    for code in codes_corrected(tokenizer):
        regions = LISTED_REGIONS.get(code, main_region(code)).split()
        for tag in (code, *(f"{code}-{region}" for region in regions)):
            found.append({"name": language_name(tag), "code": code, "longCode": tag})
    return found
