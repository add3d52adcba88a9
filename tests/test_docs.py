"""Every code block of the README and the docs runs, for someone who has installed the package.

What `pip install` does not bring, such as correct-draft, is found only by the pages of `CHECKOUT`
and by blocks whose text names a checkout. Python runs block by block, and must print what its
comments say; a block that needs another one of its page says so (`CONTINUES_FIRST`). The shell
commands of a page run one after the other in this process, in a folder with only tiny models under
the names used; slow ones run for less (`LESS`), or only have their names and options checked
(`CHECKED`).
"""

import os
import plistlib
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from configparser import ConfigParser
from functools import cache
from pathlib import Path
from typing import Any

from speculative_t5 import __version__
from speculative_t5.checkpoints import convert, load, model_folder, save_draft
from speculative_t5.distill import DistillOptions, new_draft

import pytest
from checkpoints import write_causal
from commands import caller
from conftest import REPOSITORY, V1_1, edit_json, write_checkpoint
from families import write_adapter
from lacking_packages import lacking
from local_hub import Hub, use
from test_build import MODELS

OTHERS = "README.md", "weights/README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"
DOCS = sorted((REPOSITORY / "docs").glob("*.md"))
PAGES = [*(REPOSITORY / name for name in OTHERS), *DOCS]
CONTENTS = REPOSITORY / "docs" / "README.md"  # a line about each page of docs
README_WORDS, PAGE_WORDS = 750, 1500
CHECKOUT = {"CONTRIBUTING.md", "extending.md"}  # pages for those who change the package
CONTINUES_FIRST = "# continues the first example of this page"
CONTINUES_ABOVE = "# continues the example above"
SERVER = "http://127.0.0.1:8080"  # where the pages say that a server is
SHARED = "/mnt/shared"  # a folder that all machines of a cluster see
BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
DECODER_ONLY = {  # names on the Hub of models that are random and tiny here
    "openai-community/gpt2-xl": "gpt2",
    "openai-community/gpt2": "gpt2",
    "facebook/opt-350m": "opt",
    "facebook/opt-125m": "opt",
    "Qwen/Qwen3-4B": "qwen3",
    "Qwen/Qwen3-0.6B": "qwen3",
}
BENCH = "--turns 1 --max-tokens 48 --num-draft 2"  # "auto" may draft 63 tokens a round
LESS = {  # options added to commands that take minutes
    "doctor": "--only versions",
    "distill": "--steps 2 --batch-tokens 200 --max-tokens 8",
    "bench": f"{BENCH} --prompts prompt.txt",
    "bench --batch-size": f"{BENCH} --prompts prompt.txt --batch-size 1,2",
    "bench --random": f"{BENCH} --random t5-small:t5-small --source 16 --count 1 --max-tokens 20",
}
CHECKED = {  # why they are not run
    "scripts/gpu.sh": "measures for minutes; test_gpu_script.py has its parts",
    "python scripts/": "measure for minutes to hours, with data that is not here",
    "python weights/training/": "train for minutes to hours",
    "python -m speculative_t5 --model google-t5/t5-small": "needs a checkpoint that has tasks",
    "python -m speculative_t5 --model google/madlad400": "needs one that translates",
    "python -m speculative_t5 document reports --model madlad": "the same",
    "python convert.py --model google/madlad400": "the same",
    "python -m speculative_t5 document series --model madlad": "the same",
    "python -m speculative_t5 document series --check": "exit code 1: there are suggestions",
    "python -m speculative_t5 document texts --review": "asks on a terminal",
    "python -m speculative_t5 batch prompts.txt --model google-t5/t5-small": "needs tasks, too",
    "python -m speculative_t5 doctor --model": "the same, with other models",
    "python -m speculative_t5 doctor --only": "the same, for longer",
    "python -m speculative_t5 doctor --report": "the same, for minutes",
    "python -m speculative_t5 distill --model M --data prompts.txt --minutes": "takes them",
    "python -m speculative_t5 distill --model correct-base": "the same, and has to have the data",
    "python -m speculative_t5 bench --num-draft 1-10": "needs a pair that is trained for an hour",
    "python -m speculative_t5 bench --turns 9": "takes minutes; others are run",
    "python -m speculative_t5 bench --json": "the same; test_benchmark.py draws its plot",
    "python -m speculative_t5 serve": "runs until it is stopped; curl asks one",
    "python -m pytest": "those tests are run with these",
}


