"""What one has to hold at a time is bounded; a text that breaks a bound is seen."""

import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import bounds
import import_graph
import pytest
import source_bounds
from conftest import REPOSITORY
from import_graph import Order, build_graph
from source_bounds import functions_in, marks_in, names_defined_twice
from ways import Recorder, Way

LAYERS = Order((("speculative_t5.top",), ("speculative_t5.one", "speculative_t5.two")))
WAY = Way({}, {}, {}, {}, [])


@pytest.mark.parametrize("name", bounds.CHECKS)
def test_bounds_hold(name: str) -> None:
    assert not bounds.CHECKS[name](REPOSITORY)


# --- Functions


def only_function(text: str) -> source_bounds.Function:
    (found,) = functions_in(textwrap.dedent(text))
    return found


@pytest.mark.parametrize(
    ("body", "decisions"),
    [
        ("if a: pass\nelif b: pass\nelse: pass", 2),
        ("for x in a: pass\nelse: pass", 1),
        ("while a: pass", 1),
        ("try: pass\nexcept ValueError: pass\nexcept TypeError: pass\nfinally: pass", 2),
        ("match a:\n    case 1: pass\n    case _: pass", 2),
        ("return a if b else c", 1),
        ("return a and b and c or d", 3),
        ("return [x for x in a for y in x if y if x]", 4),
        ("return lambda: a or b", 1),
        ("def inner():\n    return a or b", 0),
    ],
)
def test_decisions_are_counted(body: str, decisions: int) -> None:
    text = "def outer():\n" + textwrap.indent(body, "    ")
    assert functions_in(text)[0].decisions == decisions


def test_a_function_of_too_many_decisions_is_seen() -> None:
    operands = " or ".join("a" * 21)
    assert not bounds.faults_of_functions([only_function(f"def f(): return {operands}")])
    (fault,) = bounds.faults_of_functions([only_function(f"def f(): return {operands} or a")])
    assert "f: 21 decisions" in fault


def test_a_function_of_too_many_lines_is_seen() -> None:
    lines = "    pass\n" * 59
    assert not bounds.faults_of_functions([only_function(f"@a\ndef f():\n{lines}")])
    (fault,) = bounds.faults_of_functions([only_function(f"@a\ndef f():\n{lines}    pass\n")])
    assert "61 lines" in fault


# --- Files


@pytest.mark.parametrize(
    ("file", "most"),
    [("speculative_t5/a.py", 560), ("scripts/a.py", 560), ("setup.py", 560), ("tests/a.py", 640)],
)
def test_a_file_of_too_many_lines_is_seen(tmp_path: Path, file: str, most: int) -> None:
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n" * most)
    assert not bounds.long_files(tmp_path)
    path.write_text("\n" * (most + 1))
    assert bounds.long_files(tmp_path) == [f"{file}: {most + 1} lines, at most {most}"]


# --- Marks for the formatter

TABLES = {
    "rows": "X = (\n  (1, -2),\n  (A.b, 'c'),\n)  # fmt: skip",
    "calls": "X: list[Y] = [Y(1, a=2),\n  Y(3), Y(4)]  # fmt: skip",
    "dict": "X = {'a': 1, 'b': 2,\n  'c': [3]}  # fmt: skip",
    "array": "x = np.array([[1, 0],\n  [0, 1]])  # fmt: skip",
    "decorator": "@parametrize('a, b', [(1, 2),\n  (3, 4)])  # fmt: skip\ndef f(a, b): pass",
    "lines": "# fmt: off\nX = [1, 2,\n  3]\nY = [4, 5,\n  6]\n# fmt: on\nz = f(1)",
}
OTHERS = {
    "call": "x = f(1, 2, 3,\n  4)  # fmt: skip",
    "statement": "f(\n  [1, 2, 3])  # fmt: skip",
    "short": "X = [1,\n  2]  # fmt: skip",
    "computed": "X = [a if b else c,\n  1, 2]  # fmt: skip",
    "comprehension": "X = [[x, 1, 2]\n  for x in y]  # fmt: skip",
    "header": "if (a and\n  b):  # fmt: skip\n    pass",
    "lines": "# fmt: off\nX = [1, 2,\n  3]\nf(1)\n# fmt: on",
    "to the end": "# fmt: off\nX = [1, 2,\n  3]\nf(1)",
}


@pytest.mark.parametrize("text", TABLES.values(), ids=TABLES)
def test_a_table_of_data_is_told_from_other_statements(text: str) -> None:
    assert [mark.is_table for mark in marks_in(text)] == [True]


@pytest.mark.parametrize("text", OTHERS.values(), ids=OTHERS)
def test_a_mark_around_what_is_no_table_is_seen(text: str) -> None:
    assert [mark.is_table for mark in marks_in(text)] == [False]


def test_a_mark_in_a_string_is_none() -> None:
    assert not marks_in("x = '# fmt: skip'\n# fmt: on")


