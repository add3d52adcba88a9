"""Runs commands in this process, and on a terminal: each new process imports for a second."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import shlex
import signal
import struct
import subprocess
import sys
import termios
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speculative_t5.cli import convert_main, main

import pytest
from conftest import REPOSITORY


@dataclass
class Done:
    """The result of a command: exit code, standard output, lines of standard error."""

    code: int
    out: str
    err: list[str]

    @property
    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]


Call = Callable[..., Done]


def caller(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Call:
    """Return a function that runs a command in a folder, with some bytes as standard input."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # commands replace it

    def call(
        *arguments: str,
        stdin: str | bytes | None = None,
        pipe: bool = False,
        program: str = "__main__.py",
    ) -> Done:
        typed = stdin.encode() if isinstance(stdin, str) else stdin
        (folder / "stdin").write_bytes(typed or b"")
        handlers = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGHUP)}
        source: Any = "/dev/null" if stdin is None else folder / "stdin"
        if pipe:
            source, end = os.pipe()  # which holds at least 4 KiB
            os.write(end, typed or b"")
            os.close(end)
        with open(source, encoding="utf-8", errors="surrogateescape") as stream:
            before = os.dup(0)
            os.dup2(stream.fileno(), 0)
            try:
                with monkeypatch.context() as patch, pytest.raises(SystemExit) as left:
                    patch.setattr(sys, "argv", [program, *arguments])
                    patch.setattr(sys, "stdin", stream)
                    convert_main() if program == "convert.py" else main()
            finally:
                os.dup2(before, 0)
                os.close(before)
                for number, handler in handlers.items():
                    signal.signal(number, handler)
        out, err = capfd.readouterr()
        return Done(int(left.value.code or 0), out, err.splitlines())

    return call


def read_to_end(screen: int, process: subprocess.Popen[bytes]) -> str:
    """Return what a process still shows on a terminal, whose other end must be open here.

    A Mac drops what is unread once that end is closed everywhere, and makes a process that restores
    the terminal wait until all is read.
    """
    shown, ended, until = b"", False, time.monotonic() + 120
    while (unread := select.select([screen], [], [], 0.02)[0]) or not ended:
        if unread:
            shown += os.read(screen, 10_000)
        else:
            ended = process.poll() is not None
            assert time.monotonic() < until, shown
    return shown.decode().replace("\r\n", "\n")


def on_a_terminal(folder: Path, *command: str, code: int = 0) -> str:
    """Return what a command of Python's shows on a terminal of 100 columns."""
    screen, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    bare = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    process = subprocess.Popen(
        [sys.executable, *command], cwd=folder, stdin=subprocess.DEVNULL, stdout=end, stderr=end,
        env=bare | {"PYTHONPATH": str(REPOSITORY), "TERM": "xterm-256color"},
    )  # fmt: skip
    shown = read_to_end(screen, process)
    os.close(screen)
    os.close(end)
    assert process.returncode == code, shown
    return shown


def start(folder: Path, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    """Start a command whose standard error is a pipe, and which a signal may end."""
    pipe = {"env": os.environ | {"PYTHONPATH": str(REPOSITORY)}, "stderr": subprocess.PIPE}
    return subprocess.Popen(
        [sys.executable, "-m", "speculative_t5", *arguments], cwd=folder,
        # A background process of a script inherits that it ignores this signal.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL), **(pipe | options),
    )  # fmt: skip


def in_a_shell(folder: Path, command: str) -> subprocess.CompletedProcess[bytes]:
    """Run a line of bash in which $P stands for this program and $C for convert.py."""
    for name, program in (("$P", ["-m", "speculative_t5"]), ("$C", [f"{REPOSITORY}/convert.py"])):
        command = command.replace(name, shlex.join([sys.executable, *program]))
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, capture_output=True, check=False, timeout=120,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY), "FORCE_COLOR": "1"},
    )  # fmt: skip
