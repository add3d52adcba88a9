"""Random documents of Markdown: what makes one, and what of it is to stay."""

from __future__ import annotations

import re
from collections.abc import Iterator

from random_words import WORD, Skeleton, Words

MARKS = (
    "**{}**",
    "*{}*",
    "__{}__",
    "_{}_",
    "~~{}~~",
    "[{}](a.md)",
    '[{}](b/c_d.md "An e")',
    "[{}][a]",
    "<b>{}</b>",
)
NOTHING = (  # in a sentence, and no part of it
    "![an f](g.png)",
    "[^1]",
    "<br>",
    "<!-- a **b** -->",
    "{% if x %}",
    "{# a note #}",
    "<kbd>a</kbd>",
    "<img src='a > b'>",
    "<svg><g>a</g></svg>",
    "<math>",
)
FIXED = (
    "`{}`",
    "`` `{} ``",
    "{{{{ {} }}}}",
    "$x{}$",
    "<https://x.org/{}>",
    "https://x.org/{}",
    "&copy;{}",
)
SIGNS = (", ", " ", " ", " ", "  ", " - ", "; ", " * ", " \\* ", "\n", "\n")
BETWEEN = (
    "```\na **b**\n```\n",
    "~~~\n[a](b)\n~~~\n",
    "<pre>\na *b*\n\nc\n</pre>\n",
    "<script>\nvar a = '**b**';\n</script>\n",
    "<!-- a\n\n*b* -->\n",
    "[a]: http://x.org/b_c_d\n",
    "---\n",
    '!!! note "A"\n',
    "| a | *b* |\n|---|---|\n",
    "    code **b**\n",
)
BEFORE = ("", "", "", "# ", "- ", "1. ", "> ", "> [!NOTE]\n> ", "[^1]: ", "- [x] ")


def markdown(words: Words) -> bytes:
    """Return a text of Markdown."""
    draw, parts = words.draw, []
    if draw.random() < 0.1:
        parts.append("---\na: b **c**\n---\n\n")
    for _ in range(draw.randint(1, 4)):
        if draw.random() < 0.4:
            parts += [draw.choice(BETWEEN), "\n"]
        before = draw.choice(BEFORE)
        text = "".join(_sentence(words, 2))
        indent = "> " if before.startswith(">") else ""
        if before == "# ":
            text = text.replace("\n", " ")
        parts += [before, "Ab " + text.replace("\n", "\n" + indent), "\n\n"]
    text = "".join(parts)
    if text.startswith("---\n\n"):
        text = f"\n{text}"  # else the words below would be front matter, which has no marks
    return (text.replace("\n", "\r\n") if draw.random() < 0.2 else text).encode()


def _sentence(words: Words, depth: int) -> Iterator[str]:
    draw = words.draw
    for _ in range(draw.randint(2, 6)):
        kind = draw.random()
        if kind < 0.25 and depth:
            yield draw.choice(MARKS).format(words.new())
        elif kind < 0.33:
            yield draw.choice(NOTHING)
        elif kind < 0.42:
            yield draw.choice(FIXED).format(words.new())
        else:
            yield words.new()
        yield draw.choice(SIGNS)
    yield words.new() + "."


_MARK = re.compile(
    r"""
    \\[*_~`\[\]\\] | ```.*?``` | ~~~.*?~~~
    | <pre>.*?</pre> | <script>.*?</script> | <!--.*?--> | \{[%\#].*?[%\#]\}
    | <kbd>a</kbd> | <svg>.*?</svg> | \]\[a\] | !\[an\ f\]\(g\.png\) | \[\^1\]:? | \]\([^)]*\)
    | \[a\]:\ \S+ | </?\w[^<>]*> | \{\{ | \}\} | `+ | \*+ | _+ | ~~ | [\[$] | !!!.*?\n
    """,
    re.DOTALL | re.VERBOSE,
)


def skeleton_of_markdown(data: bytes) -> Skeleton:
    """Return all marks in order but those of emphasis, and what each word stands behind.

    That is how many marks, and which of emphasis; where a word is left out, its emphasis may go.
    """
    text, at = data.decode(), 0
    found: list[str] = []
    emphasis: set[str] = set()
    marks: dict[str, str] = {}

    def take(words: str) -> None:
        place = f"{len(found)} {sorted(emphasis)}"
        marks.update({word: place for word in WORD.findall(words)})

    for mark in _MARK.finditer(text):
        take(text[at : mark.start()])
        at = mark.end()
        if mark[0][0] == "\\":
            continue  # a sign that is text
        if mark[0][0] not in "*_~" or "\n" in mark[0]:
            found.append(WORD.sub("", mark[0]))
        elif not (mark[0] == "*" and (text[mark.start() - 1] + text[at]).isspace()):
            emphasis ^= {mark[0]}
    take(text[at:])
    return found, marks
