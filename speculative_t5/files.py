"""Files that outlive a crash: replaced as a whole or not at all, locked, or grown line by line.

What is made of a private file is private, too, from its first byte. Imports nothing of the package.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import math
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Self

PARTIAL_PREFIX = ".partial-"  # how the names of new files begin; processes have names of their own


def lock(file: int, busy: str) -> None:
    """Take the lock of an open file, until the process ends, or raise ValueError(busy)."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(busy) from None


def private_mode(path: str | Path, sources: Iterable[os.stat_result]) -> int:
    """Return the mode, before the umask, with which to create a file that is made of others.

    Nobody may read or write it who may not do the same with each of the files that it is made of.
    What is no plain file, such as a pipe, allows all. A group's rights are those of its file's
    group: where the new file gets another one, that has the rights of others.
    """
    mode = 0o666
    for source in filter(lambda each: stat.S_ISREG(each.st_mode), sources):
        found = source.st_mode | stat.S_IRUSR | stat.S_IWUSR
        if source.st_gid != group_of_new(Path(path).resolve().parent):
            of_others = found & stat.S_IRWXO
            found = found & ~stat.S_IRWXG | of_others << 3
        mode &= found
    return mode


def group_of_new(folder: Path) -> int:
    """Return the group that the system gives to a new file in a folder."""
    with contextlib.suppress(FileNotFoundError):  # it is still to be made
        found = folder.stat()
        if sys.platform == "darwin" or found.st_mode & stat.S_ISGID:
            return found.st_gid
    return os.getegid()


def create(path: Path, mode: int) -> None:
    """Create an empty file; one that is there, which only a process of this number made, goes."""
    path.unlink(missing_ok=True)
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode))


def temporary(target: Path) -> Path:
    """Return the name of a new file of this process that is to replace another."""
    return target.with_name(f"{PARTIAL_PREFIX}{os.getpid()}-{target.name}")


def clear_temporaries(targets: Iterable[Path]) -> None:
    """Remove the new files of processes that were killed before they replaced one of some files.

    Each folder is listed once.
    """
    folders: dict[Path, set[str]] = {}
    for target in targets:
        folders.setdefault(target.parent, set()).add(target.name)
    for folder, names in folders.items():
        for path in folder.glob(f"{PARTIAL_PREFIX}*-*"):
            number, _, name = path.name.removeprefix(PARTIAL_PREFIX).partition("-")
            if name in names and number.isdecimal() and not _is_running(int(number)):
                path.unlink(missing_ok=True)


