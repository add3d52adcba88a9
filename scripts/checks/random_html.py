"""Random pages of HTML for `random_documents.py`, with all that pages have beside words."""

from __future__ import annotations

import re
from collections.abc import Iterator

from random_words import WORD, Skeleton, Words

INLINE_MARKS = (
    *(
        "b",
        "i",
        "em",
        "strong",
        "u",
        "sub",
        "a href='x'",
        'span class="c"',
        "B",
        "SPAN ID=x",
        "mark",
    ),
    *('a href="?a=1&b=2" data-x="a > b"', "i translate=yes", "bdo dir=rtl", "font color=red"),
)
BLOCK_NAMES = (
    *("p", "h1", "li", "td", "div", "blockquote", "title", "P", "dt", "dd", "option", "th"),
    *(
        "section class='x'",
        "caption",
        "figcaption",
        "div data-x='a > b'",
        "label for=x",
        "noscript",
    ),
)
ENDED_BY_OTHERS = ("p", "li", "td", "P", "dt", "dd", "option", "th")
NO_WORDS = (  # in a sentence, and no part of it
    "<img src=x alt='a > b'>",
    "<IMG SRC=x>",
    "<!-- a <b> -->",
    "<!--[if IE]><p>a</p><![endif]-->",
    "<math><mi>x</mi></math>",
    "<svg><text>a</text></svg>",
    '<svg viewBox="0 0 1 1" aria-label="{}"><text>a</text></svg>',
    "<iframe src=x title='{}'></iframe>",
    "<canvas>a</canvas>",
    "<wbr>",
    "<wbr/>",
    "{% if x %}",
    "{% trans 'a > b' %}",
    "{# a note #}",
    '<input value="a">',
    '<input placeholder="{} {}">',
    "<img alt=\"{} {}, {{{{ {} }}}}.\" title='{}'>",
    '<img alt="{}&amp;{} &quot;{}&#39;">',
    "<IMG ALT = {} title={}>",
    '<img translate=no alt="a">',
    '<img alt="">',
    '<img alt="{{% if x %}}{}{{% endif %}}">',
)
BETWEEN_BLOCKS = (
    "<script>var a = '<p>b</p>';</script>",
    "<SCRIPT>if (a < b) {{}}</SCRIPT>",
    "<style>p {{ a: b }}</style>",
    "<pre>a  b</pre>",
    "<?php echo '<p>b</p>'; ?>",
    "<![CDATA[ a ]]>",
    "<!DOCTYPE html>",
    "<textarea>a <b></textarea>",
    "<textarea rows=2 placeholder='{}'>a</textarea>",
    "<template><p>a</p></template>",
    "<math><mi>x</mi></math>",
    '<p translate="no" title="a">a b</p>',
    "<p>",
    "<div class='x notranslate'><p>a</p></div>",
    "<div translate=no><p>a <p translate=yes>{} {}.</p></div>",
    "<table><tr><td>{}<td>{} {}<tr><th>{}</table>",
    "<dl><dt>{}<dd>{} {}.<dt>{}</dl>",
    "<select><option>{}<option value=a>{}</select>",
    "<ul><li>{}<ul><li>{} {}</ul><li>{}</ul>",
    "<div>{}<div>{} {}.</div>{}</div>",
    "<meta name=description content='{} {}.'>",
    "<meta name=viewport content='a'>",
    "<hr>",
    "<br>",
    "<br />",
    "\n",
    "\r\n",
    "{{% block a %}}",
)
FIXED_WORDS = (
    "<code>{}</code>",
    "<CODE>{}</CODE>",
    "<kbd>{}</kbd>",
    "<samp>{}</samp>",
    "<i translate=no>{}</i>",
    "<i class='a notranslate'>{}</i>",
    "{{{{ {} }}}}",
)
BEHIND_WORDS = (
    *(
        "",
        "",
        "",
        "&amp;",
        "&eacute;",
        "&#233;",
        "&#xe9;",
        "&#XE9;",
        "&#1;",
        "&#0233;",
        "’s",
        "e\u0301",
    ),
    *("&AMP;", "&nosuch;", "&amp", " &copy ", " < ", " & ", " > ", " &lt;", "&shy;", "&#x1F600;"),
)
SIGNS_BETWEEN = (
    ", ",
    " ",
    " ",
    " ",
    "&nbsp;",
    "  ",
    "\n\t",
    "\r\n",
    " - ",
    "; ",
    "&#32;",
    " &mdash; ",
)
_MARK_NAMES = {mark.split()[0].casefold() for mark in INLINE_MARKS}
_NO_TEXT = re.compile(
    r"\A\ufeff|<!--.*?-->|<\?.*?\?>|<!\[CDATA\[.*?\]\]>|\{%.*?%\}|\{#.*?#\}|"
    r"<(script|style|pre|textarea|svg|math|template|iframe|canvas)\b.*?</\1>|"
    r"</?[a-z!](?:'[^']*'|\"[^\"]*\"|[^<>\"'])*>",
    re.DOTALL | re.IGNORECASE,
)
_VALUE = re.compile(
    r"\b(alt|title|placeholder|aria-label|content)(\s*=\s*)(\"[^\"]*\"|'[^']*'|[^\s\"'<>]+)",
    re.IGNORECASE,
)


