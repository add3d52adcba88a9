"""What one has to hold at a time, read from sources: functions, files, names, formatter marks."""

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "speculative_t5"
MAX_FUNCTION_LINES = 60
MAX_DECISIONS = 20
MAX_FILE_LINES = 560
MAX_TEST_LINES = 640
BOUNDED = (PACKAGE, "scripts", "setup.py", "convert.py")  # every bound holds here
TABLES_ALLOWED = ("weights/training", "tests")  # here the formatter may leave out tables of data
SMALLEST_TABLE = 3  # entries

# Names that may be defined in more than one module.
DEFINED_TWICE = {
    "log": "each module that logs has a logger of its own",
}
# Modules that mirror each other, name by name: one for each family of models.
PARALLEL_MODULES = (
    {"models/t5.py", "models/t5gemma.py"},
    {"checkpoints/t5.py", "checkpoints/t5gemma.py"},
)

_MARK = re.compile(r"#\s*fmt:\s*(skip|off|on)\b")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_LITERALS = (ast.Tuple, ast.List, ast.Set, ast.Dict)


@dataclass(frozen=True, order=True)
class Function:
    """The size of a function; its lines begin at `def`."""

    decisions: int
    lines: int
    file: str
    line: int
    name: str

    def __str__(self) -> str:
        return (
            f"{self.file}:{self.line} {self.name}: {self.decisions} decisions, {self.lines} lines"
        )


@dataclass(frozen=True)
class Mark:
    """A comment that keeps the formatter from a statement or from lines."""

    file: str
    line: int
    is_table: bool  # all that it keeps are tables of data

    def __str__(self) -> str:
        return f"{self.file}:{self.line} keeps the formatter from " + (
            "a table of data" if self.is_table else "what is no table of data"
        )


def python_files(root: Path, *places: str) -> list[Path]:
    """Return the files of Python in some folders of a checkout, or at those paths themselves."""
    found: list[Path] = []
    for place in places:
        path = root / place
        found += [path] if path.is_file() else sorted(path.rglob("*.py"))
    return [path for path in found if not path.relative_to(root).parts[0].startswith(".")]


# --- Functions


def functions_of(root: Path, *places: str) -> list[Function]:
    """Return all functions of some folders, those with the most decisions first."""
    found = []
    for path in python_files(root, *places):
        file = path.relative_to(root).as_posix()
        found += functions_in(path.read_text(encoding="utf-8"), file)
    return sorted(found, reverse=True)


def functions_in(text: str, file: str = "") -> list[Function]:
    """Return the functions of a source text, inner ones and methods too."""
    return [
        Function(decisions(node), _num_lines(node), file, node.lineno, node.name)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, _FUNCTIONS)
    ]


def decisions(function: ast.AST) -> int:
    """Count a function's decisions, those of its lambdas included, of inner functions not.

    One for each `if`, loop, `except`, `case` and conditional expression, for each operand of `and`
    and `or` after the first, and for each `for` and `if` of a comprehension.
    """
    return sum(_weight(node) for node in _own_nodes(function))


def _own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(function):
        yield node
        if not isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            yield from _own_nodes(node)


def _weight(node: ast.AST) -> int:
    match node:
        case ast.BoolOp():
            return len(node.values) - 1
        case ast.comprehension():
            return 1 + len(node.ifs)
        case ast.If() | ast.IfExp() | ast.For() | ast.AsyncFor() | ast.While():
            return 1
        case ast.ExceptHandler() | ast.match_case():
            return 1
    return 0


def _num_lines(node: ast.stmt) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


# --- Files


def long_files(root: Path) -> list[str]:
    """Name the files that have more lines than they may."""
    limits = [(path, MAX_FILE_LINES) for path in python_files(root, *BOUNDED, "weights/training")]
    limits += [(path, MAX_TEST_LINES) for path in python_files(root, "tests")]
    return [
        f"{path.relative_to(root)}: {count} lines, at most {limit}"
        for path, limit in limits
        if (count := num_lines(path)) > limit
    ]


def num_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


# --- Marks for the formatter


def marks_of(root: Path, *places: str) -> list[Mark]:
    """Return all `# fmt: skip` and `# fmt: off` of some folders."""
    found = []
    for path in python_files(root, *places):
        file = path.relative_to(root).as_posix()
        found += marks_in(path.read_text(encoding="utf-8"), file)
    return found


