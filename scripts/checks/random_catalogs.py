r"""Random files of translators and of notebooks: what makes one, and what of it is to stay.

    python scripts/checks/random_catalogs.py                  # 100,000 of each format
    python scripts/checks/random_catalogs.py po --count 1000 --seed 7

`random_documents.py` corrects such files. Here they are translated by decoders that write each word
anew, and leave some lines. Then a string of which no line changed has its bytes, translations hold
the words and the placeholders in their order, and nothing else is new. Other programs' readers say
what is in a file: Python's json and ElementTree, and a small one for catalogs of gettext.
"""

from __future__ import annotations

import json
import random
import re
import time
from ast import literal_eval
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from speculative_t5.documents import read_file

import typer
from random_markdown import markdown, skeleton_of_markdown
from random_strings import (
    JSON,
    PO,
    android,
    android_strings,
    apple,
    apple_strings,
    is_translation,
    skeleton_of_android,
    skeleton_of_apple,
    skeleton_of_strings,
    string,
)
from random_words import WORD, Skeleton, Words

# --- gettext


def po(words: Words) -> bytes:
    """Return a catalog of gettext."""
    draw = words.draw
    count = draw.choice([1, 2, 3])
    rules = {1: "0", 2: "(n != 1)", 3: "(n==1 ? 0 : n<5 ? 1 : 2)"}
    header = (
        '# A head.\nmsgid ""\nmsgstr ""\n"Content-Type: text/plain; charset=UTF-8\\n"\n'
        f'"Plural-Forms: nplurals={count}; plural={rules[count]};\\n"\n'
    )
    entries = [header, *(_po_entry(words, count) for _ in range(draw.randint(1, 4)))]
    if draw.random() < 0.3:
        entries.insert(1, '#, fuzzy\n#~ msgid "a 1 b"\n#~ msgstr "c"\n')
    text = "\n".join(entries)
    return (text.replace("\n", "\r\n") if draw.random() < 0.2 else text).encode()


def _po_entry(words: Words, count: int) -> str:
    draw, lines = words.draw, []
    for line in ("#  a note", "#. an extracted note", "#: a.c:12", "#, c-format", '#| msgid "a"'):
        if draw.random() < 0.3:
            lines.append(line)
        if line == "#: a.c:12" and draw.random() < 0.1:
            lines.append("#, fuzzy")
    if draw.random() < 0.3:
        lines.append('msgctxt "menu"')
    lines.append(f"msgid {_literals(words, '1')}")
    is_empty = draw.random() < 0.5

    def translation() -> str:
        return '""' if is_empty or draw.random() < 0.1 else _literals(words, "")

    if draw.random() < 0.4:
        lines.append(f"msgid_plural {_literals(words, '1')}")
        lines += [f"msgstr[{i}] {translation()}" for i in range(count)]
        if is_empty and draw.random() < 0.3 and count > 1:
            lines.pop()
    else:
        lines.append(f"msgstr {translation()}")
    return "\n".join(lines) + "\n"


def _literals(words: Words, least: str) -> str:
    """Return a string in one literal or several, at whose borders no word is divided."""
    raw = string(words, PO) or least
    if words.draw.random() < 0.5:
        return f'"{raw}"'
    parts = re.findall(r"(?:[^\\ ]|\\[^n])+(?:\\n| +)?|\\n| +", raw)
    some = ["", *parts] if words.draw.random() < 0.5 else parts
    return '"\n"'.join(some).join('""') if some else '""'


LANGUAGE = "de"

_PO_STRING = re.compile(r'(msg\w+(?:\[\d\])?)((?:\s+"(?:[^"\\]|\\.)*")+)')


def po_strings(data: bytes) -> list[str]:
    """Return what stands between the outer quotation marks of all strings."""
    text = re.sub(r"#[^\r\n]*", "", data.decode())
    return [found[2].strip()[1:-1] for found in _PO_STRING.finditer(text)]


_PO_TRANSLATION = re.compile(r'^msgstr(?:\[\d\])?((?:\s+"(?:[^"\\]|\\.)*")+)', re.MULTILINE)


def skeleton_of_po(data: bytes) -> Skeleton:
    """Return all but the words of translations."""
    return skeleton_of_strings(data, _PO_TRANSLATION)


