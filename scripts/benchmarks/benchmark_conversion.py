r"""Convert a synthetic checkpoint of a given size: peak memory, and speed against that of cp.

    python scripts/benchmarks/benchmark_conversion.py                        # 4 GB, random weights
    python scripts/benchmarks/benchmark_conversion.py --gigabytes 45.2 --weights sparse \
        --form old-bin

The checkpoint has t5-11b's widths and as many layers as fit the size. cp and convert.py read the
same files in turn, and each is timed until its output is on the disk. Twice the size must be free
in the temporary folder (TMPDIR). .bin files need torch.
"""

import json
import math
import os
import pickle
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Iterator
from enum import StrEnum
from multiprocessing import Process
from pathlib import Path
from typing import Annotated, Any, BinaryIO

from speculative_t5.checkpoints.t5 import plan
from speculative_t5.models.config import T5Config

import numpy as np
import typer

REPOSITORY = Path(__file__).parents[2]
WIDTHS = {
    "d_model": 1024,
    "d_kv": 128,
    "d_ff": 65536,
    "num_heads": 128,
    "vocab_size": 32128,
}
PAUSE = 5  # seconds: else memory freed by deleting files would favour one of the two
FIXED_BYTES = 1.0e9  # a conversion may take this and twice the largest tensor

Tensors = dict[str, tuple[int, ...]]
Weights = StrEnum("Weights", ["random", "sparse"])
Form = StrEnum("Form", ["shards", "old-bin"])


def main(
    gigabytes: Annotated[float, typer.Option(help="Size of the checkpoint, in 10**9 bytes.")] = 4,
    weights: Annotated[
        Weights, typer.Option(help="Random numbers, or a sparse file, which takes no room.")
    ] = Weights.random,
    form: Annotated[
        Form,
        typer.Option(help="safetensors in shards of 1 GB, or a .bin file of torch before 1.6."),
    ] = Form.shards,
    rounds: Annotated[int, typer.Option(help="How often both are timed.")] = 3,
    copy: Annotated[bool, typer.Option(help="Whether to time cp at all.")] = True,
) -> None:
    config = make_config(gigabytes)
    tensors = {name: s for _, sources in plan(config) for name, s in sources.items()}
    total = sum(map(nbytes, tensors.values()))
    largest = max(map(nbytes, tensors.values()))
    with tempfile.TemporaryDirectory() as work:
        source, output = Path(work) / "checkpoint", Path(work) / "out"
        # In a process of its own: children inherit peak memory, and torch takes a lot.
        writer = Process(target=write_checkpoint, args=(source, config, tensors, weights, form))
        writer.start()
        writer.join()
        if writer.exitcode:
            raise SystemExit("the checkpoint could not be written")
        print(
            f"{total / 1e9:.2f} GB, {form}, {weights}: {len(tensors)} tensors, "
            f"layers {config.num_layers} + {config.num_decoder_layers}"
        )
        command = [sys.executable, str(REPOSITORY / "convert.py")]
        command += ["--model", str(source), "--output", str(output)]
        copied, converted, peaks = [], [], []
        for _ in range(rounds):
            if copy:
                seconds, _ = timed(["cp", "-r", str(source), str(output)])
                copied.append(total / seconds / 1e6)
                shutil.rmtree(output)
            seconds, peak = timed(command)
            converted.append(total / seconds / 1e6)
            peaks.append(peak)
            shutil.rmtree(output)
    bound = FIXED_BYTES + 2 * largest
    print(f"largest tensor {largest / 1e9:.3f} GB, so at most {bound / 1e9:.2f} GB of memory")
    print(f"convert.py: {speeds(converted)} MB/s, peak memory {max(peaks) / 1e9:.2f} GB")
    if copy:
        print(f"cp:         {speeds(copied)} MB/s")
        ratio = statistics.median(a / b for a, b in zip(converted, copied, strict=True))
        print(f"convert.py / cp: {ratio:.2f}, median of the turns")
    if max(peaks) > bound:
        raise SystemExit("peak memory is over the bound")


