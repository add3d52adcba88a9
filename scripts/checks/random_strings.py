"""Random strings as programs have them, and those of Android and Apple.

What makes a file, what of it is to stay, and its strings as they are written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from xml.etree import ElementTree

from random_words import WORD, Skeleton, Words

MARKS = ("<b>{}</b>", "<i>{}</i>", "<a href='x'>{}</a>", "<span>{}</span>")
FIXED = ("%s", "%1$d", "%(name)s", "{name}", "{{name}}", "${x}", "%@", "%lld", "{0}", "%.2f", "%%")
SIGNS = (", ", " ", " ", " ", " ", "  ", " - ", "; ", " (", ") ")


@dataclass(frozen=True)
class Style:
    """How a format writes what is in strings."""

    quote: str = '\\"'
    signs: tuple[str, ...] = ("\\t", "\\\\ ")
    glued: tuple[str, ...] = ("",)  # behind letters
    nothing: tuple[str, ...] = ("<br/>",)
    marks: tuple[str, ...] = MARKS
    fixed: tuple[str, ...] = FIXED


PO = Style()
APPLE = Style(glued=("", "\\U00e9", "\\U00E9b", "\\UD83D\\UDE00"), signs=("\\t", "\\\\ ", "\n"))
JSON = Style(glued=("", "\\u00e9", "é", "\\ud83d\\ude00"), signs=("\\t", "\\/ ", "\\u0020"))
ANDROID = Style(
    glued=("", "\\'", "\\u00e9", "&amp;", "&#233;"),
    signs=("\\t", "\n    ", " &amp; ", "\\@ "),
    nothing=("<br/>", "<!-- a <b> -->"),
    marks=("<b>{}</b>", "<i>{}</i>", "&lt;b&gt;{}&lt;/b&gt;", "<a href='x'>{}</a>", "<u>{}</u>"),
    fixed=(*FIXED, '<xliff:g id="a">%1$s</xliff:g>', '<xliff:g id="b">Acme</xliff:g>'),
)
_PLACEHOLDER = re.compile("|".join(map(re.escape, sorted(FIXED, key=len, reverse=True))))


def string(words: Words, style: Style) -> str:
    """Return a string of some lines, as a file has it between its quotation marks."""
    draw = words.draw
    if draw.random() < 0.05:
        return draw.choice(["", "%d", "{name}", " ", "\\n"])
    lines = ("".join(_sentence(words, style, 2)) for _ in range(draw.choice([1, 1, 1, 2, 3])))
    return draw.choice(["", "", " "]) + "\\n".join(lines) + draw.choice(["", "", "\\n", " "])


def _sentence(words: Words, style: Style, depth: int) -> Iterator[str]:
    draw = words.draw
    for _ in range(draw.randint(1, 5)):
        kind = draw.random()
        if kind < 0.12 and depth:
            yield draw.choice(style.marks).format("".join(_sentence(words, style, depth - 1)))
        elif kind < 0.17:
            yield draw.choice(style.nothing)
        elif kind < 0.27:
            yield draw.choice(style.fixed)
        elif kind < 0.33:
            yield f"{style.quote}{words.new()}{style.quote}"
        else:
            yield words.new() + draw.choice(style.glued)
        yield draw.choice(style.signs if draw.random() < 0.1 else SIGNS)
    yield words.new() + draw.choice([".", "!", "", "?"])


_STRUCTURE = re.compile(r"<[^<>]*>|&lt;/?b&gt;|" + _PLACEHOLDER.pattern)


def skeleton_of_strings(data: bytes, find: re.Pattern[str]) -> Skeleton:
    """Return all but words of a file, and for each word its string and the marks around it.

    The pattern finds strings, as its last group.
    """
    text, found, marks = data.decode("utf-8-sig"), list[str](), dict[str, str]()
    at = 0
    for number, each in enumerate(find.finditer(text)):
        start, end = each.span(each.re.groups)
        found.append(text[at:start])
        at, around, behind = end, list[str](), start
        for mark in _STRUCTURE.finditer(text, start, end):
            place = f"{number} {around}"
            marks.update({word: place for word in WORD.findall(text[behind : mark.start()])})
            behind = mark.end()
            found.append(mark[0])
            if mark[0].startswith(("</", "&lt;/")):
                around.pop()
            elif mark[0][0] in "<&" and not re.match(r"<br|<!|<xliff", mark[0]):
                around.append(mark[0])
        marks.update({word: f"{number} {around}" for word in WORD.findall(text[behind:end])})
    return [*found, text[at:]], marks


def is_translation(source: str, text: str, asked: dict[str, str]) -> bool:
    """Whether a text has the words that were asked for, and all placeholders, in their order."""
    wanted = [asked.get(word, word) for word in WORD.findall(source)]
    same_ends = all(
        source.startswith(end) == text.startswith(end)
        and source.endswith(end) == text.endswith(end)
        for end in ("\n",)
    )
    placeholders = [_PLACEHOLDER.findall(each) for each in (source, text)]
    return WORD.findall(text) == wanted and placeholders[0] == placeholders[1] and same_ends


# --- Android and Apple


def android(words: Words) -> bytes:
    """Return string resources of Android."""
    draw, parts = words.draw, []
    for number in range(draw.randint(1, 4)):
        text, kind = _android_text(words), draw.random()
        if kind < 0.15:
            parts.append(f'<string name="n{number}" translatable="false">a %s b</string>')
        elif kind < 0.25:
            parts.append("<!-- a <string>b</string> -->")
        elif kind < 0.3:
            parts.append('<integer-array name="i"><item>1</item></integer-array>\n<item/>')
        elif kind < 0.35:
            parts.append('<string name="r">@string/other</string>')
        elif kind < 0.5:
            other = _android_text(words)
            items = f'<item quantity="one">{text}</item>\n<item quantity="other">{other}</item>'
            parts.append(f'<plurals name="p{number}">\n{items}\n</plurals>')
        elif kind < 0.6:
            parts.append(f'<string-array name="a{number}"><item>{text}</item></string-array>')
        else:
            parts.append(f'<string name="s{number}">{text}</string>')
    body = "\n    ".join(parts)
    page = f'<?xml version="1.0" encoding="utf-8"?>\n<resources xmlns:xliff="u">\n    {body}\n'
    mark = "\ufeff" if draw.random() < 0.1 else ""
    return f"{mark}{page}</resources>\n".encode()


def _android_text(words: Words) -> str:
    raw = string(words, ANDROID)
    kind = words.draw.random()
    if kind < 0.1 and "&" not in raw and "<!" not in raw and "xliff" not in raw:
        return f"<![CDATA[{raw}]]>"
    return f'"{raw}"' if kind > 0.9 else raw


_ANDROID_STRING = re.compile(
    r'<!--(?s:.)*?-->()|translatable="false">[^<]*()|<item>1<()'
    r"|(?:<string(?=[\s])[^<>]*>|<item(?: quantity=\"\w+\")?>)((?s:.)*?)(?=</string>|</item>)"
)


def android_strings(data: bytes) -> list[str]:
    """Return what stands in all strings."""
    ElementTree.fromstring(data)
    found = _ANDROID_STRING.finditer(data.decode())
    return [each[4] for each in found if each[4] is not None]


def skeleton_of_android(data: bytes) -> Skeleton:
    """Return all but the words of strings."""
    ElementTree.fromstring(data)
    text = data.decode("utf-8-sig")
    found, marks, around, at = list[str](), dict[str, str](), list[str](), 0
    pattern = re.compile(r"<!--(?s:.)*?-->|<!\[CDATA\[|\]\]>|" + _STRUCTURE.pattern)
    for mark in pattern.finditer(text):
        marks.update({word: f"{around}" for word in WORD.findall(text[at : mark.start()])})
        at = mark.end()
        found.append(mark[0])
        if mark[0].startswith(("</", "&lt;/")):
            around.pop()
        elif mark[0][0] in "<&" and not re.match(r"<br|<[!?]", mark[0]) and mark[0][-2] != "/":
            around.append(mark[0])
    return found, marks


def apple(words: Words) -> bytes:
    """Return an Apple's file of keys and values, in UTF-8 or UTF-16."""
    draw, lines = words.draw, []
    for number in range(draw.randint(1, 4)):
        if draw.random() < 0.3:
            lines.append(draw.choice(['/* a "b" = "c"; */', '// a "b"', '"k";', ""]))
        key = draw.choice([f'"a \\"key\\" {number}"', f"key_{number}"])
        lines.append(f'{key} = "{string(words, APPLE)}";' + draw.choice(["", " // a"]))
    text = draw.choice(["\n", "\r\n"]).join([*lines, ""])
    kind = draw.random()
    if kind < 0.2:
        return ("\ufeff" + text).encode("utf-16-le" if kind < 0.1 else "utf-16-be")
    return (("\ufeff" if kind < 0.3 else "") + text).encode()


def _as_utf8(data: bytes) -> bytes:
    marks = {b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
    return data.decode(marks.get(data[:2], "utf-8-sig")).encode()


_APPLE_STRING = re.compile(r'/\*(?s:.)*?\*/()|//[^\n]*()|= "((?:[^"\\]|\\(?s:.))*)"')


def apple_strings(data: bytes) -> list[str]:
    """Return all values."""
    found = _APPLE_STRING.finditer(_as_utf8(data).decode())
    return [each[3] for each in found if each[3] is not None]


def skeleton_of_apple(data: bytes) -> Skeleton:
    """Return all but the words of values."""
    found, marks = skeleton_of_strings(
        _as_utf8(data), re.compile(r'(?<=[\w"] = ")((?:[^"\\]|\\(?s:.))*)(?=";)')
    )
    return [data[:2].hex() if data[0] > 0xE0 else "", *found], marks
