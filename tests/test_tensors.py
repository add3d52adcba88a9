"""Files of tensors: nothing that a header says is believed before it is checked."""

from __future__ import annotations

import json
import struct
import zipfile
from pathlib import Path

from speculative_t5.checkpoints.tensors import read_npz, read_safetensors
from speculative_t5.checkpoints.writing import NewTensor, write_npz

import mlx.core as mx
import numpy as np
import pytest
from checkpoints import refused


def safetensors(path: Path, header: dict[str, object] | bytes, data: bytes = b"") -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)


def entry(shape: list[int], start: int, end: int, dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def test_arrays_survive_a_round_trip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read whole, and by blocks of rows."""
    monkeypatch.setattr("speculative_t5.checkpoints.tensors.BLOCK_BYTES", 41)
    arrays = {
        mx.float32: np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4),
        mx.float16: np.linspace(-1, 1, 6, dtype=np.float16),
        mx.bfloat16: np.arange(0x3F80, 0x3F86, dtype=np.uint16).reshape(2, 3),
        mx.uint32: np.arange(5, dtype=np.uint32),
    }
    new = [
        NewTensor(f"t{i}", array.shape, dtype, [array[:1], array[1:]])
        for i, (dtype, array) in enumerate(arrays.items())
    ]
    write_npz(tmp_path / "a.npz", new)
    found = read_npz(tmp_path / "a.npz")
    assert [(t.shape, t.dtype) for t in found.values()] == [(n.shape, n.dtype) for n in new]
    for tensor, array in zip(found.values(), arrays.values(), strict=True):
        assert (tensor.read() == array).all() and tensor.nbytes == array.nbytes
        assert (np.concatenate([*tensor.blocks()]) == array).all()
    assert [len(block) for block in found["t0"].blocks()] == [2, 1]
    loaded = mx.load(str(tmp_path / "a.npz"))  # MLX reads them itself
    assert isinstance(loaded, dict)
    assert loaded["t2"].dtype == mx.bfloat16 and loaded["t2"].tolist()[0][0] == 1.0


def test_lying_safetensors_are_refused(tmp_path: Path) -> None:
    lies: list[tuple[dict[str, object] | bytes, bytes]] = [
        ({"a": entry([10**12], 0, 4 * 10**12)}, bytes(8)),  # beyond the file
        ({"a": entry([3], 0, 8)}, bytes(8)),  # more numbers than bytes
        ({"a": entry([2], 0, 8)}, bytes(4)),  # truncated
        ({"a": entry([2], 0, 8)}, bytes(12)),  # something after it
        ({"a": entry([1], 0, 4), "b": entry([1], 2, 6)}, bytes(6)),  # overlapping
        ({"a": entry([-2], 0, 8)}, bytes(8)),
        ({"a": entry([2**62, 4], 0, 0)}, b""),  # a product that overflows
        ({"a": {"dtype": "F32"}}, b""),
        (b"{", b""),
    ]
    for header, data in lies:
        safetensors(tmp_path / "a.safetensors", header, data)
        with refused("a.safetensors is truncated or damaged"):
            read_safetensors(tmp_path / "a.safetensors")


def test_other_safetensors_are_refused(tmp_path: Path) -> None:
    """Files that end in their headers, and types that are not supported."""
    path = tmp_path / "a.safetensors"
    for start in (b"", b"\x01", struct.pack("<Q", 2**62), struct.pack("<Q", 90_000_000)):
        path.write_bytes(start)
        with refused("truncated or damaged"):
            read_safetensors(path)
    safetensors(path, {"a": entry([8], 0, 8, "I8")}, bytes(8))
    with refused("a is of type I8, expected F32, F16, BF16"):
        read_safetensors(path)


def npy(shape: tuple[int, ...], data: bytes, descr: str = "<f4") -> bytes:
    header = repr({"descr": descr, "fortran_order": False, "shape": shape}).encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + data


def declare_more(archive: bytes, content: bytes) -> bytes:
    """Return an archive whose headers declare a missing member of 4 GB."""
    true, claimed = (struct.pack("<II", n, n) for n in (len(content), 4 * 10**9 + 74))
    return archive.replace(true, claimed)


def test_lying_npz_files_are_refused(tmp_path: Path) -> None:
    path, empty = tmp_path / "a.npz", npy((10**9,), b"")
    million = npy((10**6,), bytes(4 * 10**6))
    for content, compression, message in (
        (npy((10**12,), bytes(8)), 0, "a.npy declares 4000000000000 bytes of numbers, its"),
        (million, zipfile.ZIP_DEFLATED, "a.npy declares 4000000"),
        (npy((1,), bytes(8), "|O"), 0, "expected tensors of floats, found object"),
        (b"\x93NUMPY\x03\x00", 0, "in version \\(3, 0\\) of the npy format"),
        (empty, 0, "truncated or damaged"),
    ):
        with zipfile.ZipFile(path, "w", compression) as archive:
            archive.writestr("a.npy", content)
        if content is empty:
            path.write_bytes(declare_more(path.read_bytes(), content))
        with refused(message):
            read_npz(path)
    path.write_bytes(b"PK\3\4" + bytes(96))
    with refused("a.npz is truncated or damaged"):
        read_npz(path)
