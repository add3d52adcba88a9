"""The ways of calls through the package: the functions, files and objects that one call enters.

    python scripts/checks/ways.py generate        # in the root of a checkout

prints a way as JSON, on its last line. `follow` runs that in a process of its own.
"""

import contextlib
import dataclasses
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

PACKAGE = "speculative_t5"
MODEL = "correct-base"
SMALL, SHARING = "correct-small", "correct-draft"
# Several rounds, in some of which drafted tokens are refused.
PROMPT = "Yesterday she go to the libary and borrowed three book about a history of numbers."
TEXT = "He go home. She have a apple. They is here.\n"
FIRST_ROUND = "Batch.round"
LOADING = ("SpeculativeDecoder.from_pretrained", "DecoderOptions.load")
NATIVE = "SPECULATIVE_T5_NATIVE"
SECONDS = 120  # that a server may need to answer

Call = Callable[["Recorder"], None]


@dataclass(frozen=True)
class Way:
    """What a call enters and makes, of the package alone."""

    functions: dict[str, int]  # "file:line name" of each function, and how often it ran
    made: dict[str, int]  # objects of dataclasses: how many of each kind
    asked: dict[str, int]  # those among them that were made before the first round
    repeated: dict[str, int]  # values that were made again, equal to one made before
    modules: list[str]  # that were loaded at the end

    @property
    def named(self) -> list[str]:
        """Functions without lambdas, comprehensions and generator expressions."""
        return [name for name in self.functions if not name.endswith(">")]

    @property
    def files(self) -> list[str]:
        """Files with a named function that ran."""
        return sorted({name.partition(":")[0] for name in self.named})


