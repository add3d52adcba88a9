"""Whole files over HTTP: one goes in, and comes back corrected or translated in its own format."""

from __future__ import annotations

from base64 import b64encode
from pathlib import PurePosixPath
from typing import Any

from ..documents import (
    DOCUMENT_NAMES,
    DOCUMENT_SUFFIXES,
    SENTENCE_LANGUAGES,
    PlainFile,
    RewriteOptions,
    check_read,
    format_of,
    is_document,
    read_file,
)
from ..errors import shown
from ..tokenizers import is_code, language_name, same_language
from . import languagetool, libretranslate
from .fields import text_field
from .requests import Refused, refuse
from .texts import Partly, Remote, detected, ignore


def opened_file(fields: dict[str, Any], data: bytes) -> dict[str, Any]:
    """Return fields with the document in a file, whose name says its format, and with its text.

    Raises:
        Refused: If the name says no format that is read.
        ValueError: If the bytes are none of that format.
    """
    path = PurePosixPath(text_field(fields, "name").replace("\\", "/"))
    name, form = path.name, format_of(str(path)) if is_document(str(path)) else None
    check_read(name, form)
    if form is None:
        known = f"a name that ends in one of {', '.join(DOCUMENT_SUFFIXES)}"
        refuse("name", f"{known}, or is {', '.join(DOCUMENT_NAMES)}", name)
    document = read_file(data, name, form)
    if "target" in fields:
        document.translate_into(text_field(fields, "target"))
    own = {"name": name, "document": document, "text": document.text, "q": document.text}
    return {"language": "auto", "source": "auto"} | fields | own


def rewrite_file(fields: dict[str, Any], decoder: Remote, _: Partly = ignore) -> dict[str, Any]:
    """Answer POST /v1/documents: translate a file where there is a target, else correct it.

    Everything that was not done is listed: `kept` has the passages that stayed as they were, with
    the reasons, and `notes` what the reader of the format could not keep or had to leave.
    """
    document: PlainFile = fields["document"]
    options, language = RewriteOptions(), ""
    if "target" in fields:
        language, suffix = _translate_from(fields, decoder), f".{fields['target']}"
        is_done = same_language(fields["target"], language)
    else:
        language, suffix = _language_corrected(fields, decoder.tokenizer), ".corrected"
        code, is_done = language.partition("-")[0], False
        options = RewriteOptions(language=code if code in SENTENCE_LANGUAGES else "en")
    text = "" if is_done else document.text
    made = decoder.document(text, options, document.lines)
    result = made.result(made.settled(made.rewrite()))
    data = document.rewritten(document.text if is_done else result.text)
    path = PurePosixPath(fields["name"])
    return {
        "name": f"{path.stem}{suffix}{path.suffix}",
        "file": b64encode(data).decode(),
        "language": language,
        "passages": len(result.pieces),
        "changed": sum(piece.status == "changed" for piece in result.pieces),
        "kept": [
            {
                "place": document.place(piece.line),
                "text": piece.source,
                "reason": piece.reason,
            }
            for piece in result.kept
        ],
        "notes": document.not_kept(),
    }


def _translate_from(fields: dict[str, Any], decoder: Remote) -> str:
    """Let a decoder translate as is asked for, and return the language of the file."""
    target, source = (text_field(fields, name) for name in ("target", "source"))
    if source == "auto":
        source, _ = detected(
            fields["text"], libretranslate.source_codes(decoder.tokenizer.languages)
        )
    if not same_language(target, source):
        decoder.translate(target, source)
    return source


def _language_corrected(fields: dict[str, Any], tokenizer: Any) -> str:
    """Return the language of a file that is corrected, and refuse one that the model lacks."""
    codes, language = languagetool.codes_corrected(tokenizer), text_field(fields, "language")
    if language == "auto":
        language, _ = detected(fields["text"], codes)
    code = language.partition("-")[0].casefold()
    if not (code in codes and is_code(language)):
        known = ", ".join(f"{language_name(each)} ({each})" for each in codes) or "no language"
        raise Refused(
            400,
            f"the language of the file is {shown(language)}, and the model corrects {known}: "
            "give one of its languages, or a target to translate into",
            param="language",
        )
    return code


def rewrites(fields: dict[str, Any], tokenizer: Any) -> bool:
    """Whether a model does what a request asks for with its file."""
    does = libretranslate.translates if "target" in fields else languagetool.corrects
    return does(fields, tokenizer)
