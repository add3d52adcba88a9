"""The working folder of a run, which is resumed from it after a kill, and the time that it took."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

from ..checkpoints import read_json
from ..errors import shown
from ..files import PARTIAL, lock, write_whole

SUFFIX = ".distill"
SETTINGS, STEPS, SPENT = "settings.json", "steps.json", "spent.json"
JUDGEMENT = "judgement.json"
AGAIN = "delete the file, and run the same command again"
INPUTS = {"data": "other data", "target": "another target"}  # settings that are digests


class RunFolder:
    """OUTPUT.distill, beside the output; removed when the output is complete.

    Attributes:
        path: The folder.
    """

    def __init__(self, output: Path) -> None:
        self.path = output.with_name(output.name + SUFFIX)

    @contextmanager
    def begun(self, settings: Mapping[str, Any]) -> Iterator[None]:
        """Make the folder, or resume its run if the settings are the same; lock it meanwhile.

        Raises:
            ValueError: If its run has other settings, another process is at work in it, or it is
                not the folder of a run.
        """
        if self.path.exists() and self.read(SETTINGS) is None:
            self._refuse_foreign()
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / "lock").open("a") as file:
            lock(file.fileno(), f"another process is at work in {self.path}: wait for it to end")
            known = self.read(SETTINGS)
            if known is None:
                self.write(SETTINGS, settings)
            else:
                self._refuse_others(known, settings)
            yield

    def _refuse_foreign(self) -> None:
        # A run killed at its very start leaves these.
        first = ("lock", PARTIAL)
        if any(not path.name.startswith(first) for path in self.path.iterdir()):
            raise ValueError(
                f"{self.path} exists and is not the working folder of a run: "
                "choose another --output"
            )

    def _refuse_others(self, known: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        changed = [name for name, value in settings.items() if known.get(name) != value]
        if not changed:
            return
        name = changed[0]
        before = INPUTS.get(name) or _as_option(name, known.get(name))
        now = "" if name in INPUTS else f", and this one has {_as_option(name, settings[name])}"
        raise ValueError(
            f"the run in {self.path} was started with {before}{now}: "
            "use the same to resume it, or delete the folder to start over"
        )

    def is_done(self, output: Path) -> bool:
        """Whether the run has written its output, and was killed before it could end."""
        judgements = [folder / JUDGEMENT for folder in (self.path, output)]
        if not all(path.is_file() for path in judgements):
            return False
        return judgements[0].read_bytes() == judgements[1].read_bytes()

    def read(self, name: str, **kinds: Any) -> dict[str, Any] | None:
        """Return the object in a JSON file; None if there is no file.

        Raises:
            ValueError: If it is damaged, or an entry is not of the type that `kinds` has for it.
        """
        path = self.path / name
        if not path.exists():
            return None
        again = "delete the folder to start over" if name in (SETTINGS, STEPS) else AGAIN
        found = read_json(path, again=again)
        for entry, kind in kinds.items():
            if not isinstance(value := found.get(entry), kind):
                raise ValueError(f"{path} has {shown(value)} as {entry}: {again}")
        return found

    def write(self, name: str, value: Any) -> None:
        """Write a JSON file, whole or not at all."""
        write_whole(self.path / name, (json.dumps(value, indent=2) + "\n").encode())

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def _as_option(name: str, value: Any) -> str:
    """Return an option as it is typed."""
    option = f"--{name.replace('_', '-')}"
    return f"no {option}" if value is None else f"{option} {shlex.quote(str(value))}"


class TimeBudget:
    """The seconds that a run has taken, in all its processes, and those it may take.

    Args:
        folder: Keeps the seconds of earlier processes.
        minutes: For the whole run; None if there is no limit.

    Attributes:
        limit: The same in seconds.
    """

    def __init__(self, folder: RunFolder, minutes: float | None) -> None:
        self.limit = None if minutes is None else 60 * minutes
        self._folder = folder
        self._before = float((folder.read(SPENT, seconds=float) or {"seconds": 0.0})["seconds"])
        self._began = perf_counter()

    @property
    def spent(self) -> float:
        """Seconds since the run began, those between its processes left out."""
        return self._before + perf_counter() - self._began

    def save(self) -> None:
        """Keep the seconds for a process that resumes the run."""
        self._folder.write(SPENT, {"seconds": self.spent})

    def left(self, reserve: float = 0.0) -> float:
        """Return the seconds until the limit, less a share of it."""
        assert self.limit is not None
        return max(0.0, self.limit * (1 - reserve) - self.spent)
