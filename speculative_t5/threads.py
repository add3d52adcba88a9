"""What MLX needs when a process that uses it has several threads or forks."""

from __future__ import annotations

import os
import threading

import mlx.core as mx


class _Process:
    used = False  # whether MLX has computed here, or in a parent before it forked
    forked = False  # whether a parent had used MLX when it forked this process


class _Release:
    """Releases what MLX keeps for a thread: its streams, and the functions compiled in it.

    A thread's locals are dropped while it still may run Python. Without this MLX would release the
    same things later, when the system ends the thread, and wait there for the interpreter's lock:
    if the program ends meanwhile, the process is aborted ("terminate called without an active
    exception").
    """

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._this_thread = threading.get_ident  # modules may be gone at the interpreter's end
        self._clear = mx.clear_streams

    def __del__(self) -> None:
        # Of a daemon thread that still runs at the program's end, the main thread drops the locals.
        if self._this_thread() == self._thread:
            self._clear()


_locals = threading.local()


def enter() -> None:
    """Prepare the calling thread for using MLX; to be called before every generation.

    Raises:
        RuntimeError: If this process was forked after MLX had been used: its threads, which do all
            the work, are not in the child, and the first computation would wait for them forever.
    """
    if _Process.forked:
        raise RuntimeError(
            "this process was forked from one that had used MLX, and has none of its threads: "
            "use multiprocessing's spawn start method"
        )
    _Process.used = True
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread and not hasattr(_locals, "release"):
        _locals.release = _Release()


def _after_fork() -> None:
    _Process.forked = _Process.used


os.register_at_fork(after_in_child=_after_fork)