def anchors(page: Path) -> set[str]:
    """Return the names under which links find a page's headings."""
    prose = BLOCK.sub("", page.read_text(encoding="utf-8"))
    titles = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def prose_words(page: Path) -> int:
    """Count the words of a page outside its tables and blocks of code."""
    lines = BLOCK.sub("", page.read_text(encoding="utf-8")).splitlines()
    return sum(len(line.split()) for line in lines if not line.startswith("|"))


def blocks(page: Path, language: str) -> list[str]:
    return [
        "".join(line.removeprefix(indent) for line in text.splitlines(keepends=True))
        for indent, found, text in BLOCK.findall(page.read_text(encoding="utf-8"))
        if found == language
    ]


def examples(page: Path) -> Iterator[tuple[str, bool]]:
    """Yield Python that runs by itself, and whether it says that it needs a checkout."""
    found = blocks(page, "python")
    for above, block in zip(["", *found], found, strict=False):
        text = page.read_text(encoding="utf-8").partition(block)[0].rsplit("\n\n", 2)[-2]
        needed = {CONTINUES_FIRST: found[0], CONTINUES_ABOVE: above}.get(block.splitlines()[0], "")
        yield needed + block, page.name in CHECKOUT or "checkout" in text


def commands(page: Path) -> list[str]:
    lines = "".join(blocks(page, "sh")).replace("\\\n", "").splitlines()
    return [line.split("  #")[0].strip() for line in lines if line.split("  #")[0].strip()]


def pages_with(language: str) -> Any:
    found = [page for page in PAGES if blocks(page, language)]
    return pytest.mark.parametrize("page", found, ids=lambda p: str(p.relative_to(REPOSITORY)))


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package as `pip install` leaves it."""
    package = tmp_path_factory.mktemp("installed") / "speculative_t5"
    (package / "weights").mkdir(parents=True)
    for path in (REPOSITORY / "speculative_t5").iterdir():
        (package / path.name).symlink_to(path)
    for name in MODELS:
        (package / "weights" / name).symlink_to(REPOSITORY / "weights" / name)
    return package.parent


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_pages_have_narrow_lines_named_blocks_and_links_that_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    kinds = [kind for _, kind, _ in BLOCK.findall(text)]
    assert set(kinds) <= {"python", "sh", "text"}
    assert text.count("```") == 2 * len(kinds)
    assert not [line for line in text.splitlines() if len(line) > 120 and line[0] != "|"]
    for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", text):
        if not target.startswith("http"):
            led_to = page.parent / target if target else page
            assert led_to.exists(), target
            assert not anchor or anchor in anchors(led_to), f"{target}#{anchor}"


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_pages_of_docs_are_short_and_listed(page: Path) -> None:
    """What is longer is divided: tables and blocks of code are not counted."""
    assert prose_words(page) <= PAGE_WORDS
    if page != CONTENTS:
        assert f"({page.name})" in CONTENTS.read_text(encoding="utf-8")


def test_readme_is_short() -> None:
    assert len((REPOSITORY / "README.md").read_text(encoding="utf-8").split()) <= README_WORDS


def test_changelog_and_citation_have_the_version_of_the_package() -> None:
    released = re.findall(
        r"^## \[([\d.]+)\] - ([\d-]+)$", (REPOSITORY / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    citation = (REPOSITORY / "CITATION.cff").read_text()
    (version,) = re.findall(r"^version: (.*)$", citation, re.MULTILINE)
    (date,) = re.findall(r"^date-released: (.*)$", citation, re.MULTILINE)
    assert released[0] == (version, date) and version == __version__


def promised(code: str) -> Iterator[str]:
    """What comments say is printed: behind a print, or in the lines below it."""
    below = False
    for line in code.splitlines():
        statement, _, comment = line.partition("  # ")
        if line.startswith("# ") and below:
            yield line.removeprefix("# ")
            continue
        below = "print(" in statement and line.rstrip().endswith(")") or (below and line == ")")
        if comment and statement.lstrip().startswith("print("):
            yield comment


def shared_folder(here: Path) -> None:
    """Fill the folder that all machines of a cluster see: a table with a prompt and without."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    (here / "in").mkdir()
    table = pa.table({"id": [1, 2], "sentence": ["He go home.", None]})
    pq.write_table(table, here / "in" / "part.parquet")