def _is_running(number: int) -> bool:
    try:
        os.kill(number, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # it is another user's
        pass
    return True


@contextlib.contextmanager
def replacing(path: str | Path, mode: int = 0o666) -> Iterator[Path]:
    """Yield the name of a new file, which the body writes and which then replaces `path`.

    Nobody sees half of it, also after a crash: if the body fails, `path` stays as it was, and the
    new file is removed. A link is followed. A file that is there keeps its mode, and its owner and
    group as far as the system allows; otherwise the new one is created with `mode`. Errors of the
    system name `path`.
    """
    target = Path(path).resolve()  # a link may lead to another disk
    new = temporary(target)
    try:
        create(new, 0o600 if target.exists() else mode)
        yield new
        with new.open("rb") as file:
            os.fsync(file.fileno())
        if target.exists():
            _take_after(new, target.stat())
        new.replace(target)
    except OSError as error:
        if error.filename in (None, str(new)):
            error.filename, error.filename2 = str(path), None
        raise
    finally:
        new.unlink(missing_ok=True)


def _take_after(new: Path, found: os.stat_result) -> None:
    """Give a new file the owner, group and mode of another; less, where the owner cannot be."""
    mode, own = stat.S_IMODE(found.st_mode), new.stat()
    if (own.st_uid, own.st_gid) != (found.st_uid, found.st_gid):
        try:
            os.chown(new, found.st_uid, found.st_gid)
        except PermissionError:
            mode &= ~(stat.S_ISUID | stat.S_ISGID)
            mode &= ~stat.S_IRWXG if own.st_gid != found.st_gid else mode
    os.chmod(new, mode)


def write_whole(path: str | Path, data: bytes, mode: int = 0o666) -> None:
    """Write a file as a whole, or not at all, see `replacing`."""
    with replacing(path, mode) as new:
        new.write_bytes(data)


@contextlib.contextmanager
def replacing_folder(folder: Path, busy: str) -> Iterator[Path]:
    """Yield a new folder, which replaces `folder` if the body succeeds, and is removed otherwise.

    What a killed process has left is cleared away. Folders above it are made. An OSError says that
    it cannot be written, or, as `busy`, that another process holds its lock.
    """
    folder = folder.resolve()  # a link may lead to another disk
    workplace = folder.parent / f".{folder.name}.partial"
    new, old = workplace / "new", workplace / "old"
    made = [parent for parent in folder.parents if not parent.exists()]
    with contextlib.ExitStack() as stack:
        stack.callback(_remove_empty, made)
        try:
            workplace.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context((workplace / "lock").open("w"))
            try:
                lock(file.fileno(), busy)
            except ValueError as error:
                raise OSError(errno.EAGAIN, busy) from error
            stack.callback(shutil.rmtree, workplace, ignore_errors=True)
            if old.exists() and not folder.exists():  # killed between the two renames below
                os.rename(old, folder)
            for left in (new, old):
                shutil.rmtree(left, ignore_errors=True)
            new.mkdir()
            yield new
            if folder.exists():
                os.rename(folder, old)
            try:
                os.rename(new, folder)
            finally:
                if old.exists() and not folder.exists():
                    os.rename(old, folder)
        except OSError as error:
            if error.filename and not Path(error.filename).is_relative_to(workplace):
                raise  # it is about a file to read
            raise OSError(
                error.errno, f"cannot be written: {error.strerror}", str(folder)
            ) from error


def _remove_empty(folders: Iterable[Path]) -> None:
    """Remove those of these folders that exist and are empty, the innermost first."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


def cache_folder() -> Path:
    """Return the folder of what can be found out again, if it is deleted."""
    try:
        root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:  # a user without a home, as in some containers
        root = tempfile.gettempdir()
    return Path(root) / "speculative_t5"


def is_special(name: str) -> bool:
    """Whether a name is of something that is no plain file, such as a pipe or a device."""
    return os.path.exists(name) and not os.path.isfile(name)


def json_line(record: Mapping[str, Any]) -> bytes:
    """Return a record as one line of JSON.

    Half a surrogate pair is escaped, as it came. JSON has no numbers that are infinite or not a
    number (NaN): they are null.
    """
    try:
        text = json.dumps(record, ensure_ascii=False, allow_nan=False)
    except ValueError:
        text = json.dumps(_without_nan(record), ensure_ascii=False, allow_nan=False)
    return text.encode(errors="backslashreplace") + b"\n"


def _without_nan(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_nan(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def parse_json(text: str | bytes) -> Any:
    """Return the value of JSON; what is no number there (NaN), or beyond a float, is None.

    Raises:
        ValueError: If it is not JSON.
        RecursionError: If it is nested too deep.
    """
    return json.loads(text, parse_constant=lambda _: None, parse_float=_finite)


def _finite(text: str) -> float | None:
    number = float(text)
    return number if math.isfinite(number) else None


def json_object(raw: bytes) -> dict[str, Any]:
    """Return the record of a whole line; an empty one if there is none in it."""
    try:
        found = parse_json(raw) if raw.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


class LineFile:
    """A file of lines that grows: what is appended is there as a whole, or not at all.

    To enter it (`with`) creates, opens and locks the file, then calls `opened`. A process that was
    killed may have left a torn line at the end: `lines` yields it, and `cut` removes it.

    If another process is writing to it, that is a ValueError, whose advice may be added to. A pipe,
    a device or, as "-", standard output are `special`: they are not created, locked or cut. A new
    file gets `mode`, see `private_mode`; one that is there keeps its own.
    """

    def __init__(
        self, name: str | Path, advice: str = "", *, special: bool = False, mode: int = 0o666
    ) -> None:
        self._name, self._special, self._mode, self._file = str(name), special, mode, -1
        self._busy = f"another process is writing to {name}: wait for it to end{advice}"

    def __enter__(self) -> Self:
        if self._name == "-":
            self._file = 1
        elif self._special:
            self._file = os.open(self._name, os.O_WRONLY | os.O_CLOEXEC)
        else:
            self._file = os.open(self._name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, self._mode)
            with contextlib.ExitStack() as undo:
                undo.callback(os.close, self._file)
                lock(self._file, self._busy)
                if not os.fstat(self._file).st_nlink:  # another process has just removed it
                    raise ValueError(self._busy)
                self.opened()
                undo.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._name != "-":
            os.close(self._file)

    def opened(self) -> None:
        """Look at what is there; where this fails, the file is closed again."""

    def narrow(self, mode: int) -> None:
        """Take the rights away that `mode` does not have."""
        found = stat.S_IMODE(os.fstat(self._file).st_mode)
        if found & ~mode:
            os.fchmod(self._file, found & mode)

    @property
    def size(self) -> int:
        """The size of the file, in bytes."""
        return os.fstat(self._file).st_size

    def lines(self, longest: int = -1) -> Iterator[bytes]:
        """Yield the lines from the first on, with their ends; one that is too long in parts."""
        with open(self._file, "rb", closefd=False) as reader:
            yield from iter(partial(reader.readline, longest), b"")

    def cut(self, size: int) -> None:
        """Shorten the file to this size, in bytes, and go on from there."""
        os.truncate(self._file, size)
        os.lseek(self._file, size, os.SEEK_SET)

    def append_bytes(self, data: bytes, *, sync: bool = False) -> None:
        """Write all of it, or nothing where the disk is full; `sync` waits for the disk."""
        start = 0 if self._special else os.lseek(self._file, 0, os.SEEK_CUR)
        try:
            while data:
                data = data[os.write(self._file, data) :]
            if sync:
                os.fsync(self._file)
        except OSError as error:
            if not self._special:
                with contextlib.suppress(OSError):  # the first error is the one to report
                    os.truncate(self._file, start)
            error.filename = "standard output" if self._name == "-" else self._name
            raise


def open_input(name: str) -> BinaryIO:
    """Open a file of text; "-" is standard input. Refuses folders."""
    if name == "-":
        return open(0, "rb", closefd=False)
    if not name:
        raise ValueError("the input must be the name of a file, or -, got ''")
    if Path(name).is_dir():
        raise ValueError(f"{name} is a folder, expected a file")
    return open(name, "rb")


def digest(data: bytes) -> str:
    """Return what tells one content from another, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()
