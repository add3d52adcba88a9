"""Loops and libraries that see text from outside, whole ways through them, and hard texts.

What each is given was chosen by what it repeats: the same mark, quotation marks, brackets or tags
that nothing closes, blanks, words that are all alike or all different, lines that nearly are
something. Limits of length are off here, as `unlimited` says.
"""

import io
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from speculative_t5 import errors
from speculative_t5.documents import (
    Document,
    RewriteOptions,
    comparison,
    identifier,
    judging,
    layout,
    read_file,
    rewriting,
    splitting,
    translation,
)
from speculative_t5.generation.outputs import StoppedText
from speculative_t5.tokenizers import Shard, languages, load_tokenizer, read_lines

from growth_patterns import Make

REPOSITORY = Path(__file__).parents[2]
sys.path[:0] = [str(REPOSITORY / "tests")]  # where the decoder is whose outputs are set

Run = Callable[[str], object]

# By the file and the source of a pattern that only the running function knows, an example; None
# if it never sees text from outside.
LOCAL: dict[tuple[str, str], Any] = {
    ("speculative_t5/checkpoints/t5.py", r"f'{stack}\\.block\\.(\\d+)\\.'"): None,
    ("speculative_t5/cli/doctor.py", r"f'{re.escape(spelling)}(?![\\w.-])'"): None,
    (
        "speculative_t5/cli/job.py",
        r"re.escape(Path(output).name) + f'\\.{number}-of-{number}'",
    ): None,
    ("speculative_t5/documents/markdown_marks.py", r"f'</{name}\\s*>' if name else '-->'"): (
        re.compile(r"</script\s*>", re.IGNORECASE)
    ),
    ("speculative_t5/serve/page.py", "f'<{tag}>(.*?)</{tag}>'"): None,
    ("speculative_t5/tokenizers/splitting.py", "'|'.join(names) or '(?!)'"): (
        re.compile("|".join(["</s>", "<pad>", *(f"<extra_id_{i}>" for i in range(100))]))
    ),
}


