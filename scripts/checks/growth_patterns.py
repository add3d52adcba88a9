"""The regular expressions of the package, and texts that each of them nearly matches.

Patterns are found in the source, by calls of `re`. Near-misses come from a pattern's parse tree:
what leads up to a repeated part, that part many times over, and an end that does not fit.
"""

import ast
import importlib
import random
import re
import re._constants as codes
import re._parser as parser
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from typing import Any

CALLS = ("compile", "search", "match", "fullmatch", "split", "findall", "finditer", "sub", "subn")
LONG = 8  # times that a part may come, from which on it counts as repeated
ENDS = ("", "\x01", "\n", " a", "!")  # what may stand behind the repeated part
CATEGORIES = {
    codes.CATEGORY_DIGIT: "0",
    codes.CATEGORY_NOT_DIGIT: "a",
    codes.CATEGORY_SPACE: " \u2003",
    codes.CATEGORY_NOT_SPACE: "a",
    codes.CATEGORY_WORD: "a0_",
    codes.CATEGORY_NOT_WORD: "-",
}
EACH = 6  # characters tried of a set

Make = Callable[[int], str]  # a text of about so many characters
Node = tuple[Any, Any]


@dataclass(frozen=True)
class Pattern:
    """A regular expression as it stands in the source."""

    file: str  # below the package's parent
    line: int
    source: str  # the argument of the call, as Python
    methods: frozenset[str]  # that are called
    name: str = ""  # that it is bound to
    value: re.Pattern[str] | None = None  # None if only the running function knows it

    @property
    def key(self) -> tuple[str, str]:
        return self.file, self.source

    @property
    def title(self) -> str:
        short = self.source if len(self.source) <= 40 else f"{self.source[:37]}..."
        return self.name or short


def find_patterns(root: Path, *, values: bool = True) -> list[Pattern]:
    """Find all calls of `re` in the package below a folder; each is a pattern of its own.

    With their `values`, which imports all modules that have some.
    """
    trees = {
        path: ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted((root / "speculative_t5").rglob("*.py"))
    }
    called = _called(trees.values())
    found = []
    for path, tree in trees.items():
        file = str(path.relative_to(root))
        names = {
            id(node.value): node.targets[0].id
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        }
        for node in ast.walk(tree):
            if not _is_call(node):
                continue
            method, name = node.func.attr, names.get(id(node), "")
            methods = called.get(name, CALLS[1:]) if method == "compile" else [method]
            found.append(
                Pattern(
                    file,
                    node.lineno,
                    ast.unparse(node.args[0]),
                    frozenset(methods),
                    name,
                    _value(file, node) if values else None,
                )
            )
    return found


def _is_call(node: ast.AST) -> Any:
    is_method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    return (
        is_method
        and isinstance(node.func.value, ast.Name)
        and (node.func.value.id == "re" and node.func.attr in CALLS)
    )


def _called(trees: Iterable[ast.Module]) -> dict[str, set[str]]:
    """Return by name the methods of patterns that are called in any module."""
    called: dict[str, set[str]] = {}
    nodes = (node for tree in trees for node in ast.walk(tree))
    for node in (node for node in nodes if isinstance(node, ast.Attribute)):
        if isinstance(node.value, ast.Name) and node.attr in CALLS[1:]:
            called.setdefault(node.value.id, set()).add(node.attr)
    return called


def _value(file: str, call: ast.Call) -> re.Pattern[str] | None:
    """Compile a pattern as its module does; None if it depends on what a function was given."""
    module = importlib.import_module(
        file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    )
    flags = call.args[1:] if call.func.attr == "compile" else []  # type: ignore[attr-defined]
    flags = [*flags, *(each.value for each in call.keywords if each.arg == "flags")]
    try:
        pattern, *given = (eval(ast.unparse(each), vars(module)) for each in (call.args[0], *flags))
    except NameError:
        return None
    return re.compile(pattern, *given)