def faults_of_translated_po(before: bytes, after: bytes, asked: dict[str, str]) -> Iterator[str]:
    """Yield what is wrong with a catalog that was translated."""
    old, new = (each.decode().replace("\r\n", "\n").split("\n\n") for each in (before, after))
    if len(old) != len(new):
        yield "there are more or fewer entries"
        return
    if before.count(b"\r") != 0 and after.count(b"\r") != after.count(b"\n"):
        yield "a line end is another one"
    for first, second in zip(old, new, strict=True):
        yield from _faults_of_entry(first, second, asked)


def _faults_of_entry(first: str, second: str, asked: dict[str, str]) -> Iterator[str]:
    def parts(entry: str) -> tuple[str, dict[str, str]]:
        found = {each[1]: literal_texts(each[2]) for each in _PO_STRING.finditer(entry)}
        head = re.sub(r"(#,) fuzzy(?:, |,|$)", r"\1 ", entry, flags=re.MULTILINE)
        head = re.sub(r"^#, *\n", "", head, flags=re.MULTILINE)
        return re.sub(r"(?m)^msgstr[\s\S]*", "", re.sub("#, *", "#, ", head)), found

    (head, old), (new_head, new) = parts(first), parts(second)
    if first == second or "#~" in first:
        if first != second:
            yield "an entry that is out of use has changed"
        return
    if head != new_head:
        yield f"more than translations has changed: {new_head!r}"
    if "#, fuzzy" not in second:
        yield "a translated entry is not marked as fuzzy"
    for name, text in new.items():
        if not name.startswith("msgstr") or text == old.get(name, ""):
            continue
        if old.get(name, ""):
            yield f"{name} was there, and is another one"
        sources = [old[each] for each in ("msgid", "msgid_plural") if each in old]
        if not any(is_translation(source, text, asked) for source in sources):
            yield f"{text!r} is no translation of {sources}"


def literal_texts(literals: str) -> str:
    """Return what literals say, as C reads them."""
    return "".join(map(literal_eval, re.findall(r'"(?:[^"\\]|\\.)*"', literals)))


# --- Xcode


def xcstrings(words: Words) -> bytes:
    """Return a string catalog of Xcode."""
    draw = words.draw
    entries = []
    for number in range(draw.randint(1, 4)):
        kind = draw.random()
        members = {}
        if draw.random() < 0.3:
            members["comment"] = '"a note"'
        if number == 0:  # not all of the file is ASCII, whatever becomes of its words
            members["comment"] = '"é"'
        languages = {}
        if draw.random() < 0.3:
            languages["fr"] = _unit('"un"')
        if draw.random() < 0.2:
            languages[LANGUAGE] = _unit('""', "new") if draw.random() < 0.5 else _unit('"da"')
        if kind < 0.5:
            languages["en"] = _unit(f'"{string(words, JSON)}"')
        elif kind < 0.7:
            languages["en"] = _forms(words)
        if languages or draw.random() < 0.1:
            members["localizations"] = _members(languages)
        if draw.random() < 0.1:
            members["shouldTranslate"] = "false"
        name = f"key.{number}" if kind < 0.7 else string(words, JSON) + f" {number}"
        entries.append((name, _members(dict(sorted(members.items())))))
    strings = ",".join(f'"{name}":{value}' for name, value in entries)
    text = f'{{"sourceLanguage":"en","strings":{{{strings}}},"version":"1.0"}}'
    return _styled(text, draw).encode()


def _unit(value: str, state: str = "translated") -> str:
    return f'{{"stringUnit":{{"state":"{state}","value":{value}}}}}'


def _forms(words: Words) -> str:
    kind, names = words.draw.choice(
        [("plural", ("one", "other")), ("device", ("iphone", "mac", "other"))]
    )
    units = {name: _unit(f'"{string(words, JSON)}"') for name in names}
    return f'{{"variations":{{"{kind}":{_members(units)}}}}}'


def _members(members: dict[str, str]) -> str:
    inner = ",".join(f'"{name}":{value}' for name, value in members.items())
    return f"{{{inner}}}"