def test_tables_may_be_kept_from_the_formatter_in_tests_alone(tmp_path: Path) -> None:
    for place in ("speculative_t5", "scripts", "tests", "weights/training"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "a.py").write_text(TABLES["rows"])
    found = [fault.partition(":")[0] for fault in bounds.formatter_marks(tmp_path)]
    assert found == ["speculative_t5/a.py", "scripts/a.py"]


# --- Names


@pytest.mark.parametrize(
    "text",
    ["def name(): pass", "class name: pass", "name = 1", "name: int = 1", "a, (b, name) = x"],
)
def test_a_name_that_two_modules_define_is_seen(text: str) -> None:
    found = names_defined_twice({"one.py": text, "two.py": "name = 2", "three.py": "other = 3"})
    assert found == {"name": ["one.py", "two.py"]}


@pytest.mark.parametrize(
    "sources",
    [
        {"one.py": "log = 1", "two.py": "log = 2"},
        {"one.py": "from .two import name", "two.py": "name = 2"},
        {"one.py": "def f(): name = 1", "two.py": "name = 2"},
        {"one.py": "__all__ = []", "two.py": "__all__ = []"},
        {"models/t5.py": "class Encoder: pass", "models/t5gemma.py": "class Encoder: pass"},
        {"cli/distill.py": "def distill(): pass", "distill/run.py": "def distill(): pass"},
    ],
)
def test_exceptions_are_no_names_defined_twice(sources: dict[str, str]) -> None:
    assert not names_defined_twice(sources)


# --- Imports


def graph_of(**texts: str) -> dict[str, set[str]]:
    """Return the graph of modules of the package; those whose names end in `_init` are folders."""
    sources = {"speculative_t5": ""}
    sources |= {f"speculative_t5.{name.replace('__', '.')}": text for name, text in texts.items()}
    folders = {name for name in sources if any(other.startswith(f"{name}.") for other in sources)}
    return {
        module.removeprefix("speculative_t5."): {
            name.removeprefix("speculative_t5.") for name in to
        }
        for module, to in build_graph(sources, folders).items()
    }


@pytest.mark.parametrize(
    ("text", "imported"),
    [
        ("import speculative_t5.one", {"one"}),
        ("from speculative_t5.one import name", {"one"}),
        ("from . import two", {"here.two"}),
        ("from .. import one", {"one"}),
        ("from .. import __version__", {"speculative_t5"}),
        ("from ..here import name", {"here"}),
        ("def late():\n    from ..one import name", {"one"}),
        ("import_module('speculative_t5.one')", {"one"}),
        ("importlib.import_module('..one', __package__)", {"one"}),
        ("TABLE = {'name': 'two'}\nimport_module(f'.{TABLE[name]}', __name__)", {"here.two"}),
        ("if TYPE_CHECKING:\n    from ..one import name", set()),
        ("if typing.TYPE_CHECKING:\n    pass\nelse:\n    from .. import one", {"one"}),
        ("import os, numpy.linalg", set()),
    ],
)
def test_imports_are_found(text: str, imported: set[str]) -> None:
    graph = graph_of(here="", here__own=text, here__two="", one="")
    assert graph["here.own"] == imported


def test_an_import_that_runs_up_is_seen() -> None:
    graph = {"speculative_t5.one.a": {"speculative_t5.top"}, "speculative_t5.top": set[str]()}
    assert bounds.faults_of_imports(graph, LAYERS) == [
        "speculative_t5.one.a imports speculative_t5.top, which runs up"
    ]


def test_an_import_of_the_package_itself_runs_up() -> None:
    assert LAYERS.runs_up("speculative_t5.top", "speculative_t5")


def test_an_import_of_a_neighbour_in_the_order_is_seen() -> None:
    assert LAYERS.runs_up("speculative_t5.one.a", "speculative_t5.two.a")
    assert not LAYERS.runs_up("speculative_t5.one.a", "speculative_t5.one.b")
    assert not LAYERS.runs_up("speculative_t5.top", "speculative_t5.one")


def test_a_circle_of_files_is_seen() -> None:
    graph = graph_of(one="from . import two", two="from . import three", three="from . import one")
    assert bounds.faults_of_imports(graph, LAYERS) == ["a circle: one, three, two"]


def test_two_circles_are_two() -> None:
    graph = {"a": {"b"}, "b": {"a", "c"}, "c": {"d"}, "d": {"c"}, "e": {"a"}}
    assert import_graph.circles(graph) == [["a", "b"], ["c", "d"]]


def test_a_room_without_a_place_is_seen(tmp_path: Path) -> None:
    for name in ("top/__init__.py", "new/__init__.py", "one.py", "two.py", "__init__.py"):
        path = tmp_path / "speculative_t5" / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.touch()
    assert import_graph.rooms_without_place(tmp_path, LAYERS) == ["speculative_t5.new"]


