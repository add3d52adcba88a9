"""Downloads checkpoints from the Hugging Face Hub to its own cache, and only the files needed."""

import errno
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ..errors import first_line
from ..tokenizers import TOKENIZER_FILES, has_tokenizer
from .model_folder import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    LENGTH_FILE,
    MODULES_FILE,
    PROMPTS_FILE,
    SMALL_FILES,
    WEIGHTS_FILES,
    ModelFolder,
    read_index,
)
from .nearest import nearest

TIMEOUT = 10.0  # seconds
LARGE_DOWNLOAD = 10**9  # bytes, above which a download is announced


@dataclass(frozen=True)
class Download:
    """Weights that are about to be downloaded: sizes in bytes."""

    name: str
    size: int
    free: int  # on the disk of the cache
    cache: Path

    def __str__(self) -> str:
        return (
            f"{self.name} is to be downloaded: {self.size / 1e9:.1f} GB, and {self.free / 1e9:.1f} "
            f"GB are free in {self.cache}"
        )

    def check(self) -> None:
        """Refuse what the disk has no room for."""
        if self.size > self.free:
            raise OSError(
                errno.ENOSPC,
                f"No space left on device: {self}; free some, or set HF_HOME to a folder on "
                "another disk",
            )


def _warn(found: Download) -> None:
    warnings.warn(str(found), stacklevel=2)


_announce: Callable[[Download], None] = _warn


def announce_downloads(announce: Callable[[Download], None]) -> None:
    """Have a function called before each large download; it may raise to prevent it.

    Without one, a warning says the size and the free disk.
    """
    global _announce
    _announce = announce


def flat_name(name: str) -> str:
    """Return the part of a repository's name after its slash; refuse impossible names."""
    if Path(name).is_file():  # perhaps one in the model folder that is meant
        raise ValueError(f"{name} is a file, expected a folder or a name on the Hub")
    if not _may_be_on_the_hub(name):
        advice = "give the path of a folder, or a name such as google/flan-t5-small"
        advice = or_nearest(name) + advice
        raise ValueError(f"{name!r} is neither a folder here nor a valid name on the Hub: {advice}")
    return name.rsplit("/", 1)[-1]


def _may_be_on_the_hub(name: str) -> bool:
    """Whether huggingface_hub allows a repository's name, with its owner's or without."""
    whole = re.fullmatch(r"(?:\b[\w.-]+\b/)?\b[\w.-]{1,96}\b", name)
    return whole is not None and not re.search(r"\.\.|--|\.git$", name)


def or_nearest(name: str) -> str:
    """Return advice to write the name that was probably meant; "" if no model has one like it."""
    near = nearest(name)
    return f"write {near} if you meant that, or " if near else ""


def look_up(name: str, revision: str | None = None) -> tuple[ModelFolder, dict[str, int] | None]:
    """Return a repository's folder in the cache, without weights, and its files' sizes by name.

    They are None without the Hub. It may be an adapter.
    """
    flat_name(name)
    # Imported here, as it is slow and only this path needs it.
    from huggingface_hub import hf_hub_download, logging, snapshot_download, try_to_load_from_cache

    logging.set_verbosity_error()  # _explained reports errors in one line

    with _explained(name, revision):
        # Asked first, as the download of a file would be tried for half a minute without a network.
        files = _list_files(name, revision)
        cached = files is None and isinstance(try_to_load_from_cache(name, ADAPTER_CONFIG), str)
        listed = set(files or ())
        is_adapter = cached or (ADAPTER_CONFIG in listed and listed.isdisjoint(WEIGHTS_FILES))
        first = ADAPTER_CONFIG if is_adapter else "config.json"
        path = hf_hub_download(name, first, revision=revision, local_files_only=files is None)
        folder = ModelFolder(Path(path).parent)
        if is_adapter:
            return folder, files
        folder.check()
        if files is not None:
            # With a tokenizer.json it needs no other pieces.
            others = ["spiece.model", "vocab.json", "merges.txt", "vocab.txt"]
            snapshot_download(
                name,
                revision=folder.path.name,
                allow_patterns=[*SMALL_FILES, "chat_template.*"],
                ignore_patterns=others if "tokenizer.json" in files else None,
            )
    folder.tokenizer()
    return folder, files


def download(name: str, folder: ModelFolder, files: Mapping[str, int] | None) -> Path:
    """Download the weights of what `look_up` has found, whose sizes the Hub's client compares.

    Raises:
        ValueError: If there are no weights, or they cannot be had.
        OSError: If the disk has no room for them, before any are downloaded.
    """
    from huggingface_hub import hf_hub_download, snapshot_download

    if files is not None:
        file = next((file for file in (*WEIGHTS_FILES, *ADAPTER_WEIGHTS) if file in files), None)
        if file is None:
            known = (".safetensors", ".bin", ".h5", ".msgpack", ".gguf", ".onnx", ".pt")
            others = sorted(f for f in files if f.endswith(known))
            raise ValueError(
                f"{name} on the Hub has no weights that can be read: expected {WEIGHTS_FILES[0]} "
                f"or {WEIGHTS_FILES[2]}, whole or in shards, found "
                f"{', '.join(others[:3]) or 'neither'}; choose a repository that has them"
            )
        # An adapter that enlarges its model's vocabulary comes with the tokenizer.
        small = (*TOKENIZER_FILES, "tokenizer.model") if file in ADAPTER_WEIGHTS else ()
        commit, wanted = folder.path.name, [file, *small, *_sentence_files(files)]
        with _explained(name, commit):
            if file.endswith(".index.json"):
                index = Path(hf_hub_download(name, file, revision=commit))
                wanted += {*read_index(index).values()}
        _check_size(name, commit, {each: files.get(each, 0) for each in wanted})
        with _explained(name, commit):
            snapshot_download(name, revision=commit, allow_patterns=wanted)
    elif folder.weights is None:
        raise ValueError(
            f"the Hub cannot be reached, and the weights of {name} are not in the cache: check the "
            "network and HF_HUB_OFFLINE"
        )
    return folder.path


