"""The name that was probably meant by one that no model has."""

from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path

from .model_folder import ModelFolder, model_folders

# Of models that this package is for, on the Hub; others are compared with those on this machine.
PUBLISHED_MODELS = (
    *(f"google-t5/t5-{size}" for size in ("small", "base", "large", "3b", "11b")),
    *(f"google/flan-t5-{size}" for size in ("small", "base", "large", "xl", "xxl")),
    *(f"google/t5-v1_1-{size}" for size in ("small", "base", "large", "xl", "xxl")),
    *(f"google/mt5-{size}" for size in ("small", "base", "large", "xl", "xxl")),
    *(f"google/byt5-{size}" for size in ("small", "base", "large", "xl", "xxl")),
    *(f"google/umt5-{size}" for size in ("small", "base", "xl", "xxl")),
    *(f"google/madlad400-{size}-mt" for size in ("3b", "7b", "10b")),
    *(f"grammarly/coedit-{size}" for size in ("large", "xl", "xxl")),
    "google/flan-ul2",
    "google/t5gemma-s-s-prefixlm-it",
    "google/t5gemma-2b-2b-prefixlm-it",
    "google/t5gemma-2-270m-270m",
    "google/t5gemma-2-1b-1b",
    "google/t5gemma-2-4b-4b",
)
MAX_PATH = 4096  # characters of a path
MIN_LIKENESS = 0.8  # of get_close_matches, for names in small letters


def nearest(name: str) -> str | None:
    """Return the path or name of a model that `name` may be a slip for, if there is one.

    Models on this machine come before published ones that are as near. A repository is found by
    the part of its name after the slash, too.
    """
    names = [*_known_names(name)]
    if name in names:  # which is meant, and missing or not to be reached
        return None
    known = {form: own for own in reversed(names) for form in _forms(own)}
    whole, short = _forms(name)
    if short in known:  # by the right name, in the wrong place
        return known[short]
    found = get_close_matches(whole, known, 1, cutoff=MIN_LIKENESS)
    return known[found[0]] if found else None


def _forms(name: str) -> list[str]:
    """Return a name as it is compared, and the part after its slash."""
    folded = name.casefold()
    return [folded, folded.rsplit("/", 1)[-1]]


def _known_names(name: str) -> Iterator[str]:
    """Yield the names of all models that are known, those on this machine first."""
    if len(name) < MAX_PATH:
        yield from (str(path.parent) for path in sorted(Path(name).parent.glob("*/config.json")))
    for folder in model_folders():
        yield folder.name
        if isinstance(repository := ModelFolder(folder).origin.get("repository"), str):
            yield repository
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    for path in sorted(cache.glob("models--*--*")) if cache.is_dir() else ():
        yield "/".join(path.name.split("--")[1:])
    yield from PUBLISHED_MODELS
