"""Replaces a file in its place without losing what other programs write to it meanwhile.

Comparing a file with what was read of it and then replacing it leaves a moment between the two, in
which another program may save it. Where the system can exchange two names at once (Linux, macOS),
there is none: the new file is exchanged with the old one, and then what came out is looked at. If
that is not what was read, both are exchanged again.

Imports `files` alone.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import signal
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from .files import PARTIAL_PREFIX, create, digest, group_of_new, temporary

AT_FDCWD, RENAME_EXCHANGE, RENAME_SWAP = -100, 2, 2  # of Linux (both) and of macOS
COPY_ACL, COPY_ATTRIBUTES = 1, 4  # of macOS
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)  # of disks without links
CANNOT_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EXDEV)
WRITER_SECONDS = 2.0  # seconds to wait for a program that has a file open for writing
SYSTEMS_OWN = ("security.", "system.nfs4_acl")  # attributes that only the system sets


def check_replaceable(path: Path) -> None:
    """Refuse a file that cannot be replaced without taking something away from it."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{path} is no plain file, and cannot be replaced: leave out --in-place")
    if found.st_nlink > 1:
        raise ValueError(
            f"{path} has {found.st_nlink} names (hard links), of which only one would be replaced: "
            "give --output instead of --in-place, or copy the file first"
        )
    if not found.st_mode & 0o222 or not os.access(path, os.W_OK):
        raise ValueError(
            f"{path} is write-protected: give --output instead of --in-place, or let it be written "
            "(chmod u+w)"
        )
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise ValueError(
            f"{path} is in a folder that may not be written: give --output instead of --in-place"
        )
    is_root = os.geteuid() == 0
    groups = {os.getegid(), *os.getgroups(), group_of_new(path.parent)}
    if not is_root and (found.st_uid != os.geteuid() or found.st_gid not in groups):
        raise ValueError(
            f"{path} belongs to another user or group, which a new file would not: give --output "
            "instead of --in-place"
        )


def replace_unchanged(
    target: Path,
    aside: Path,
    data: bytes,
    expected: bytes,
    *,
    keep: bool,
    over: bool,
    ready: Callable[[], None],
) -> bool:
    """Put `data` in the place of a file, if that still holds `expected`; return whether it did.

    The new file has the owner, group, mode and attributes of the old one, which is `aside`
    afterwards, or removed if it is not to be kept. `ready` is called when the new file is whole,
    just before anything is renamed. A crash after that may leave a file at `aside`, see `recover`.

    Args:
        target: The file, which is no link.
        aside: A name on the same disk; if there is a file, it is only replaced if `over`.
        data: Its new bytes.
        expected: The bytes that were read of it.
        keep: Whether `aside` stays.
        over: Whether `aside` may replace a file.
        ready: What to do before.

    Raises:
        ValueError: If the new file would lack something that the old one has.
        OSError: Of the system, such as FileExistsError for `aside`.
    """
    found = target.stat()
    with _file_beside(target, data, target, found) as new:
        if _is_written(target) or target.read_bytes() != expected:
            return False
        ready()
        _move(new, aside, over=over)
        try:
            exchanged = exchange(aside, target)
        except FileNotFoundError:  # it was removed meanwhile
            aside.unlink()
            return False
        if not exchanged:
            os.replace(aside, new)
            return _replace_at_once(target, aside, new, expected, keep=keep, over=over)
    unchanged = settle_exchange(target, aside, data, expected)
    if unchanged and (now := aside.stat()).st_mode != found.st_mode:
        target.chmod(stat.S_IMODE(now.st_mode))  # as it was set meanwhile
    if not (unchanged and keep):
        aside.unlink(missing_ok=True)
    sync_folder(target.parent)
    return unchanged


def settle_exchange(target: Path, aside: Path, placed: bytes, expected: bytes) -> bool:
    """Look at what an exchange took out, and put it back if it is newer than what was read.

    Another program may save the file again before it is put back; then that is newer, and is put
    back in turn. At the end `target` has what was written last, and `aside` what is older.

    Args:
        target: The file.
        aside: What the exchange took out of its place.
        placed: The bytes that the exchange put there.
        expected: The bytes that it should have taken out.

    Returns:
        Whether it took those out.
    """
    unchanged = True
    while True:
        is_written, taken = _is_written(aside), aside.read_bytes()
        if taken == expected and not is_written:
            return unchanged
        unchanged = False
        try:
            exchange(aside, target)
        except FileNotFoundError:  # it was removed meanwhile
            os.rename(aside, target)
            return False
        placed, expected = taken, placed


def recover(target: Path, aside: Path, placed: str, expected: str, *, keep: bool) -> None:
    """Finish what a killed process may have left half done, see `replace_unchanged`.

    At the end there is nothing at `aside`, except what is to be kept, or a text that is neither of
    these two while `target` is another one, too: the file was saved both before and after the
    crash.

    Args:
        target: The file.
        aside: The other name.
        placed: The `digest` of the new file.
        expected: The `digest` of what was read of the old one.
        keep: Whether `aside` stays if the file was replaced.
    """
    if not (target.exists() and aside.exists()):
        return
    now, taken = target.read_bytes(), aside.read_bytes()
    if taken == now or digest(taken) == placed:
        aside.unlink()
    elif digest(taken) == expected:
        if not keep:
            aside.unlink()
    elif digest(now) == placed:
        exchange(aside, target)
        settle_exchange(target, aside, taken, now)
        aside.unlink(missing_ok=True)


