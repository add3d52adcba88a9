"""Runs commands in this process, and on a terminal: each new process imports for a second."""

import io
import json
import os
import shlex
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speculative_t5.cli import convert_main, main, terminal

import pexpect
import pytest
from conftest import REPOSITORY
from messages import check_message
from rich.console import Console


@dataclass
class Done:
    """The result of a command: exit code, standard output, lines of standard error."""

    code: int
    out: str
    err: list[str]

    @property
    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]

    def check_error(self, found: str) -> None:
        """Check that it is bad input, of which one line says what to do."""
        (line,) = self.err
        assert (self.code, self.out) == (2, "") and line.startswith("error: ")
        check_message(line.removeprefix("error: "), found)


Call = Callable[..., Done]
PATHS = {"PYTHONPATH": str(REPOSITORY)}


def caller(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: "pytest.CaptureFixture[str] | Printed",
) -> Call:
    """Return a function that runs a command in a folder, with some bytes as standard input."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder.resolve() / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # commands replace it

    def call(
        *arguments: str,
        stdin: str | bytes | None = None,
        pipe: bool = False,
        closed: str = "",  # the name of a stream
        program: str = "__main__.py",
    ) -> Done:
        typed = stdin.encode() if isinstance(stdin, str) else stdin
        handlers = {number: signal.getsignal(number) for number in terminal.ENDING_SIGNALS}
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a background process ignores it
        source: Any = "/dev/null"
        if pipe:
            source, end = os.pipe()  # which holds at least 4 KiB
            os.write(end, typed or b"")
            os.close(end)
        elif typed is not None:
            source = folder / "stdin"
            source.write_bytes(typed)
        with open(source, encoding="utf-8", errors="surrogateescape") as stream:
            before = os.dup(0)
            os.dup2(stream.fileno(), 0)
            try:
                with monkeypatch.context() as patch, pytest.raises(SystemExit) as left:
                    patch.setattr(sys, "argv", [program, *arguments])
                    patch.setattr(sys, "stdin", stream)
                    if closed:
                        patch.setattr(sys, closed, None)
                    convert_main() if program == "convert.py" else main()
            finally:
                os.dup2(before, 0)
                os.close(before)
                for number, handler in handlers.items():
                    signal.signal(number, handler)
        out, err = capfd.readouterr()
        return Done(int(left.value.code or 0), out, err.splitlines())

    return call


class Printed:
    """What commands print in a fixture of a module, where pytest's own capture is not to be had."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._streams = {name: io.BytesIO() for name in ("stdout", "stderr")}
        for name, stream in self._streams.items():
            text = io.TextIOWrapper(stream, encoding="utf-8", write_through=True)
            monkeypatch.setattr(sys, name, text)

    def readouterr(self) -> tuple[str, ...]:
        """Return what was printed since the last call: the output, and the errors."""
        found = tuple(stream.getvalue().decode() for stream in self._streams.values())
        for stream in self._streams.values():
            stream.seek(0)
            stream.truncate()
        return found


def recording(monkeypatch: pytest.MonkeyPatch, *, colour: bool = True) -> Console:
    """Let commands show what they show on a terminal of 100 columns, which records it."""
    console = Console(
        record=True,
        file=io.StringIO(),
        force_terminal=True,
        highlight=False,
        markup=False,
        soft_wrap=True,
        color_system="standard" if colour else None,
        width=100,
    )
    monkeypatch.setattr(terminal, "console", lambda stderr=False: console)
    return console


class Terminal:
    """A terminal of 100 columns, on which Python runs a command."""

    def __init__(
        self, folder: Path, *command: str, environment: Mapping[str, str] | None = None
    ) -> None:
        bare = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
        bare |= environment or {}
        self.process = pexpect.spawn(
            sys.executable,
            [*command],
            cwd=folder,
            env=bare | PATHS | {"TERM": "xterm-256color"},
            dimensions=(40, 100),
            timeout=120,
            preexec_fn=heed_ctrl_c,
        )

    def type(self, keys: str, *answers: str) -> str:
        """Type, and return what is shown until these texts have come."""
        self.process.send(keys)
        shown = b""
        for answer in answers:
            self.process.expect_exact(answer)
            shown += self.process.before
        return shown.decode()

    def rest(self, code: int = 0) -> str:
        """Return what is still shown until the command ends with this code."""
        shown: str = self.process.read().decode().replace("\r\n", "\n")
        self.process.close()
        assert self.process.exitstatus == code, shown
        return shown


def on_a_terminal(folder: Path, *command: str, code: int = 0) -> str:
    """Return what a command of Python's shows on a terminal."""
    return Terminal(folder, *command).rest(code)


def heed_ctrl_c() -> None:
    """Undo what a background process of a script inherits."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start(folder: Path, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    """Start a command whose standard error is a pipe, and which a signal may end."""
    pipe = {"env": os.environ | PATHS, "stderr": subprocess.PIPE}
    return subprocess.Popen(
        [sys.executable, "-m", "speculative_t5", *arguments],
        cwd=folder,
        preexec_fn=heed_ctrl_c,
        **(pipe | options),
    )


def in_a_shell(folder: Path, command: str) -> subprocess.CompletedProcess[bytes]:
    """Run a line of bash in which $P stands for this program and $C for convert.py."""
    for name, program in (("$P", ["-m", "speculative_t5"]), ("$C", [f"{REPOSITORY}/convert.py"])):
        command = command.replace(name, shlex.join([sys.executable, *program]))
    return subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        capture_output=True,
        check=False,
        timeout=120,
        env=os.environ | PATHS | {"FORCE_COLOR": "1"},
    )
