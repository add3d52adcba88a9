"""Who imports whom in the package: the order of its rooms, arrows against it, circles of files."""

import ast
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from source_bounds import PACKAGE, python_files

Graph = Mapping[str, set[str]]

# Imports that run up, each with its reason.
UPWARD_ALLOWED = {
    ("speculative_t5.generation.decoder", "speculative_t5.documents"): (
        "decoder.rewrite(text) is a public name; it imports whole texts when it is asked for"
    ),
}


@dataclass(frozen=True)
class Order:
    """The rooms of a package, the highest first; those of one layer may not import each other."""

    layers: tuple[tuple[str, ...], ...]

    def height(self, module: str) -> int | None:
        """Return how high a module stands; the package's root is above all, None is nowhere."""
        if module == PACKAGE:
            return len(self.layers)
        for depth, rooms in enumerate(self.layers):
            if any(module == room or module.startswith(f"{room}.") for room in rooms):
                return len(self.layers) - 1 - depth
        return None

    def room(self, module: str) -> str:
        rooms = (room for layer in self.layers for room in layer)
        return next((r for r in rooms if module == r or module.startswith(f"{r}.")), module)

    def runs_up(self, importer: str, imported: str) -> bool:
        """Whether an import runs up, or to another room of the same layer."""
        here, there = self.height(importer), self.height(imported)
        if here is None or there is None:
            return False
        return there > here or (there == here and self.room(importer) != self.room(imported))


def read_order(pyproject: Path) -> Order:
    """Read the order of rooms from import-linter's contract."""
    settings = tomllib.loads(pyproject.read_text(encoding="utf-8"))["tool"]["importlinter"]
    layers = next(each["layers"] for each in settings["contracts"] if each["type"] == "layers")
    return Order(tuple(tuple(map(str.strip, layer.split("|"))) for layer in layers))


def rooms_of(root: Path) -> set[str]:
    """Return the rooms of a checkout's package: its folders of modules, and modules beside them."""
    top = root / PACKAGE
    folders = {path.name for path in top.iterdir() if (path / "__init__.py").exists()}
    modules = {path.stem for path in top.glob("*.py")} - {"__init__"}
    return {f"{PACKAGE}.{name}" for name in folders | modules}


def rooms_without_place(root: Path, order: Order) -> list[str]:
    """Name the rooms that the order does not have."""
    return sorted(room for room in rooms_of(root) if order.height(room) is None)


def read_graph(root: Path) -> Graph:
    """Return the modules that each module of a checkout's package imports, sooner or later."""
    sources = {
        module_name(path.relative_to(root)): path.read_text(encoding="utf-8")
        for path in python_files(root, PACKAGE)
    }
    folders = {
        module_name(path.relative_to(root)) for path in root.glob(f"{PACKAGE}/**/__init__.py")
    }
    return build_graph(sources, folders)


def module_name(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def build_graph(sources: Mapping[str, str], folders: set[str]) -> Graph:
    """Return the modules that each of these imports: late ones counted, those for types alone not.

    `folders` are those of `sources` that have modules in them. An import of a module does not count
    as one of the folders around it.
    """
    return {
        module: set(_imported(ast.parse(text), module, module in folders, set(sources))) - {module}
        for module, text in sources.items()
    }


def _imported(tree: ast.AST, module: str, is_folder: bool, known: set[str]) -> Iterator[str]:
    """Yield the known modules that a module imports."""
    package = module if is_folder else module.rpartition(".")[0]
    for node in _run_nodes(tree):
        if isinstance(node, ast.Import):
            named = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            named = _imported_from(node, package, known)
        elif isinstance(node, ast.Call) and _called(node) == "import_module":
            named = _imported_by_name(node, tree, package)
        else:
            continue
        yield from (name for name in named if name in known)


def _imported_from(node: ast.ImportFrom, package: str, known: set[str]) -> list[str]:
    """Return the modules that `from ... import ...` names, or what it takes names from."""
    base = _absolute("." * node.level + (node.module or ""), package)
    inner = [f"{base}.{alias.name}" for alias in node.names]
    return [name if name in known else base for name in inner]


def _imported_by_name(call: ast.Call, tree: ast.AST, package: str) -> list[str]:
    """Return what `import_module` may be asked for: a string, or any of the module's strings."""
    constant = isinstance(call.args[0], ast.Constant)
    texts = [
        node.value
        for node in ([call.args[0]] if constant else ast.walk(tree))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.strip(".")
    ]
    return [name for text in texts for name in (_absolute(text, package), f"{package}.{text}")]


def _run_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes but those under `if TYPE_CHECKING:`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for other in node.orelse:
                yield from (other, *_run_nodes(other))
        else:
            yield node
            yield from _run_nodes(node)


def _called(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]


def _absolute(name: str, package: str) -> str:
    """Return the name that a relative import from a package means."""
    level = len(name) - len(name.lstrip("."))
    if level == 0:
        return name
    parts = package.split(".")
    base = parts[: len(parts) - level + 1]
    return ".".join([*base, name[level:]] if name[level:] else base)


def upward_arrows(graph: Graph, order: Order) -> list[tuple[str, str]]:
    """Return the imports that run up, without those that are allowed."""
    return sorted(
        (importer, imported)
        for importer, others in graph.items()
        for imported in others
        if order.runs_up(importer, imported) and (importer, imported) not in UPWARD_ALLOWED
    )


def circles(graph: Graph) -> list[list[str]]:
    """Return the groups of modules of which each imports each other, by way of others perhaps.

    These are the strongly connected components of more than one module, without arrows that may
    run up.
    """
    graph = {
        module: {other for other in others if (module, other) not in UPWARD_ALLOWED}
        for module, others in graph.items()
    }
    reached = {module: _reached(graph, module) for module in graph}
    found: list[list[str]] = []
    for module in sorted(graph):
        if module in reached[module] and not any(module in group for group in found):
            found.append(sorted(m for m in reached[module] if module in reached.get(m, set())))
    return found


def _reached(graph: Graph, start: str) -> set[str]:
    found: set[str] = set()
    waiting: Sequence[str] = [start]
    while waiting:
        new = {other for module in waiting for other in graph.get(module, ())} - found
        found |= new
        waiting = sorted(new)
    return found