@pages_with("python")
def test_python_runs_and_prints_what_it_says(
    page: Path, installed: Path, tmp_path: Path, hub: Hub, request: pytest.FixtureRequest
) -> None:
    environment = os.environ | {
        "XDG_CACHE_HOME": str(tmp_path),
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(tmp_path / "hf"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DATA_DEFAULT_MIN_PARALLELISM": "1",  # it would shuffle 200 parts of two rows
    }
    for number, (code, needs_checkout) in enumerate(examples(page)):
        here = tmp_path / str(number)
        here.mkdir()
        if SERVER in code:
            code = code.replace(SERVER, request.getfixturevalue("server"))
        if SHARED in code:
            code = code.replace(SHARED, str(here)).replace("size=2", "size=1")  # workers
            code = code.replace("num_cpus=4", "num_cpus=2")
            shared_folder(here)
        done = subprocess.run(
            [sys.executable, "-"],
            input=code,
            cwd=REPOSITORY if needs_checkout else here,
            capture_output=True,
            text=True,
            env=environment | {"PYTHONPATH": str(REPOSITORY if needs_checkout else installed)},
        )
        if name := lacking(done.stderr):
            pytest.skip(f"{name} is not installed")
        assert done.returncode == 0, done.stderr
        for line in promised(code):
            assert line in done.stdout.splitlines(), f"{line!r} is not in {done.stdout!r}"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Iterator[Hub]:
    root = tmp_path_factory.mktemp("hub")
    german = {"translation_en_to_de": {"prefix": "translate English to German: "}}
    for size in ("small", "large", "xl", "xxl"):
        folder = root / f"google/flan-t5-{size}"
        shutil.copytree(checkpoint, folder)
        edit_json(folder / "config.json", task_specific_params=german)
    for name, kind in DECODER_ONLY.items():
        write_causal(root / name, kind)
    server = Hub(root)
    yield server
    server.server.shutdown()
    server.server.server_close()


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of a server with the shipped pair."""
    command = [sys.executable, "-m", "speculative_t5", "serve", "--port", "0"]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen(
        command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout
        yield process.stdout.readline().split()[-1]  # which it prints when it is ready
        process.terminate()
    assert process.returncode == 0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, spiece: bytes) -> Path:
    """A checkpoint with matrices wide enough to be quantized."""
    folder = tmp_path_factory.mktemp("checkpoint")
    wide = {"d_model": 64, "d_kv": 32, "num_heads": 4, "d_ff": 128}
    write_checkpoint(folder, V1_1 | wide, spiece)
    return folder


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Path:
    """An adapter for the checkpoint."""
    from transformers import T5ForConditionalGeneration

    folder = tmp_path_factory.mktemp("adapter")
    model = T5ForConditionalGeneration.from_pretrained(checkpoint)
    write_adapter(folder, model, checkpoint, target_modules=["q", "v"])
    return folder


@pytest.fixture
def workplace(tmp_path: Path, checkpoint: Path, adapter: Path) -> Path:
    """A folder with the models that the commands name, and nothing else of a user's own."""
    (tmp_path / "weights").mkdir()
    (tmp_path / "docs" / "images").mkdir(parents=True)
    for name in ("M", "D"):
        convert(str(checkpoint), tmp_path / "weights" / name)
    for name in ("t5-11b", "path/to/checkpoint"):
        shutil.copytree(checkpoint, tmp_path / name)
    (tmp_path / "prompt.txt").write_text(
        "He go home. And I has lived in this city for ten years.\n"
    )
    (tmp_path / "prompts.txt").write_text("He go home.\nShe have a apple.\nI is late.\n")
    shutil.copytree(adapter, tmp_path / "A")
    return tmp_path


def less(command: str) -> str:
    for name, more in sorted(LESS.items(), key=lambda item: -len(item[0])):
        if all(f" {word}" in command for word in name.split()):
            return f"{command} {more}"
    return command


@cache
def python(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY), "COLUMNS": "200"},
    )


def check_names(command: str) -> None:
    words = shlex.split(command)
    if command.startswith("scripts/"):
        assert os.access(REPOSITORY / words[0], os.X_OK)
        subprocess.run(["bash", "-n", words[0]], cwd=REPOSITORY, check=True)
    elif command.startswith("python -m pytest"):
        done = python(*words[1:], "--collect-only")
        assert done.returncode == 0, f"it selects nothing, or cannot run: {done.stdout}"
    else:
        named = words[1:4] if words[1] == "-m" else words[1:3]
        called = [word for word in named if not word.startswith("--")]
        options = {word for word in words if word.startswith("--")}
        assert options <= set(re.findall(r"--[\w-]+", python(*called, "--help").stdout)), options