def make_config(gigabytes: float) -> T5Config:
    """Return t5-11b's config with the number of layers that comes nearest to the size."""

    def size(layers: int) -> int:
        config = T5Config(**WIDTHS, num_layers=layers, num_decoder_layers=layers)
        return sum(nbytes(shape) for _, sources in plan(config) for shape in sources.values())

    layers = max(1, round((gigabytes * 1e9 - size(0)) / (size(1) - size(0))))
    return T5Config(**WIDTHS, num_layers=layers, num_decoder_layers=layers)


def nbytes(shape: tuple[int, ...]) -> int:
    return 4 * math.prod(shape)


def write_checkpoint(
    folder: Path, config: T5Config, tensors: Tensors, weights: Weights, form: Form
) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    shutil.copy(REPOSITORY / "weights" / "correct-base" / "spiece.model", folder)
    if form == "old-bin":
        write_old_bin(folder / "pytorch_model.bin", tensors, weights)
    else:
        shards = list(split(tensors, 1e9))
        index = {}
        for i, shard in enumerate(shards):
            name = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
            write_safetensors(folder / name, shard, weights)
            index |= dict.fromkeys(shard, name)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def split(tensors: Tensors, limit: float) -> Iterator[Tensors]:
    shard: Tensors = {}
    for name, shape in tensors.items():
        if shard and sum(map(nbytes, shard.values())) + nbytes(shape) > limit:
            yield shard
            shard = {}
        shard[name] = shape
    yield shard


def write_numbers(file: BinaryIO, count: int, weights: Weights) -> None:
    """Write `count` float32: random ones of both signs below 2, or a hole in the file."""
    if weights == "sparse":
        file.truncate(file.seek(count * 4, os.SEEK_CUR))
        return
    generator = np.random.default_rng(count)
    for done in range(0, count, 1 << 22):
        bits = generator.integers(0, 2**32, min(1 << 22, count - done), dtype=np.uint32)
        file.write((bits & np.uint32(0xBFFFFFFF)).data)


def write_safetensors(path: Path, tensors: Tensors, weights: Weights) -> None:
    header: dict[str, Any] = {}
    end = 0
    for name, shape in tensors.items():
        start, end = end, end + nbytes(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)  # align the numbers, as the format's own writer does
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        write_numbers(file, end // 4, weights)


def write_old_bin(path: Path, tensors: Tensors, weights: Weights) -> None:
    """Write as torch before 1.6 did: pickles, then each tensor's count and numbers."""
    import torch

    class Storage:
        def __init__(self, key: str, numel: int) -> None:
            self.key, self.numel = key, numel

    class Tensor:
        def __init__(self, key: str, shape: tuple[int, ...]) -> None:
            self.storage, self.shape = Storage(key, nbytes(shape) // 4), shape

        def __reduce__(self) -> tuple[Any, ...]:
            strides = [math.prod(self.shape[i + 1 :]) for i in range(len(self.shape))]
            arguments = (self.storage, 0, self.shape, tuple(strides), False, OrderedDict())
            return torch._utils._rebuild_tensor_v2, arguments

    class Pickler(pickle.Pickler):
        def persistent_id(self, held: Any) -> Any:
            if isinstance(held, Storage):
                return ("storage", torch.FloatStorage, held.key, "cpu", held.numel, None)
            return None

    keys = [str(i) for i in range(len(tensors))]
    made = {name: Tensor(key, tensors[name]) for key, name in zip(keys, tensors, strict=True)}
    with path.open("wb") as file:
        for plain in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}):
            pickle.dump(plain, file, 2)
        Pickler(file, 2).dump(made)
        pickle.dump(keys, file, 2)
        for shape in tensors.values():
            file.write(struct.pack("<q", nbytes(shape) // 4))
            write_numbers(file, nbytes(shape) // 4, weights)


def timed(command: list[str]) -> tuple[float, int]:
    """Return the seconds until a command's output is on the disk, and its peak memory in bytes."""
    os.sync()
    time.sleep(PAUSE)
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    os.sync()
    seconds = time.perf_counter() - started
    if status:
        raise SystemExit(f"{' '.join(command)} failed")
    return seconds, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def speeds(measured: list[float]) -> str:
    return f"{statistics.median(measured):.0f} ({min(measured):.0f} to {max(measured):.0f})"


if __name__ == "__main__":
    typer.run(main)