def html(words: Words) -> bytes:
    """Return a page."""
    draw, parts = words.draw, ["\ufeff"] if words.draw.random() < 0.05 else []
    for _ in range(draw.randint(1, 4)):
        if draw.random() < 0.5:
            parts.append(_filled(draw.choice(BETWEEN_BLOCKS), words))
        block = draw.choice(BLOCK_NAMES)
        is_open = block in ENDED_BY_OTHERS and draw.random() < 0.3
        end = "" if is_open else f"</{block.split()[0]}>"
        space = draw.choice(["", " ", "\n  ", "\r\n"])
        parts.append(f"<{block}>{space}{''.join(_html_sentence(words, 3))}{space}{end}")
    return "".join(parts).encode()


def _filled(construct: str, words: Words) -> str:
    """Return a construct with words in its places."""
    if "{}" not in construct:
        return construct.replace("{{", "{").replace("}}", "}")
    return construct.format(*(words.new() for _ in range(construct.count("{}") + 3)))


def _html_sentence(words: Words, depth: int) -> Iterator[str]:
    draw = words.draw
    for _ in range(draw.randint(1, 5)):
        kind = draw.random()
        if kind < 0.25 and depth:
            mark = draw.choice(INLINE_MARKS)
            inner = "".join(_html_sentence(words, depth - 1))
            yield f"<{mark}>{inner}</{mark.split()[0]}>"
        elif kind < 0.35:
            yield _filled(draw.choice(NO_WORDS), words)
        elif kind < 0.41:
            yield draw.choice(FIXED_WORDS).format(words.new())
        elif kind < 0.45:
            yield f"<button>{words.new()}</button>"
        else:
            yield words.new() + draw.choice(BEHIND_WORDS)
        if draw.random() < 0.9:
            yield draw.choice(SIGNS_BETWEEN)
    yield draw.choice([".", "!", "", "?"])


def skeleton_of_html(data: bytes) -> Skeleton:
    """Return all tags and the like without values that are read, and the marks of each word."""
    page, found, around, at = data.decode(), list[str](), list[str](), 0
    marks: dict[str, str] = {}

    def take(text: str) -> None:
        marks.update({word: " ".join(around) for word in WORD.findall(text)})

    for tag in _NO_TEXT.finditer(page):
        take(page[at : tag.start()])
        at = tag.end()
        bare = tag[0]
        if not bare.startswith(("<!--", "<?", "<![", "{")):
            for value in _VALUE.finditer(bare):
                marks.update(dict.fromkeys(WORD.findall(value[3]), value[1]))
            bare = _VALUE.sub(r"\1\2", bare)
        found.append(bare)
        name = re.match(r"</?(\w+)", tag[0])
        if name and not tag[1] and name[1].casefold() in _MARK_NAMES:
            if tag[0].startswith("</"):
                around.pop()
            else:
                around.append(bare)
    take(page[at:])
    return found, marks