def imports_other_engines(root: Path) -> list[str]:
    """Name the files that use regular expressions otherwise than as `re.CALL(...)`."""
    found = []
    for path in sorted((root / "speculative_t5").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if {"regex", "re2"} & {*names} or (isinstance(node, ast.ImportFrom) and "re" in names):
                found.append(str(path.relative_to(root)))
    return found


def near_misses(pattern: re.Pattern[str], seed: int = 0, most: int = 400) -> list[tuple[str, Make]]:
    """Return texts that grow by what a pattern repeats, each with what it is made of."""
    tree = parser.parse(pattern.pattern, pattern.flags & ~re.UNICODE)
    parts = {(before, body) for before, body in _repeated([*tree], "") if body}
    wholes = {_example([*tree])} - {""}
    made: dict[str, Make] = {}
    for before, body in sorted(parts | {("", whole) for whole in wholes}):
        for end in ENDS:
            made[f"{before!r} {body!r}* {end!r}"] = _run(before, body, end)
            made[f"({before!r} {body!r})* {end!r}"] = _run("", before + body, end)
            made[f"({before!r} {body!r}**)* {end!r}"] = _steps(before, body, end)
    bodies = sorted({body for _, body in parts})
    begins = sorted({before for before, _ in parts})
    for one, other in product(bodies, bodies):
        if one < other:
            made[f"({one!r} {other!r})*"] = _run("", one + other, "\x01")
            made[f"{one!r}* {other!r}*"] = _halves(begins[-1], one, other)
    kinds = [*made.items()]
    random.Random(seed).shuffle(kinds)
    return kinds[:most]


def _run(before: str, body: str, end: str) -> Make:
    return lambda size: before + body * (size // len(body)) + end


def _steps(before: str, body: str, end: str) -> Make:
    """As many runs as each is long: what begins anew in each run costs the 1.5th power."""

    def made(size: int) -> str:
        side = int(size**0.5)
        return (before + body * (side // len(body) + 1) + end) * side

    return made


def _halves(before: str, one: str, other: str) -> Make:
    return lambda size: before + one * (size // 2 // len(one)) + other * (size // 2 // len(other))


def _repeated(nodes: Sequence[Node], before: str) -> Iterator[tuple[str, str]]:
    """Yield what stands before each repeated part, and some of what may be repeated there."""
    for code, value in nodes:
        if code in (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT):
            least, most, inner = value
            if most >= LONG:
                for text in islice(_examples([*inner]), 12):
                    yield before, text
            yield from _repeated([*inner], before)
        elif code is codes.SUBPATTERN:
            yield from _repeated([*value[-1]], before)
        elif code is codes.ATOMIC_GROUP:
            yield from _repeated([*value], before)
        elif code is codes.BRANCH:
            for branch in value[1]:
                yield from _repeated([*branch], before)
        elif code in (codes.ASSERT, codes.ASSERT_NOT) and value[0] > 0:
            yield from _repeated([*value[1]], before)
        before += _example([(code, value)])


def _example(nodes: Sequence[Node]) -> str:
    return next(_examples(nodes), "")


def _examples(nodes: Sequence[Node]) -> Iterator[str]:
    """Yield some texts that match a sequence, those with the first choice everywhere first."""
    choices = [_choices(*node) for node in nodes]
    for place, each in enumerate(choices or [[""]]):
        for choice in each if place else each[:1]:
            yield "".join(choice if i == place else other[0] for i, other in enumerate(choices))
    for choice in choices[0][1:] if choices else []:
        yield choice + "".join(other[0] for other in choices[1:])


def _choices(code: Any, value: Any) -> list[str]:
    if code is codes.LITERAL:
        return [chr(value)]
    if code is codes.NOT_LITERAL:
        return [next(c for c in "a ." if ord(c) != value)]
    if code is codes.ANY:
        return ["a", " "]
    if code is codes.IN:
        return _of_set(value)
    if code is codes.BRANCH:
        return [text for branch in value[1] for text in islice(_examples([*branch]), 3)]
    if code is codes.SUBPATTERN:
        return [*islice(_examples([*value[-1]]), 8)]
    if code is codes.ATOMIC_GROUP:
        return [*islice(_examples([*value]), 8)]
    if code in (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT):
        least, most, inner = value
        texts = [*islice(_examples([*inner]), 8)] or [""]
        shortest = [texts[0] * least]
        return shortest + [text * max(least, 1) for text in texts if text * least != shortest[0]]
    return [""]  # where a text stands, and groups that stand elsewhere already


def _of_set(items: Sequence[Node]) -> list[str]:
    """Return some characters of a set, or of what a negated one leaves out."""
    if items[0][0] is codes.NEGATE:
        kept = re.compile(f"[^{re.escape(''.join(_of_set(items[1:])))}]")
        blank = (codes.CATEGORY, codes.CATEGORY_SPACE) in items
        return [c for c in "a0<\"'.-(" + " " * (not blank) if kept.match(c)][:EACH]
    found = []
    for code, value in items:
        if code is codes.LITERAL:
            found.append(chr(value))
        elif code is codes.RANGE:
            found.append(chr(value[0]))
        elif code is codes.CATEGORY:
            found += CATEGORIES.get(value, "a")
    return found[:EACH] or ["a"]