class Recorder:
    """Records which functions of the package run, in all threads, while it is on.

    What a module or a class does as it is imported is left out, and so is the loading of models,
    which a call of `generate` finds done.
    """

    def __init__(self, root: Path) -> None:
        self._folder = f"{root / PACKAGE}{os.sep}"
        self._on = False
        self._within: str | None = None  # the function whose calls switch this on
        self._whole = False
        self._outside = threading.local()  # how deep in imports and loading each thread is
        self._functions: Counter[CodeType] = Counter()
        self._made: list[Any] = []  # kept, so that no two have one address
        self._num_asked: int | None = None

    def __enter__(self) -> "Recorder":
        threading.setprofile(self._see)
        sys.setprofile(self._see)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    @contextlib.contextmanager
    def on(self, within: str | None = None, *, whole: bool = False) -> Iterator[None]:
        """Record anew.

        Args:
            within: Record only while this function of the package runs.
            whole: Leave out neither imports nor the loading of models.
        """
        self._functions.clear()
        self._made.clear()
        self._num_asked = None
        self._on, self._within, self._whole = within is None, within, whole
        try:
            yield
        finally:
            self._on, self._within = False, None

    def _see(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_name == "__init__" and self._on:
            self._note_object(frame)
        if not code.co_filename.startswith(self._folder) or event not in ("call", "return"):
            return
        if code.co_qualname == self._within:
            self._on = event == "call"
        if code.co_name == "<module>" or code.co_qualname in LOADING:
            self._outside.depth = self._depth + (1 if event == "call" else -1)
        elif event == "call" and self._on and self._counts and not is_class_body(code):
            self._functions[code] += 1
            if code.co_qualname == FIRST_ROUND and self._num_asked is None:
                self._num_asked = len(self._made)

    @property
    def _depth(self) -> int:
        return getattr(self._outside, "depth", 0)

    @property
    def _counts(self) -> bool:
        return self._whole or not self._depth

    def _note_object(self, frame: FrameType) -> None:
        module = frame.f_globals.get("__name__") or ""
        if module.partition(".")[0] == PACKAGE and self._counts:
            made = frame.f_locals.get("self")
            if dataclasses.is_dataclass(made):
                self._made.append(made)

    def way(self) -> Way:
        asked = self._made[: self._num_asked]
        repeated = [
            made
            for i, made in enumerate(self._made)
            if is_value(made) and again(made, self._made[:i])
        ]
        return Way(
            {self._name(code): count for code, count in sorted_by_place(self._functions)},
            kinds(self._made),
            kinds(asked),
            kinds(repeated),
            sorted(name for name in sys.modules if name.partition(".")[0] == PACKAGE),
        )

    def _name(self, code: CodeType) -> str:
        file = Path(code.co_filename).relative_to(self._folder).as_posix()
        return f"{file}:{code.co_firstlineno} {code.co_qualname}"


def sorted_by_place(functions: Counter[CodeType]) -> list[tuple[CodeType, int]]:
    return sorted(functions.items(), key=lambda item: (item[0].co_filename, item[0].co_firstlineno))


def is_class_body(code: CodeType) -> bool:
    """Whether this is what runs as a class is made: it has no arguments, and names its module."""
    return not code.co_argcount and "__qualname__" in code.co_names[:3]


def is_value(made: Any) -> bool:
    return bool(made.__dataclass_params__.frozen)


def again(made: Any, before: list[Any]) -> bool:
    """Whether an equal value was made before."""
    for other in before:
        if type(other) is type(made) and other is not made:
            with contextlib.suppress(ValueError):  # arrays have no one answer
                if other == made:
                    return True
    return False


def kinds(made: list[Any]) -> dict[str, int]:
    return dict(sorted(Counter(type(each).__name__ for each in made).items()))


# --- Calls, each in a process of its own


def generate(recorder: Recorder, *, calls: int, **options: Any) -> None:
    """Record the last of some calls of `generate`."""
    decoder = load_decoder(**options)
    for _ in range(calls):
        with recorder.on():
            decoder.generate(PROMPT)


def load_decoder(**options: Any) -> Any:
    from speculative_t5 import SpeculativeDecoder

    return SpeculativeDecoder.from_pretrained(MODEL, **options)


def stream(recorder: Recorder) -> None:
    decoder = load_decoder()
    with recorder.on():
        list(decoder.stream(PROMPT))


def coupled_sample(recorder: Recorder) -> None:
    decoder = load_decoder()
    with recorder.on():
        decoder.generate(PROMPT, temperature=1.0, seed=1)


def document(recorder: Recorder, *, whole: bool = False) -> None:
    """Record what the command does, from the call of its function on, or of the whole process."""
    with tempfile.TemporaryDirectory() as folder:
        source, output = Path(folder, "text.txt"), Path(folder, "corrected.txt")
        source.write_text(TEXT, encoding="utf-8")
        sys.argv = ["speculative-t5", "document", str(source), "--output", str(output)]
        sys.argv += ["--draft-model", SMALL, "--num-draft", "5"]
        within = None if whole else "document"
        with recorder.on(within, whole=whole), contextlib.suppress(SystemExit):
            from speculative_t5.cli import main

            main()
        assert output.exists(), "the command wrote nothing"


def completion(recorder: Recorder) -> None:
    """Record what a server does for its first request of POST /v1/completions."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    asking = threading.Thread(target=ask, args=(recorder, port), daemon=True)
    asking.start()
    sys.argv = ["speculative-t5", "serve", "--port", str(port)]
    from speculative_t5.cli import main

    main()


def ask(recorder: Recorder, port: int) -> None:
    """Send a request once the server is ready, print its way, and end the process."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        with contextlib.suppress(URLError), urlopen(f"http://127.0.0.1:{port}/health"):
            break
        time.sleep(0.1)
    body = json.dumps({"model": MODEL, "prompt": PROMPT, "max_tokens": 64}).encode()
    asked = Request(
        f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"}
    )
    with recorder.on(), urlopen(asked, timeout=SECONDS) as response:
        json.load(response)
    print_way(recorder)
    os._exit(0)


CALLS: dict[str, Call] = {
    "generate": lambda recorder: generate(recorder, calls=1),
    "generate-again": lambda recorder: generate(recorder, calls=2),
    "stream": stream,
    "coupled-sample": coupled_sample,
    "completion": completion,
    "document": document,
    "document-process": lambda recorder: document(recorder, whole=True),
    "small-draft": lambda recorder: generate(recorder, calls=2, draft=SMALL, num_draft=5),
    "sharing-draft": lambda recorder: generate(recorder, calls=2, draft=SHARING, num_draft=5),
}


def print_way(recorder: Recorder) -> None:
    print(json.dumps(dataclasses.asdict(recorder.way())), flush=True)


def follow(root: Path, call: str, *, native: bool = True) -> Way:
    """Return the way of a call through the package of a checkout, with its C parts or without."""
    with tempfile.TemporaryDirectory() as cache:  # nothing is known of draft lengths
        done = subprocess.run(
            [python_of(root), str(Path(__file__).resolve()), call],
            cwd=root,
            env=environment(root) | {"XDG_CACHE_HOME": cache, NATIVE: str(int(native))},
            capture_output=True,
            text=True,
            timeout=2 * SECONDS,
        )
    if done.returncode:
        raise RuntimeError(f"{call} ended with status {done.returncode}: {done.stderr}")
    return Way(**json.loads(done.stdout.splitlines()[-1]))


def python_of(root: Path) -> str:
    """Return the Python of a checkout's environment, or else this one."""
    own = root / ".venv" / "bin" / "python"
    return str(own) if own.exists() else sys.executable


def environment(root: Path) -> dict[str, str]:
    """Return the environment for a process with a checkout's package and shipped models."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(PACKAGE.upper())
    }
    return kept | {"PYTHONPATH": str(root), "SPECULATIVE_T5_TIPS": "0", "HF_HUB_OFFLINE": "1"}


if __name__ == "__main__":
    with Recorder(Path.cwd()) as recorder:
        CALLS[sys.argv[1]](recorder)
    print_way(recorder)