def marks_in(text: str, file: str = "") -> list[Mark]:
    """Return the marks of a source text.

    `# fmt: skip` keeps the formatter from the statement or decorator whose last line it ends;
    `# fmt: off` from those that begin after it and before `# fmt: on`.
    """
    if "fmt:" not in text:  # which is sooner seen than said by tokens
        return []
    comments = [
        (found[1], token.start[0])
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT and (found := _MARK.search(token.string))
    ]
    kept = list(_statements(ast.parse(text)))
    marks = []
    for position, (kind, line) in enumerate(comments):
        if kind == "skip":
            nodes = [node for node in kept if node.end_lineno == line]
        elif kind == "off":
            end = next((at for other, at in comments[position + 1 :] if other == "on"), None)
            nodes = [node for node in kept if line < node.lineno < (end or node.lineno + 1)]
        else:
            continue
        marks.append(Mark(file, line, bool(nodes) and all(map(is_table, nodes))))
    return marks


def _statements(tree: ast.AST) -> Iterator[ast.stmt | ast.expr]:
    """Yield the statements without a body of their own, and decorators."""
    for node in ast.walk(tree):
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            yield from node.decorator_list
        elif isinstance(node, ast.stmt) and not hasattr(node, "body"):
            yield node


def is_table(node: ast.AST) -> bool:
    """Whether a statement is a table of data.

    It assigns a literal of `SMALLEST_TABLE` entries or more that are constants, names, calls and
    literals of these, or it is a decorator with such a literal among its arguments. The literal may
    be the argument of a call, as in `np.array([...])`.
    """
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
        return node.value is not None and _is_literal_table(node.value)
    if isinstance(node, ast.Call):  # a decorator
        return any(map(_is_literal_table, node.args)) and all(map(_is_data, node.args))
    return False


def _is_literal_table(value: ast.AST) -> bool:
    if isinstance(value, ast.Call) and len(value.args) == 1 and _is_data(value):
        (value,) = value.args
    return (
        isinstance(value, _LITERALS) and _num_entries(value) >= SMALLEST_TABLE and _is_data(value)
    )


def _num_entries(value: ast.AST) -> int:
    """Count the entries of a literal, those of literals in it included."""
    if isinstance(value, ast.Dict):
        return sum(map(_num_entries, value.values))
    if isinstance(value, ast.Tuple | ast.List | ast.Set):
        return sum(map(_num_entries, value.elts))
    return 1


def _is_data(value: ast.AST) -> bool:
    """Whether an expression has no operation but signs, arithmetic and calls."""
    allowed = (
        *_LITERALS,
        *(ast.Constant, ast.Name, ast.Attribute, ast.Starred, ast.Call, ast.keyword),
        *(ast.UnaryOp, ast.BinOp, ast.JoinedStr, ast.FormattedValue, ast.Subscript, ast.Slice),
        *(ast.expr_context, ast.operator, ast.unaryop),
    )
    return all(isinstance(node, allowed) for node in ast.walk(value))


# --- Names


def defined_twice(root: Path) -> dict[str, list[str]]:
    """Return the top-level names that several modules of the package define, and may not."""
    sources = {
        path.relative_to(root / PACKAGE).as_posix(): path.read_text(encoding="utf-8")
        for path in python_files(root, PACKAGE)
    }
    return names_defined_twice(sources)


def names_defined_twice(sources: dict[str, str]) -> dict[str, list[str]]:
    """Return the names that several of these modules define, without the exceptions."""
    modules: dict[str, set[str]] = defaultdict(set)
    for file, text in sources.items():
        for name in _defined(ast.parse(text)):
            modules[name].add(file)
    return {
        name: sorted(files)
        for name, files in sorted(modules.items())
        if len(files) > 1 and not _may_be_defined_twice(name, files)
    }


def _defined(module: ast.Module) -> Iterator[str]:
    """Yield the names that a module's own statements define; `__all__` and the like are not."""
    for node in module.body:
        names: list[str] = []
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            names = [node.name]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            inner = (part for target in targets for part in ast.walk(target))
            names = [part.id for part in inner if isinstance(part, ast.Name)]
        yield from (name for name in names if not name.startswith("__"))


def _may_be_defined_twice(name: str, files: set[str]) -> bool:
    if name in DEFINED_TWICE or any(files <= parallel for parallel in PARALLEL_MODULES):
        return True
    # The function behind a command is named as the command, which does what another room does.
    return len([file for file in files if file != f"cli/{name}.py"]) == 1