# --- Ways


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Way]:
    """Runs `call` of a package of one module, which has this text, and returns its way."""

    def run(text: str, within: str | None = None, *, whole: bool = False) -> Way:
        folder = tmp_path / "speculative_t5"
        folder.mkdir(exist_ok=True)
        code = compile(textwrap.dedent(text), str(folder / "own.py"), "exec")
        module: Any = ModuleType("speculative_t5.own")
        module.dataclass = dataclass
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(code, vars(module))
        with Recorder(tmp_path) as recorder, recorder.on(within, whole=whole):
            module.call()
        return recorder.way()

    return run


def test_a_way_has_the_functions_that_ran(record: Callable[..., Way]) -> None:
    way = record("""
        def called(x): return x
        def idle(): pass
        def call():
            class Inner: pass
            for _ in range(3):
                list(called(x) for x in [1])
                sorted([1, 2], key=lambda x: called(-x))
        """)
    assert [name.partition(" ")[2] for name in way.named] == ["called", "call"]
    assert way.functions["own.py:2 called"] == 9 and len(way.functions) == 4
    assert way.files == ["own.py"]


def test_a_way_leaves_out_imports_and_the_loading_of_models(record: Callable[..., Way]) -> None:
    way = record("""
        def inner(): pass
        class SpeculativeDecoder:
            def from_pretrained(): inner()
        def call(): SpeculativeDecoder.from_pretrained()
        """)
    assert [name.partition(" ")[2] for name in way.named] == ["call"]


def test_a_way_may_begin_within_a_function_and_have_all(record: Callable[..., Way]) -> None:
    text = """
        def inner(): pass
        class SpeculativeDecoder:
            def from_pretrained(): inner()
        def command():
            SpeculativeDecoder.from_pretrained()
        def call():
            inner()
            command()
        """
    assert [name.partition(" ")[2] for name in record(text, "command").named] == ["command"]
    whole = [name.partition(" ")[2] for name in record(text, whole=True).named]
    assert whole == ["inner", "command", "call"]


def test_a_way_has_the_objects_asked_for_before_the_first_round(
    record: Callable[..., Way],
) -> None:
    way = record("""
        @dataclass(frozen=True)
        class Options: k: int
        @dataclass
        class Row: k: int
        class Batch:
            def round(self): return Row(1), Row(1), Options(5)
        def call():
            batch, options = Batch(), [Options(5), Options(6)]
            batch.round(), batch.round()
        """)
    assert way.made == {"Options": 4, "Row": 4}
    assert way.asked == {"Options": 2}
    assert way.repeated == {"Options": 2}


@pytest.mark.parametrize(
    ("way", "fault"),
    [
        (Way({f"{i}.py:1 f": 1 for i in range(25)}, {}, {}, {}, []), "25 files entered"),
        (Way({f"a.py:{i} f": 1 for i in range(151)}, {}, {}, {}, []), "151 named functions"),
        (Way({}, {}, dict.fromkeys("abcdefg", 1), {}, []), "7 kinds of objects"),
        (Way({}, {}, {}, {"ModelInfo": 59}, []), "ModelInfo is made again, 59 times"),
    ],
)
def test_a_way_of_generate_that_is_too_wide_is_seen(way: Way, fault: str) -> None:
    assert not bounds.faults_of_generate(WAY)
    assert [each[: len(fault)] for each in bounds.faults_of_generate(way)] == [fault]


@pytest.mark.parametrize(
    ("way", "fault"),
    [
        (Way({f"{i}.py:1 f": 1 for i in range(41)}, {}, {}, {}, []), "41 files entered"),
        (Way({}, {}, {}, {}, ["speculative_t5.cli.batch"]), "cli.batch is imported"),
        (Way({}, {}, {}, {}, ["speculative_t5.serve"]), "serve is imported"),
    ],
)
def test_a_way_of_document_that_is_too_wide_is_seen(way: Way, fault: str) -> None:
    assert not bounds.faults_of_document(WAY)
    assert [each[: len(fault)] for each in bounds.faults_of_document(way)] == [fault]


def test_the_core_is_the_loop_and_the_models_on_the_way() -> None:
    files = ("decoding/loop.py", "models/t5.py", "generation/decoder.py")
    ways = [Way({f"{file}:1 f": 1}, {}, {}, {}, []) for file in files]
    assert bounds.core_files(ways) == ["decoding/loop.py", "models/t5.py"]


def test_a_core_of_too_many_lines_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "speculative_t5" / "decoding" / "loop.py"
    path.parent.mkdir(parents=True)
    way = Way({"decoding/loop.py:1 f": 1}, {}, {}, {}, [])
    monkeypatch.setattr(bounds, "way", lambda root, call: way)
    path.write_text("\n" * 3000)
    assert not bounds.core(tmp_path)
    path.write_text("\n" * 3001)
    (fault,) = bounds.core(tmp_path)
    assert fault.startswith("3001 lines in the core")