def _sentence_files(files: Iterable[str]) -> list[str]:
    """Return the files of sentence-transformers beside the encoder, if it made the repository."""
    found = set(files)
    if MODULES_FILE not in found:
        return []
    wanted = [name for name in (MODULES_FILE, LENGTH_FILE, PROMPTS_FILE) if name in found]
    for name in sorted(found):
        step, _, file = name.rpartition("/")
        is_spare = file == WEIGHTS_FILES[2] and f"{step}/{WEIGHTS_FILES[0]}" in found
        is_read = file in ("config.json", WEIGHTS_FILES[0], WEIGHTS_FILES[2]) and not is_spare
        if is_read and re.fullmatch(r"\d+_\w+", step):
            wanted.append(name)
    return wanted


def check_new_name(name: str) -> None:
    """Refuse what cannot be the name of a repository of one's own, before anything is made."""
    if "/" not in name or not _may_be_on_the_hub(name):
        raise ValueError(
            f"{name!r} cannot be a repository on the Hub: give the name of its owner and its own, "
            "such as me/t5-small-8bit"
        )


def upload(folder: Path, name: str) -> str:
    """Upload a model folder to a repository, which is made if need be; return its address."""
    from huggingface_hub import HfApi, errors

    api = HfApi()
    try:
        address = api.create_repo(name, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="Upload the model")
    except Exception as error:  # its HTTP client's errors have no base of their own
        status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else None
        advice = "run hf auth login" if status in (401, 403) else "run the same command again"
        raise ValueError(
            f"{folder} could not be uploaded to {name}: {first_line(error)}; {advice}"
        ) from error
    return str(address)


def find_cached(name: str) -> Path | None:
    """Return a repository's folder in the cache, if every file that loading needs is there."""
    from huggingface_hub import try_to_load_from_cache

    for first in ("config.json", ADAPTER_CONFIG):
        with suppress(ValueError):  # `look_up` will say what is wrong
            if isinstance(path := try_to_load_from_cache(name, first), str):
                folder = ModelFolder(Path(path).parent)
                folder.weight_files()
                if folder.is_adapter or has_tokenizer(folder.path):
                    return folder.path
    return None


def _check_size(name: str, commit: str, files: Mapping[str, int]) -> None:
    """Announce the download of files that are large, unless they are in the cache."""
    from huggingface_hub import constants, try_to_load_from_cache

    missing = [
        size
        for file, size in files.items()
        if not isinstance(try_to_load_from_cache(name, file, revision=commit), str)
    ]
    cache = Path(constants.HF_HUB_CACHE)
    existing = next(path for path in (cache, *cache.absolute().parents) if path.exists())
    found = Download(name, sum(missing), shutil.disk_usage(existing).free, cache)
    found.check()
    if found.size > LARGE_DOWNLOAD:
        _announce(found)


def _list_files(name: str, revision: str | None) -> dict[str, int] | None:
    """Return the sizes of a repository's files by name; None if the Hub cannot be reached."""
    from huggingface_hub import HfApi, errors

    try:
        found = HfApi().model_info(name, revision=revision, timeout=TIMEOUT, files_metadata=True)
    except errors.HfHubHTTPError:  # the Hub has answered
        raise
    # HTTPError belongs to its HTTP client, which differs by version.
    except (errors.OfflineModeIsEnabled, errors.HTTPError):  # type: ignore[attr-defined]
        return None
    return {file.rfilename: file.size or 0 for file in found.siblings or ()}


@contextmanager
def _explained(name: str, revision: str | None) -> Iterator[None]:
    """Turn errors of the Hub's client into ones of one line."""
    try:
        yield
    except ValueError:
        raise
    except Exception as error:  # its HTTP client's errors have no base of their own
        if reason := _reason(error, name, revision):
            raise ValueError(reason) from None
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EACCES, errno.EDQUOT):
            raise
        raise ValueError(
            f"{name} could not be downloaded from the Hub: {first_line(error)}; "
            "check the network, or try again later"
        ) from error


def _reason(error: Exception, name: str, revision: str | None) -> str | None:
    """Return what an error of the Hub's client means, and what to do; None for others."""
    from huggingface_hub import errors

    # A kind comes before more general ones.
    if isinstance(error, errors.GatedRepoError):
        return (
            f"{name} on the Hub is gated: accept its terms on its page there, and run hf auth login"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"there is no folder {name!r} and no such repository on the Hub, or it is private: "
            f"{or_nearest(name)}check the name, or run hf auth login"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return (
            f"{name} on the Hub has no revision {revision!r}: choose a branch, tag or commit from "
            "its page there"
        )
    if isinstance(error, errors.LocalEntryNotFoundError):
        return (
            f"there is no folder {name!r}, it is not in the Hub's cache, and the Hub cannot be "
            f"reached: {or_nearest(name)}check the name or path, the network and HF_HUB_OFFLINE"
        )
    if isinstance(error, errors.EntryNotFoundError):
        return f"{name} on the Hub has no config.json, so it is not a model: choose another"
    return None