@pages_with("sh")
def test_commands_run_in_the_order_of_the_page(
    page: Path,
    workplace: Path,
    installed: Path,
    hub: Hub,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    call = caller(workplace, monkeypatch, capfd)
    use(monkeypatch, hub.endpoint, cache=workplace / "hf")
    monkeypatch.setenv("HF_TOKEN", "hf_of_a_test")
    if page.name not in CHECKOUT:
        monkeypatch.setattr(model_folder, "CHECKOUT_FOLDER", None)
        monkeypatch.setattr(model_folder, "PACKAGE_FOLDER", installed / "speculative_t5")
    for command in commands(page):
        if command.startswith(tuple(CHECKED)):
            check_names(command)
            continue
        if SERVER in command:
            command = command.replace("curl ", "curl --silent --fail-with-body ")
            command = command.replace(SERVER, request.getfixturevalue("server"))
        if "M-draft" in command:  # what takes minutes
            model: Any = load(workplace / "weights" / "M")[0]
            save_draft(workplace / "weights" / "M-draft", new_draft(model, DistillOptions()), "M")
        before, _, last = command.rpartition(" | ")
        if last.startswith("python -m speculative_t5"):
            last, _, output = less(last).partition(" > ")
            stdin = in_bash(before, workplace) if before else None
            done = call(*shlex.split(last)[3:], stdin=stdin)
            assert done.code == 0, f"{command}: {done.err}"
            assert "Traceback" not in "".join(done.err)
            if output:
                (workplace / output).write_text(done.out)
        elif last.startswith("python convert.py"):
            monkeypatch.chdir(REPOSITORY)
            assert call(*shlex.split(last)[2:], program="convert.py").code == 0
        else:
            first = command.partition(" ")[0]
            assert first in ("python", "printf", "echo", "curl", "mkdir", "mlx.launch"), (
                f"nothing runs {command!r}"
            )
            in_bash(command, workplace)


def in_bash(command: str, folder: Path) -> str:
    """Run a line of a shell, and return what it prints."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=os.environ | {"PATH": path, "PYTHONPATH": str(REPOSITORY)},
    )
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


def test_files_are_written_only_where_the_page_says(tmp_path: Path) -> None:
    (tmp_path / "temporary").mkdir()
    names = {"HOME": str(tmp_path), "TMPDIR": str(tmp_path / "temporary")}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("XDG_")}
    prompt = "She dont no where there keys is, and they was looking for it."
    subprocess.run(
        [sys.executable, "-m", "speculative_t5", "--prompt", prompt],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        stdin=subprocess.DEVNULL,
        env=kept | names | {"PYTHONPATH": str(REPOSITORY)},
    )
    found = {path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()}
    written = {"/".join(path.parts[:2]) for path in found}
    ours, mlx = ".cache/speculative_t5", "temporary/mlx"
    assert {ours} <= written <= {ours, mlx}  # mlx compiles where the C parts are missing
    page = (REPOSITORY / "docs" / "installing.md").read_text(encoding="utf-8")
    assert "| `~/.cache/speculative_t5` " in page and "| `mlx` in the folder for temp" in page


def test_units_start_the_server_with_options_that_it_has() -> None:
    folder = REPOSITORY / "docs" / "services"
    parsed = ConfigParser(interpolation=None, delimiters=("=",))
    parsed.optionxform = str  # type: ignore[assignment, method-assign]
    parsed.read(folder / "speculative-t5.service", encoding="utf-8")
    plist = (folder / "speculative-t5.plist").read_bytes()
    for line in (
        parsed["Service"]["ExecStart"],
        shlex.join(plistlib.loads(plist)["ProgramArguments"]),
    ):
        program, _, rest = line.partition(" ")
        assert program.endswith("/bin/speculative-t5") and rest.startswith("serve ")
        check_names(f"python -m speculative_t5 {rest}")


@pytest.mark.parametrize(
    "command",
    [
        "python -m pytest -q tests/test_cache.py -k nothing_of_that_name",
        "python scripts/figures/draw_round.py --no-such-option 1",
        "python -m speculative_t5 bench --no-such-option 1",
        "scripts/no_such_script.sh",
    ],
)
def test_the_check_of_names_can_fail(command: str) -> None:
    with pytest.raises(AssertionError):
        check_names(command)
