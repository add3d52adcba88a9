"""What MLX needs when a process that uses it has several threads."""

from __future__ import annotations

import threading

import mlx.core as mx


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
    """Prepare the calling thread for using MLX; to be called before every generation."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread and not hasattr(_locals, "release"):
        _locals.release = _Release()
