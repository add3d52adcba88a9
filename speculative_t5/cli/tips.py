"""Tips that would make decoding faster on this machine."""

from __future__ import annotations

import os
import time

from .. import device
from ..cpu import BUILT_FOR
from ..decoding import cache_folder

SWITCH = "SPECULATIVE_T5_TIPS"  # "0" silences them
DAY = 24 * 60 * 60  # seconds
REINSTALL = "install the package again (pip install --force-reinstall --no-deps PATH_OF_CHECKOUT)"
TIPS = {
    "products": "the package's C parts were not built, so decoding on this CPU takes 2 to 3 times "
    f"as long; install a compiler (apt-get install g++ python3-dev), then {REINSTALL}",
    "layers": "the package's layers for this CPU are missing, so decoding takes about 1.5 times as "
    f"long; with a compiler at hand (apt-get install g++ python3-dev), {REINSTALL}",
    "OpenBLAS": "OpenBLAS is missing, so long prompts and large batches take longer on this CPU; "
    "get it with: pip install scipy-openblas32",
}
OTHER_MLX = (
    "the package's layers do not fit the installed MLX, so decoding takes about 1.5 times as long; "
    "install the MLX that they were built for (pip install 'mlx[cpu]==VERSION')"
)


def tips() -> list[str]:
    """Return every tip that applies, with its reason; there are none off Linux CPUs."""
    if not device.on_cpu() or os.environ.get(device.SWITCH) == "0":
        return []
    missing = {part: why for part, why in device.parts.items() if not why.startswith("loaded")}
    if "products" in missing:
        missing.pop("layers", None)  # one tip covers both
    return [
        f"{OTHER_MLX if why.startswith(BUILT_FOR) else TIPS[part]} ({part}: {why})"
        for part, why in missing.items()
    ]


def due_tips() -> list[str]:
    """Return the tips, unless they were given within a day or are switched off."""
    if os.environ.get(SWITCH) == "0" or not (found := tips()):
        return []
    stamp = cache_folder().parent / "tips-given"
    try:
        if time.time() - stamp.stat().st_mtime < DAY:
            return []
    except OSError:  # not given yet
        pass
    try:
        stamp.parent.mkdir(parents=True, exist_ok=True)
        stamp.touch()
    except OSError:
        return found  # without this file they are given each time
    return found
