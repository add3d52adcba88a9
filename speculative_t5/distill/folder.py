"""The working folder of a run: its options, labels, states and history, to go on after a kill."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SUFFIX = ".distill"


class RunFolder:
    """OUTPUT.distill, beside the output; removed when the output is complete.

    Attributes:
        path: The folder.
    """

    def __init__(self, output: Path) -> None:
        self.path = output.with_name(output.name + SUFFIX)

    @contextmanager
    def begun(self, settings: Mapping[str, Any]) -> Iterator[None]:
        """Make the folder, or go on in it if its run has the same settings; lock it meanwhile.

        Raises:
            ValueError: If its run has other settings, or another process is at work in it.
        """
        new = not self.path.exists()
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(
                    f"another process is at work in {self.path}: wait for it to end"
                ) from None
            known = self.read("settings.json")
            if known is None:
                if not new and any(path.name != "lock" for path in self.path.iterdir()):
                    raise ValueError(
                        f"{self.path} exists and is not the working folder of a run: "
                        "choose another --output"
                    )
                self.write("settings.json", settings)
            elif changed := [name for name, value in settings.items() if known.get(name) != value]:
                name = changed[0]
                raise ValueError(
                    f"the run in {self.path} was begun with {name} {known.get(name)}, and this one "
                    f"has {settings[name]}: use the same to continue it, or delete it to begin anew"
                )
            yield

    def read(self, name: str) -> Any:
        """Return the contents of a JSON file; None if there is none."""
        path = self.path / name
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def write(self, name: str, value: Any) -> None:
        """Write a JSON file, whole or not at all."""
        new = self.path / f"{name}.new"
        with new.open("w", encoding="utf-8") as file:
            file.write(json.dumps(value, indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, self.path / name)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
