"""Checks of what is installed, `versions`, of what MLX runs on, `device`, and of `kernels`."""

import os
import platform
import re
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import mlx.core as mx

from .. import device as machine
from .. import libraries
from .._version import __version__
from ..checkpoints import dtype_name, load
from ..kernels import alike_rows_on_metal, chosen_for_metal, native_parts, on_metal
from ..models import CompiledModel
from .checks import Finding, Subject

# Of `mx.device_info`; others identify this one machine.
PUBLIC_INFO = (
    "device_name",
    "architecture",
    "memory_size",
    "total_memory",
    "resource_limit",
    "max_buffer_length",
    "max_recommended_working_set_size",
    "compute_capability_major",
    "compute_capability_minor",
)
SLOW_BFLOAT16 = ("M1", "M2")  # as users report (mlx-examples#186)


def versions(subject: Subject) -> Finding:
    """Report versions, the system and the processor."""
    mlx, parts = version("mlx"), native_parts()
    details: dict[str, Any] = {
        "speculative_t5": __version__,
        "mlx": mlx,
        "python": platform.python_version(),
        "system": platform.platform(),
        "chip": machine.chip(),
        "machine": platform.machine(),
        "parts": parts,
    }
    reason = (
        f"speculative_t5 {__version__}, MLX {mlx}, Python {details['python']}, "
        f"{details['system']}, {details['chip']}"
    )
    notes = [f"{part}: {state}" for part, state in parts.items()]
    return Finding("versions", "ok", reason, notes, details)


def device(subject: Subject) -> Finding:
    """Report the device that MLX computes on, its memory and its limits."""
    machine.limit_memory()  # as loading a model does
    used, choice = mx.default_device(), os.environ.get(machine.DEVICE_VARIABLE)
    info = {name: value for name, value in mx.device_info(used).items() if name in PUBLIC_INFO}
    name, limits, buffers = machine.chip(used), _limits(), info.get("resource_limit")
    apple = re.search(r"\bM\d+\b", name)
    chip = apple[0] if apple else None
    dtype, reason = subject.default_type
    details: dict[str, Any] = {
        "device": str(used),
        "info": info,
        "generation": chip,
        "memory": memory(),
        **limits,
        "threads": libraries.num_threads(),
        "cores": os.cpu_count(),
        "chip": name,
        "default_dtype": dtype_name(dtype),
        "default_reason": reason,
    }
    where, threads = "the GPU", ""
    if machine.on_cpu():
        where, threads = "the CPU", f", {details['threads']} threads"
    elif chip in SLOW_BFLOAT16 and dtype == mx.bfloat16:
        reason += f"; some users report float16 to be faster on an {chip}"
    found = f"MLX computes on {where}: {name}, {_in_bytes(memory())} of memory{threads}"
    if choice:
        found += f" ({machine.DEVICE_VARIABLE}={choice})"
    notes = [
        ", ".join(f"{name.replace('_', ' ')} {_in_bytes(limit)}" for name, limit in limits.items())
        + (f"; at most {buffers:,} buffers" if buffers else ""),
        f"{details['default_dtype']} by default: {reason}",
    ]
    return Finding("device", "ok", found, notes, details)


def kernels(subject: Subject) -> Finding:
    """Report which kernels of ours this machine uses for the target, and why."""
    if not on_metal():
        off = "switched off" if mx.metal.is_available() else "MLX does not compute on Metal"
        return Finding("kernels", "ok", f"kernels for Metal are not used here: {off}")
    model = load(subject.model, dtype=subject.dtype)[0]
    if not isinstance(model, CompiledModel) or not (found := chosen_for_metal(model)):
        return Finding("kernels", "ok", "the model has no use for any")
    used = sum(choice.rows > 0 for choice in found.values())
    reason = f"{used} of {len(found)} are used here"
    if rows := alike_rows_on_metal(model, found):
        reason += f"; passes of up to {rows} tokens are built to need no --steady"
    return Finding(
        "kernels",
        "ok",
        reason,
        [f"{key}: {choice.reason}" for key, choice in found.items()],
        {key: asdict(choice) for key, choice in found.items()},
    )


def memory() -> int:
    """Return the bytes of memory of the device that MLX computes on."""
    info = mx.device_info(mx.default_device())
    size = info.get("memory_size") or info.get("total_memory")
    return int(size or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _limits() -> dict[str, int]:
    """Return MLX's limits in bytes; two of them can only be read by setting them."""
    cache, wired = mx.set_cache_limit(0), mx.set_wired_limit(0)
    mx.set_cache_limit(cache)
    mx.set_wired_limit(wired)
    return {"memory_limit": mx.get_memory_limit(), "cache_limit": cache, "wired_limit": wired}


def _in_bytes(of: Any) -> str:
    """Return a number of bytes in units that people read."""
    size = int(of)
    if size == 0:
        return "none"
    return f"{size / 2**30:.3g} GB" if size >= 2**30 else f"{size / 2**20:.3g} MB"