def exchange(one: Path, other: Path) -> bool:
    """Exchange two files at once; return False if the system, or the disk, cannot."""
    call = _exchange_call()
    if call is None:
        return False
    if call(os.fsencode(one), os.fsencode(other)) == 0:
        return True
    number = ctypes.get_errno()
    if number in CANNOT_EXCHANGE:
        return False
    raise OSError(number, os.strerror(number), str(other))


@cache
def _exchange_call() -> Any:
    """Return a function of two names that exchanges them, as C has it; None if there is none."""
    library = ctypes.CDLL(None, use_errno=True)
    try:
        if sys.platform == "darwin":
            swap = library.renamex_np
            swap.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_uint]
            return lambda one, other: swap(one, other, RENAME_SWAP)
        rename = library.renameat2
    except AttributeError:
        return None
    rename.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    return lambda one, other: rename(AT_FDCWD, one, AT_FDCWD, other, RENAME_EXCHANGE)


def _replace_at_once(
    target: Path, aside: Path, new: Path, expected: bytes, *, keep: bool, over: bool
) -> bool:
    """Do the same where names cannot be exchanged: a moment after the comparison is left open."""
    if keep:
        copy_file(target, aside, expected, over=over)
    if target.read_bytes() != expected:
        if keep:
            aside.unlink()
        return False
    new.replace(target)
    sync_folder(target.parent)
    return True


def _move(new: Path, name: Path, *, over: bool) -> None:
    """Give a file another name, in the place of a file of that name only if `over`."""
    if over:
        os.replace(new, name)
        return
    try:
        os.link(new, name)
        new.unlink()
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        try:
            os.replace(new, name)
        except OSError:
            name.unlink()
            raise


def copy_file(source: Path, copy: Path, data: bytes, *, over: bool) -> None:
    """Write `data`, read of a file, under another name, with all else that the file has.

    Raises:
        FileExistsError: If there is a file of that name, unless it may be written `over`.
    """
    with _file_beside(copy, data, source, source.stat()) as new:
        _move(new, copy, over=over)


@contextlib.contextmanager
def _file_beside(target: Path, data: bytes, like: Path, found: os.stat_result) -> Iterator[Path]:
    """Make a file that is to be renamed to `target`, with all of another's that is not its text."""
    new = temporary(target)
    try:
        create(new, 0o600)
        with new.open("wb") as file:
            file.write(data)
            file.flush()
            _dress(file.fileno(), new, like, found)
            os.fsync(file.fileno())
        yield new
    except OSError as error:
        if error.filename in (None, str(new)):
            error.filename, error.filename2 = str(target), None
        raise
    finally:
        new.unlink(missing_ok=True)


def _dress(file: int, new: Path, old: Path, found: os.stat_result) -> None:
    """Give a new file the owner, group, mode and attributes of the one that it replaces."""
    try:
        own = os.fstat(file)
        if (own.st_uid, own.st_gid) != (found.st_uid, found.st_gid):
            os.fchown(file, found.st_uid, found.st_gid)  # clears the bits that are set next
        os.fchmod(file, stat.S_IMODE(found.st_mode))
        if sys.platform == "darwin":
            _copy_of_macos(new, old)
        else:
            _copy_attributes(file, old)
        kept = stat.S_IMODE(os.fstat(file).st_mode) == stat.S_IMODE(found.st_mode)
    except PermissionError:
        kept = False
    if not kept:
        raise ValueError(
            f"the owner, mode or attributes of {old} cannot be given to a new file: give --output "
            "instead of --in-place"
        )


def _copy_attributes(file: int, old: Path) -> None:
    """Copy extended attributes, access control lists among them, and drop what folders add."""
    try:
        before, after = os.listxattr(old), os.listxattr(file)
    except OSError as error:
        if error.errno in CANNOT_EXCHANGE:  # the disk has none
            return
        raise
    for name in (name for name in after if name not in before):
        if not name.startswith(SYSTEMS_OWN):
            os.removexattr(file, name)
    for name in (name for name in before if not name.startswith(SYSTEMS_OWN)):
        value = os.getxattr(old, name)
        if name not in after or os.getxattr(file, name) != value:
            os.setxattr(file, name, value)


def _copy_of_macos(new: Path, old: Path) -> None:
    copy = ctypes.CDLL(None, use_errno=True).copyfile
    copy.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_uint32]
    if copy(os.fsencode(old), os.fsencode(new), None, COPY_ACL | COPY_ATTRIBUTES):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(old))


def _is_written(path: Path) -> bool:
    """Whether a program still has a file open for writing, after some patience.

    Linux knows: it gives no lease on such a file. Elsewhere nobody does.
    """
    if not hasattr(fcntl, "F_SETLEASE"):
        return False
    until = time.monotonic() + WRITER_SECONDS
    while not _is_leased(path):
        if not _has_leases(path.parent, path.stat().st_dev):
            return False
        if time.monotonic() > until:
            return True
        time.sleep(0.005)
    return False


def _is_leased(path: Path) -> bool:
    """Take a lease on a file and give it back; return whether nothing stood against it."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # If another program opens it in this moment, a signal comes, by default one that kills.
        fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        return True
    except OSError as error:
        return error.errno != errno.EAGAIN  # the system does not say, as of another user's file
    finally:
        os.close(file)


@cache
def _has_leases(folder: Path, _disk: int) -> bool:
    """Whether a disk gives a lease on a file that nobody writes to, as network disks may not."""
    number, name = tempfile.mkstemp(dir=folder, prefix=PARTIAL_PREFIX)
    os.close(number)
    try:
        return _is_leased(Path(name))
    finally:
        os.unlink(name)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk, where it can say so."""
    with contextlib.suppress(OSError):  # a folder that may be written may not be readable
        file = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(file)
        finally:
            os.close(file)