def repeated(part: str, before: str = "", behind: str = "") -> Make:
    return lambda size: before + part * (size // len(part)) + behind


def numbered(form: str, between: str = " ") -> Make:
    """Words or lines that all differ."""
    return lambda size: between.join(form.format(i) for i in range(size // (len(form) + 3)))


def ever_shorter(mark: str, line: str) -> Make:
    """Runs of a mark, each shorter than the one above, and then lines."""

    def made(size: int) -> str:
        side = int((size // 2) ** 0.5)
        lines = [mark * length for length in range(side, 2, -1)]
        return "\n".join([*lines, *[line] * (size // 2 // len(line))])

    return made


SENTENCE = "He go home. "
TEXTS: dict[str, Make] = {
    "marks of exclamation": repeated("!", "He go home ", " and so on."),
    "question marks": repeated("?!", "He go home ", " and so on."),
    "full stops": repeated(".", "He go home ", " and so on."),
    "quotes opened": repeated("\u201ca ", "He go home. "),
    "quotes in a row": repeated("\u201c"),
    "apostrophes": repeated("'"),
    "guillemets": repeated("\u00aba. "),
    "brackets opened": repeated("(a "),
    "a word": repeated("a"),
    "a word with an end": repeated("a", "He go home ", "."),
    "equal words": repeated("a "),
    "equal words with an end": repeated("He ", "", "go."),
    "different words": numbered("word{}"),
    "every other word different": numbered("the word{}"),
    "sentences": repeated(SENTENCE),
    "lines": repeated(SENTENCE + "\n"),
    "lines that go on": repeated("he go\n"),
    "paragraphs": repeated(SENTENCE + "\n\n"),
    "sentences without blanks": repeated("\u5f7c\u304c\u3002"),
    "one letter and a full stop": repeated("A. "),
    "abbreviations": repeated("Mr. a "),
    "blanks": repeated(" ", "He go home.", "b."),
    "tabs": repeated("\t", "He go home.", "b."),
    "wide blanks": repeated("\u2003", "He go home.", "b."),
    "vertical tabs": repeated("\x0b", "He go home.", "He go."),
    "sentences with vertical tabs": repeated("He go home.\x0b"),
    "words with NUL": repeated("He\0go\0home.\0"),
    "empty lines": repeated("\n", SENTENCE, SENTENCE),
    "ends of lines of a Mac": repeated("He go home.\r"),
    "marks of lists": repeated("- ", "", SENTENCE),
    "marks before sentences": repeated("- He go home. "),
    "numbers of lists": repeated("1. ", "", SENTENCE),
    "quotation marks of mail": repeated("> ", "", SENTENCE),
    "number signs": repeated("#"),
    "bars": repeated("|", "a", "b"),
    "cells": repeated("a | ", "| "),
    "backticks": repeated("`", "a", " b."),
    "fences": repeated("~~~ a\n"),
    "fences ever shorter": ever_shorter("~", "He go."),
    "rules": repeated("- "),
    "marks of notes opened": repeated("[^"),
    "links": repeated("[a](b) "),
    "links within links": repeated("[[a](b)"),
    "emphasis": repeated("*a **b** "),
    "elements without ends": repeated("<pre> a <!-- "),
    "square brackets": repeated("[a", "", "]: "),
    "braces": repeated("{", "a ", " b."),
    "placeholders": repeated("{a} "),
    "a long placeholder": repeated("0", "a %", " b."),
    "percent signs": repeated("%0$"),
    "tags opened": repeated("<a "),
    "a long tag": repeated("a", "<", " b."),
    "tags with quotes": repeated("<a '\" "),
    "tags": repeated("<b>He</b> "),
    "empty tags": repeated("<b> </b>", "He go <i>home</i>", "."),
    "blocks": repeated("<p>He <b>go</b> home.</p>\n"),
    "comments opened": repeated("<!-- ", "", " b."),
    "scripts opened": repeated("<script></script  ", "", " b."),
    "ampersands": repeated("&am"),
    "a long number of a character": repeated("9", "a &#", "; b."),
    "digits": repeated("1.", "a ", " b."),
    "commas": repeated("He go,"),
    "addresses": repeated("a@b."),
    "web addresses": repeated("http://"),
    "combining marks": repeated("\u0301", "He go e"),
    "joined emoji": repeated("\U0001f469\u200d"),
    "accents": repeated("\u00e9. \u00c9"),
    "letters of full width": repeated("\u65e5\u672c"),
}


def turned(text: str) -> str:
    """A rewriting after which hardly any word is known."""
    return " ".join(word[::-1] for word in text.split())


def grown(text: str) -> str:
    """A rewriting that leaves most words."""
    words = text.split()
    words[::7] = [f"{word}s" for word in words[::7]]
    return " ".join(words)


@contextmanager
def unlimited() -> Iterator[None]:
    """Switch off the length that a sentence may have."""
    with patch.object(rewriting, "MAX_READ", 10**9):
        yield


def cued(text: str) -> str:
    """Subtitles: a cue for each paragraph."""
    times = "00:00:01,000 --> 00:00:02,000"
    return "\n\n".join(f"{i}\n{times}\n{each}" for i, each in enumerate(text.split("\n\n"), 1))


def timed(text: str) -> str:
    """Lyrics: a time for each line."""
    return "\n".join(f"[00:01.00]{line}" for line in text.splitlines())


def dialogues(text: str) -> str:
    """SubStation Alpha: a line for each paragraph."""
    begun = "Dialogue: 0,0:00:01.00,0:00:02.00,Default,,0,0,0,,"
    lines = (begun + r"\N".join(each.splitlines()) for each in text.split("\n\n"))
    return "[Events]\n" + "\n".join(lines)


def word_file(text: str) -> bytes:
    """A document of Word: every other word in bold."""
    from docx import Document as Word

    made = Word()
    for line in "".join(c if c >= " " or c in "\r\n" else " " for c in text).splitlines():
        paragraph = made.add_paragraph()
        words = line.split(" ")
        for start in range(0, len(words), max(2, len(words) // 2000)):
            run = paragraph.add_run(
                " ".join(words[start : start + max(2, len(words) // 2000)]) + " "
            )
            run.bold = start % 2 == 0
    file = io.BytesIO()
    made.save(file)
    return file.getvalue()


def _entries(text: str, form: str) -> str:
    """Strings of programs, one for each paragraph."""
    quoted = (json.dumps(each, ensure_ascii=False) for each in text.split("\n\n"))
    return "\n".join(form.format(number, each) for number, each in enumerate(quoted))


def _catalog(text: str) -> str:
    head = 'msgid ""\nmsgstr "Content-Type: text/plain; charset=UTF-8\\n"\n'
    return head + _entries(text, '\nmsgid {1}\nmsgstr ""')


def _notebook(text: str) -> str:
    cells = [
        {"cell_type": "markdown", "metadata": {}, "source": each} for each in text.split("\n\n")
    ]
    return json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5})


def _resources(text: str) -> str:
    found = enumerate(text.split("\n\n"))
    rows = (f'<string name="a{i}">{escape(each)}</string>' for i, each in found)
    return "<resources>\n" + "\n".join(rows) + "\n</resources>\n"


def _string_catalog(text: str) -> str:
    unit = {"state": "translated"}
    strings = {
        f"a{i}": {"localizations": {"en": {"stringUnit": unit | {"value": each}}}}
        for i, each in enumerate(text.split("\n\n"))
    }
    return json.dumps({"sourceLanguage": "en", "strings": strings, "version": "1.0"})


# What puts a text into a file, by how the name of the file ends. Other files are their texts.
FILES: dict[str, Callable[[str], bytes]] = {
    ".docx": word_file,
    **{
        name: (lambda text, made=made: made(text).encode())
        for name, made in (
            (".srt", cued),
            (".vtt", cued),
            (".ass", dialogues),
            (".lrc", timed),
            (".po", _catalog),
            (".ipynb", _notebook),
            (".strings", lambda text: _entries(text, '"a{0}" = {1};')),
            (".xcstrings", _string_catalog),
            ("strings.xml", _resources),
        )
    },
}


@dataclass(frozen=True)
class Whole:
    """The way of the command `document` through a file, with a decoder whose outputs are set."""

    suffix: str
    answer: Callable[[str], str]
    by: Any = None
    languages: tuple[str, str] | None = None

    def __call__(self, text: str) -> object:
        data = FILES[self.suffix](text) if self.suffix in FILES else text.encode()
        form = read_file(data, self.suffix if "." in self.suffix[1:] else f"text{self.suffix}")
        if self.languages:
            form.translate_into(self.languages[1])
        decoder = scripted(self.answer, languages=self.languages)
        with unlimited():
            document = Document(decoder, form.text, RewriteOptions(by=self.by), form.lines)
            done = document.result(document.rewrite())
        form.rewritten(done.text)
        for piece in done.pieces:
            form.number(piece.line)
        form.not_kept()
        return done.to_html()


def split(text: str) -> None:
    for labels, breaks in ((False, "wrapped"), (True, "wrapped"), (True, "cues"), (True, "none")):
        for passage in splitting.paragraphs(text, labels=labels, breaks=breaks):  # type: ignore[arg-type]
            for part in splitting.sentences(text, passage, "en"):
                splitting.is_label(part.flat(text))
                splitting.clauses(text, part)


def judged(text: str) -> None:
    for answer in (turned, grown):
        translation.Translation("de", "en").fault(text, answer(text) or "a")


def arranged(text: str) -> None:
    words = text.split()
    for answer in (turned, grown):
        layout.arranged(words, ["\n"] * (len(words) - 1), answer(text).split())
        layout.similarity(text, answer(text))
        judging.same_facts(text, answer(text))


def compared(text: str) -> None:
    for answer in (turned, grown):
        [*comparison.changes(text, answer(text))]
        comparison.edits(text, answer(text))


@cache
def tokenizer() -> Any:
    return load_tokenizer(REPOSITORY / "weights" / "correct-base")


def tokenized(text: str) -> object:
    return tokenizer().decode(tokenizer().encode(text))


def shown(text: str) -> None:
    from speculative_t5.cli.terminal import one_line

    for show in (one_line, errors.printable, errors.shown):
        show(text)
    errors.first_line(ValueError(text))


class _Characters:
    """A tokenizer whose ids are those of characters."""

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


def stopped(text: str) -> None:
    """A stop string that is as long as the text, and nearly comes."""
    made = StoppedText(_Characters(), [text[: len(text) // 2] + "\x01", "\x02"])  # type: ignore[arg-type]
    for start in range(0, len(text), 4):
        made._passed(text[start : start + 4])
    made.finish()


def lined(text: str) -> None:
    for form, data in (
        ("text", text),
        ("jsonl", json.dumps({"prompt": text})),
        ("jsonl", text),
        ("csv", f"prompt,a\n{text}"),
    ):
        stream = io.BytesIO(data.encode())
        stream.name = "text"  # type: ignore[attr-defined]
        try:
            [*read_lines(stream, form, "prompt", Shard())]  # type: ignore[arg-type]
        except ValueError:
            assert form == "csv"


def named(text: str) -> None:
    found = languages.Languages({("", "de"): "a", ("", "fr"): "b"})
    try:
        found.pair(text, "en")
    except ValueError:
        languages.is_code(text)


def checked(text: str) -> None:
    """LanguageTool's protocol, with a text and with text that is mostly markup."""
    from speculative_t5.serve import languagetool

    with unlimited():
        for answer in (turned, grown):
            languagetool.check({"text": text, "language": "en"}, remote(answer))
        parts = [{"text": each} for each in text.split(" ")[:5000]]
        data = {"annotation": [*parts, {"markup": text}]}
        fields = {"data": data, "language": "auto", "disabledRules": text}
        languagetool.check(fields, remote(grown))


def fielded(text: str) -> None:
    """Bodies of requests: forms, with a boundary that the text nearly has, and JSON."""
    from speculative_t5.serve.fields import parse_fields
    from speculative_t5.serve.requests import Refused

    data, part = text.encode(), b'--aaaa\r\nContent-Disposition: form-data; name="q"\r\n\r\n'
    bodies = {
        "application/x-www-form-urlencoded": b"q=" + data,
        "multipart/form-data; boundary=aaaa": part
        + data.replace(b" ", b"\r\n--aaa")
        + b"\r\n--aaaa--",
        "application/json": data,
    }
    for kind, body in bodies.items():
        with suppress(Refused):
            parse_fields(body, kind, text)


def translated(text: str) -> None:
    """LibreTranslate's protocol."""
    from speculative_t5.serve import libretranslate

    with unlimited():
        for form in ("text", "html"):
            fields = {"q": text, "source": "auto", "target": "de", "format": form}
            libretranslate.translate(fields, remote(turned))


def scripted(answer: Callable[[str], str], **options: Any) -> Any:
    from pieces import Scripted

    return Scripted(answer, limit=10**9, is_steady=True, prefix="", **options)


def remote(answer: Callable[[str], str]) -> Any:
    """A decoder as the server's protocols know it."""
    made = scripted(answer)
    known = languages.Languages({("en", "de"): "a", ("de", "en"): "b"})
    made.tokenizer = SimpleNamespace(languages=known, corrects=["en"], unknown_id=None)
    made.document = lambda text, options, *lines: Document(made, text, options, *lines)
    made.translate = lambda to, source: vars(made).update(languages=(source, to))
    return made


def _loops() -> Iterator[tuple[str, str, Run]]:
    for language in ("en", "de", "ja"):
        yield (
            "documents/splitting.py",
            f"segments in {language} (sentencex)",
            (lambda text, language=language: splitting.segments(language, text)),
        )
    yield "documents/splitting.py", "paragraphs, sentences and clauses", split
    yield "documents/translation.py", "what is wrong with a translation", judged
    yield "documents/translation.py", "language of a text (py3langid)", identifier().classify
    yield "documents/layout.py", "words, lines and similarity (difflib)", arranged
    yield "documents/comparison.py", "changes and edits (difflib)", compared
    yield "tokenizers/t5.py", "ids and back (sentencepiece)", tokenized
    yield "tokenizers/languages.py", "names of languages (langcodes)", named
    yield "tokenizers/prompt_files.py", "lines of prompts (json, csv)", lined
    yield "errors.py", "texts in messages", shown
    yield "generation/outputs.py", "stop strings", stopped
    yield "serve/fields.py", "fields of a request", fielded
    yield "serve/languagetool.py", "/v2/check", checked
    yield "serve/libretranslate.py", "/translate", translated
    for suffix in (".txt", ".md", ".html", *FILES):
        yield "documents", f"document {suffix}, corrected", Whole(suffix, grown)
    for suffix in (".txt", ".md", ".html", *FILES):
        pair = ("de", "en")
        yield "documents", f"document {suffix}, translated", Whole(suffix, turned, None, pair)
    yield "documents", "document .txt by paragraphs", Whole(".txt", grown, "paragraph")


LOOPS: dict[str, tuple[str, Run, dict[str, Make]]] = {
    name: (file, run, TEXTS) for file, name, run in _loops()
}
