"""See how much of the package one has to hold at a time, and whether that is within bounds.

    python scripts/checks/bounds.py                   # this checkout
    python scripts/checks/bounds.py --root ../before  # another, older one perhaps

Prints the ways of some calls through the package, its graph of imports, the functions that decide
most, the marks that keep the formatter away, names with two meanings, lines, and seconds. What is
out of bounds comes last; then the status is 1.
"""

import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from statistics import median
from typing import Annotated

import import_graph
import source_bounds
import typer
import ways
from source_bounds import BOUNDED, MAX_DECISIONS, MAX_FUNCTION_LINES, PACKAGE, TABLES_ALLOWED
from ways import Way

REPOSITORY = Path(__file__).parents[2]
CORE = ("decoding/", "models/")
MAX_CORE_LINES = 3000
DRAFTED = ("small-draft", "sharing-draft")  # greedy, five drafted tokens, without the C parts
MAX_FILES = 24
MAX_NAMED = 150
MAX_ASKED = 6  # kinds of options, requests and plans: objects made before the first round
DOCUMENT = "document"
MAX_DOCUMENT_FILES = 40
# What the command `document` has no use for.
OTHER_COMMANDS = [
    *(f"cli.{name}" for name in ("batch", "bench", "convert", "distill", "doctor", "generate")),
    *(
        "cli.correct",
        "cli.translate",
        "cli.models",
        "cli.repl",
        "cli.serve",
        "causal",
        "distill",
        "doctor",
        "measure",
        "bench",
    ),
    "serve",
]
SHOWN_CALLS = {
    "generate": "generate, first call",
    "generate-again": "generate, second call",
    "stream": "stream",
    "coupled-sample": "coupled sample",
    "completion": "POST /v1/completions",
    DOCUMENT: "document, three sentences, K = 5: the command itself",
    "document-process": "the same, with imports, options and the loading of models",
    "small-draft": "generate, K = 5, a draft of its own weights",
    "sharing-draft": "generate, K = 5, a draft that shares",
}
MOST_COMPLEX = 20
TIMES = 5  # median of

Check = Callable[[Path], list[str]]


@cache
def way(root: Path, call: str) -> Way:
    """Return the way of a call; of those that have bounds, without the C parts."""
    return ways.follow(root, call, native=call not in (*DRAFTED, DOCUMENT))


# --- Bounds: each function says what is out of them


def long_functions(root: Path) -> list[str]:
    return faults_of_functions(source_bounds.functions_of(root, *BOUNDED))


def faults_of_functions(functions: Sequence[source_bounds.Function]) -> list[str]:
    return [
        str(function)
        for function in functions
        if function.decisions > MAX_DECISIONS or function.lines > MAX_FUNCTION_LINES
    ]


def long_files(root: Path) -> list[str]:
    return source_bounds.long_files(root)


def formatter_marks(root: Path) -> list[str]:
    marks = source_bounds.marks_of(root, *BOUNDED)
    marks += [mark for mark in source_bounds.marks_of(root, *TABLES_ALLOWED) if not mark.is_table]
    return [str(mark) for mark in marks]


def names_defined_twice(root: Path) -> list[str]:
    found = source_bounds.defined_twice(root)
    return [f"{name}: {', '.join(files)}" for name, files in found.items()]


def arrows(root: Path) -> list[str]:
    """Rooms without a place in the order, imports that run up, and circles of files."""
    order = import_graph.read_order(root / "pyproject.toml")
    return faults_of_imports(
        import_graph.read_graph(root), order, import_graph.rooms_without_place(root, order)
    )


def faults_of_imports(
    graph: import_graph.Graph, order: import_graph.Order, placeless: Sequence[str] = ()
) -> list[str]:
    return [
        *(f"{room} has no place in the order of rooms" for room in placeless),
        *(f"{a} imports {b}, which runs up" for a, b in import_graph.upward_arrows(graph, order)),
        *(f"a circle: {', '.join(circle)}" for circle in import_graph.circles(graph)),
    ]


def core(root: Path) -> list[str]:
    files = core_files([way(root, call) for call in DRAFTED])
    total = sum(source_bounds.num_lines(root / PACKAGE / file) for file in files)
    return over(f"lines in the core, {', '.join(files)}", total, MAX_CORE_LINES)


def core_files(followed: Sequence[Way]) -> list[str]:
    """Return the files of the loop and of the models that some ways enter."""
    return sorted({file for way in followed for file in way.files if file.startswith(CORE)})


def ways_of_generate(root: Path) -> list[str]:
    return [f"{call}: {fault}" for call in DRAFTED for fault in faults_of_generate(way(root, call))]


def faults_of_generate(way: Way) -> list[str]:
    return [
        *over("files entered", len(way.files), MAX_FILES),
        *over("named functions", len(way.named), MAX_NAMED),
        *over(
            f"kinds of objects before a round, {', '.join(way.asked)}", len(way.asked), MAX_ASKED
        ),
        *(f"{name} is made again, {count} times" for name, count in way.repeated.items()),
    ]


def way_of_document(root: Path) -> list[str]:
    return faults_of_document(way(root, DOCUMENT))