def _styled(text: str, draw: random.Random) -> str:
    """Return JSON of one line as Xcode writes it, as Python does, or as it is."""
    if draw.random() < 0.2:
        return text
    colon, step = draw.choice([(" : ", "  "), (": ", " "), (": ", "    ")])
    made, depth = [], 0
    for token in re.findall(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+', text):
        if token in "}]":
            depth -= 1
            made.append("\n" + step * depth)
        made.append(colon if token == ":" else token)
        if token in "{[":
            depth += 1
        if token in "{[,":
            made.append("\n" + step * depth)
    end = draw.choice(["", "\n"])
    return "".join(made) + end


_JSON_VALUE = re.compile(r'"value"\s*:\s*"((?:[^"\\]|\\.)*)"')


def skeleton_of_xcstrings(data: bytes) -> Skeleton:
    """Return all but the words of values."""
    json.loads(data)
    return skeleton_of_strings(data, _JSON_VALUE)


def xcstrings_strings(data: bytes) -> list[str]:
    """Return all values."""
    return _JSON_VALUE.findall(data.decode())


def faults_of_translated_xcstrings(
    before: bytes, after: bytes, asked: dict[str, str]
) -> Iterator[str]:
    """Yield what is wrong with a string catalog that was translated."""
    old, new = json.loads(before), json.loads(after)
    for name, entry in new["strings"].items():
        was = old["strings"][name]
        languages, had = entry.get("localizations", {}), was.get("localizations", {})
        made = languages.get(LANGUAGE)
        if made is None or made == had.get(LANGUAGE):
            continue
        if had.get(LANGUAGE, _NEW_UNIT) != _NEW_UNIT:
            yield f"a translation of {name!r} was there, and is another one"
        source = had.get("en", json.loads(_unit(json.dumps(name))))
        for first, second in zip(_values(source), _values(made), strict=True):
            is_same = first["value"] == second["value"]
            if not (is_same or is_translation(first["value"], second["value"], asked)):
                yield f"{second['value']!r} is no translation of {first['value']!r}"
            if second["state"] != "needs_review":
                yield f"a translation of {name!r} has another state"
        if LANGUAGE in had:
            languages[LANGUAGE] = had[LANGUAGE]
        else:
            del languages[LANGUAGE]
        if not languages and "localizations" not in was:
            del entry["localizations"]
    if [*new["strings"]] != [*old["strings"]] or new != old:
        yield "more than translations has changed"
    if "\n" in before.decode().strip() and re.search(
        r'\{[^\n{}]*"de"|"de"[^\n]*\}', after.decode()
    ):
        yield "what was added has not the file's style"


_NEW_UNIT = json.loads(_unit('""', "new"))


def _values(node: Any) -> Iterator[dict[str, str]]:
    for name, each in node.items():
        if name == "stringUnit":
            yield each
        elif isinstance(each, dict):
            yield from _values(each)


# --- Notebooks


def ipynb(words: Words) -> bytes:
    """Return a notebook of Jupyter."""
    draw, cells = words.draw, []
    is_ascii = draw.random() < 0.5
    tags = json.dumps({"tags": ["é"]}, ensure_ascii=is_ascii)
    for _ in range(draw.randint(1, 3)):
        if draw.random() < 0.4:
            cells.append('{"cell_type":"code","source":["# a 1b\\n","x = 1"],"outputs":[]}')
        text = markdown(words).decode().removeprefix("---\na: b **c**\n---\n\n")
        if cells:
            text = text.removeprefix("\n")  # only the first cell may have front matter
        if draw.random() < 0.5:
            text = text.rstrip("\n")
        lines = re.findall(r"[^\n]*\n|[^\n]+", text)
        pieces = lines if draw.random() < 0.7 else [text]
        quoted = [json.dumps(each, ensure_ascii=is_ascii) for each in pieces]
        if draw.random() < 0.3:  # some characters have their numbers
            quoted = [each.replace("-", "\\u002D") for each in quoted]
        source = f"[{','.join(quoted)}]" if len(quoted) != 1 or pieces is lines else quoted[0]
        cells.append(f'{{"cell_type":"markdown","metadata":{tags},"source":{source}}}')
    text = f'{{"cells":[{",".join(cells)}],"metadata":{{}},"nbformat":4,"nbformat_minor":5}}'
    return _styled(text, draw).encode()


def _sources(data: bytes) -> list[list[str]]:
    cells = json.loads(data)["cells"]
    found = [cell["source"] for cell in cells if cell["cell_type"] == "markdown"]
    return [[each] if isinstance(each, str) else each for each in found]


def skeleton_of_ipynb(data: bytes) -> Skeleton:
    """Return all of a notebook but the Markdown, and what is to stay of that."""
    notebook, marks = json.loads(data), dict[str, str]()
    found = []
    for number, source in enumerate(_sources(data)):
        inner, own = skeleton_of_markdown("".join(source).encode())
        found += [str(len(source)), *inner]
        marks.update({word: f"{number} {place}" for word, place in own.items()})
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            cell["source"] = ""
    strings = re.sub(r'"source"\s*:\s*(?:\[[^\[\]]*\]|"(?:[^"\\]|\\.)*")', "", data.decode())
    is_plain = "[" not in "".join(each for source in _sources(data) for each in source)
    return [*found, json.dumps(notebook), strings if is_plain else ""], marks


def ipynb_strings(data: bytes) -> list[str]:
    """Return all strings, as they are written."""
    return re.findall(r'"((?:[^"\\]|\\.)*)"', data.decode())


# --- Translating


@dataclass(frozen=True)
class CatalogKind:
    """A format: what makes a file, its strings as they are written, and what to check."""

    make: Callable[[Words], bytes]
    strings: Callable[[bytes], list[str]]
    skeleton: Callable[[bytes], Skeleton]
    name: str
    faults: Callable[[bytes, bytes, dict[str, str]], Iterator[str]] | None = None


CATALOG_KINDS = {
    "po": CatalogKind(po, po_strings, skeleton_of_po, "a.po", faults_of_translated_po),
    "android": CatalogKind(android, android_strings, skeleton_of_android, "values/strings.xml"),
    "strings": CatalogKind(apple, apple_strings, skeleton_of_apple, "a.strings"),
    "xcstrings": CatalogKind(
        xcstrings,
        xcstrings_strings,
        skeleton_of_xcstrings,
        "a.xcstrings",
        faults_of_translated_xcstrings,
    ),
    "ipynb": CatalogKind(ipynb, ipynb_strings, skeleton_of_ipynb, "a.ipynb"),
}


def faults_of_translation(kind: CatalogKind, seed: int) -> list[str]:
    """Return what is wrong with a random file that is translated, all lines of it or some."""
    words = Words(random.Random(seed))
    data, draw = kind.make(words), words.draw
    form = read_file(data, kind.name)
    if kind.faults or seed % 2:
        form.translate_into(LANGUAGE)
    if form.rewritten(form.text) != data:
        return ["a text that is the same changes the file"]
    asked: dict[str, str] = {}

    def translated(line: str) -> str:
        if draw.random() < 0.2:
            return line
        for word in WORD.findall(line):
            asked[word] = words.new()
        return WORD.sub(lambda found: asked[found[0]], line)

    text = "\n".join(map(translated, form.text.split("\n")))
    made = form.rewritten(text)
    if kind.faults:
        return [*kind.faults(data, made, asked)]
    before, after = kind.strings(data), kind.strings(made)
    # A sign that a mark has become is not read again.
    unlike = "estimates" if kind.name.endswith("ipynb") else "left out"
    has_refused = any(unlike in said or "left out" in said for said in form.not_kept())
    faults = []
    if not {*WORD.findall(" ".join(map(_without_numbers, before)))} <= {*WORD.findall(form.text)}:
        faults.append("a word is not read")
    if read_file(made, kind.name).text.split() != text.split() and not has_refused:
        faults.append("the text is another one")
    if len(before) != len(after):
        return [*faults, "there are more or fewer strings"]
    for old, new in zip(before, after, strict=True):
        if not ({*WORD.findall(_without_numbers(old))} & asked.keys()) and old != new:
            faults.append(f"a string that has its words is written anew: {new!r}")
    return faults


def _without_numbers(raw: str) -> str:
    """Return a string with characters in the place of their numbers, and blanks for the like."""
    text = re.sub(r"\\u([0-9a-fA-F]{4})", lambda found: chr(int(found[1], 16)), raw)
    return re.sub(r"\\U....|\\.", " ", text)


def main(
    formats: Annotated[list[str] | None, typer.Argument(help="Formats.")] = None,
    count: Annotated[int, typer.Option(min=1, help="Files of each.")] = 100_000,
    seed: Annotated[int, typer.Option(help="That of the first.")] = 0,
) -> None:
    """Translate random files, and report what is wrong."""
    wrong = 0
    for name in formats or [*CATALOG_KINDS]:
        began = time.perf_counter()
        for number in range(seed, seed + count):
            for fault in faults_of_translation(CATALOG_KINDS[name], number):
                wrong += 1
                print(f"{name}, seed {number}: {fault}")
        print(f"{name}: {count:,} files, {time.perf_counter() - began:.0f} s")
    raise SystemExit(wrong > 0)


if __name__ == "__main__":
    typer.run(main)