def faults_of_document(way: Way) -> list[str]:
    others = [name.removeprefix(f"{PACKAGE}.") for name in way.modules]
    return [
        *over("files entered", len(way.files), MAX_DOCUMENT_FILES),
        *(f"{name} is imported" for name in others if name in OTHER_COMMANDS),
    ]


def over(what: str, count: int, limit: int) -> list[str]:
    return [f"{count} {what}; at most {limit}"] if count > limit else []


CHECKS: dict[str, Check] = {
    "functions": long_functions,
    "files": long_files,
    "marks for the formatter": formatter_marks,
    "names": names_defined_twice,
    "arrows": arrows,
    "core": core,
    "ways of generate": ways_of_generate,
    "way of document": way_of_document,
}

# --- The report


def tell_ways(root: Path) -> Iterator[str]:
    yield "named functions, all functions, files, kinds of objects, objects made on the way of"
    for call, title in SHOWN_CALLS.items():
        found = way(root, call)
        counts = (len(found.named), len(found.functions), len(found.files))
        made = (len(found.made), sum(found.made.values()))
        yield "".join(f"{count:6}" for count in (*counts, *made)) + f"  {title}"


def tell_imports(root: Path, order: import_graph.Order) -> Iterator[str]:
    graph = import_graph.read_graph(root)
    upward, circles = import_graph.upward_arrows(graph, order), import_graph.circles(graph)
    yield f"{sum(map(len, graph.values()))} imports between {len(graph)} modules"
    yield f"{len(upward)} run up"
    yield from (f"    {importer} -> {imported}" for importer, imported in upward)
    yield f"{len(circles)} circles, of {[len(circle) for circle in circles]} modules"


def tell_functions(root: Path) -> Iterator[str]:
    functions = source_bounds.functions_of(root, *BOUNDED)
    yield from map(str, functions[:MOST_COMPLEX])
    yield f"{len(faults_of_functions(functions))} of {len(functions)} are out of bounds"


def tell_marks(root: Path) -> Iterator[str]:
    for place in (*BOUNDED, *TABLES_ALLOWED):
        marks = source_bounds.marks_of(root, place)
        rooms = Counter("/".join(mark.file.split("/")[:2]) for mark in marks)
        detail = ", ".join(f"{room} {count}" for room, count in rooms.items())
        tables = sum(mark.is_table for mark in marks)
        shown = f": {detail}" if place == PACKAGE and detail else ""
        yield f"{len(marks):6}  {place}, {tables} of them tables{shown}"


def tell_names(root: Path) -> Iterator[str]:
    found = source_bounds.defined_twice(root)
    yield f"{len(found)}: {', '.join(found)}" if found else "none"


def tell_lines(root: Path) -> Iterator[str]:
    for place in (PACKAGE, "tests", "scripts", "weights/training"):
        files = source_bounds.python_files(root, place)
        yield f"{sum(map(source_bounds.num_lines, files)):6}  {place}, {len(files)} files"
    files = core_files([way(root, call) for call in DRAFTED])
    total = sum(source_bounds.num_lines(root / PACKAGE / file) for file in files)
    yield f"{total:6}  core: {', '.join(files)}"


def tell_seconds(root: Path) -> Iterator[str]:
    imports = [f"from {PACKAGE} import SpeculativeDecoder, load"]
    yield f"{seconds(root, ['-c', *imports]):6.2f}  to import, Python's start included"
    text = ["-m", PACKAGE, "--prompt", ways.PROMPT]
    yield f"{seconds(root, text):6.2f}  to the first text, by a command"


def seconds(root: Path, arguments: Sequence[str]) -> float:
    """Return the median of the seconds of a process of a checkout's Python."""
    times = []
    for _ in range(TIMES):
        start = time.perf_counter()
        subprocess.run(
            [ways.python_of(root), *arguments],
            cwd=root,
            env=ways.environment(root),
            check=True,
            capture_output=True,
        )
        times.append(time.perf_counter() - start)
    return median(times)


def main(
    root: Annotated[Path, typer.Option(help="Checkout to look at.")] = REPOSITORY,
    order: Annotated[
        Path | None,
        typer.Option(help="File like pyproject.toml with the order of rooms; that of --root."),
    ] = None,
) -> None:
    root = root.resolve()
    rooms = import_graph.read_order(order or root / "pyproject.toml")
    parts = {
        "Ways": tell_ways(root),
        "Imports": tell_imports(root, rooms),
        "Functions": tell_functions(root),
        "Marks that keep the formatter away": tell_marks(root),
        "Names that two modules define": tell_names(root),
        "Lines": tell_lines(root),
        "Seconds": tell_seconds(root),
    }
    for title, lines in parts.items():
        print(f"\n{title}", *lines, sep="\n", flush=True)
    faults = {name: found for name, check in CHECKS.items() if (found := check(root))}
    print("\nOut of bounds", end="\n" if faults else ": nothing\n")
    for name, found in faults.items():
        print(f"  {name}", *found, sep="\n    ")
    raise typer.Exit(int(bool(faults)))


if __name__ == "__main__":
    typer.run(main)
