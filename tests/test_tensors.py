"""Files of tensors: nothing that they say is believed or run; of a .bin, torch reads the same."""

import json
import os
import pickle
import struct
import subprocess
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

from speculative_t5.checkpoints.tensors import NewTensor, read_npz, read_safetensors, write_npz
from speculative_t5.checkpoints.torch_bin import OLD_MAGIC, OLD_PROTOCOL, read_bin

import mlx.core as mx
import numpy as np
import pytest
import torch
from checkpoints import refused
from conftest import REPOSITORY
from messages import check_message


def safetensors(header: object, data: bytes) -> bytes:
    raw = json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


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


@pytest.mark.parametrize("length", range(1, 9))  # of a name: entries begin at any byte
def test_npz_files_that_others_write(tmp_path: Path, length: int) -> None:
    """By columns, with a field only before the entry, without dimensions, empty, or by MLX."""
    matrix = np.arange(12, dtype=np.float16).reshape(3, 4)
    arrays = {"n" * length: matrix.T, "b": np.float32([[1, 2]]), "scalar": np.float32(3)}
    arrays["none"] = np.zeros((0, 3), np.float32)
    np.savez(tmp_path / "a.npz", **arrays)  # of large files: numpy notes their size in such a field
    mx.savez(str(tmp_path / "b.npz"), **{name: mx.array(each) for name, each in arrays.items()})
    for path in (tmp_path / "a.npz", tmp_path / "b.npz"):
        found = read_npz(path)
        assert found.keys() == arrays.keys()
        for name, array in arrays.items():
            read = found[name].read()
            assert read.shape == array.shape and (read == array).all() and read.flags.aligned


def test_lying_and_other_safetensors_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    lies: list[tuple[object, bytes]] = [
        ({"a": entry([10**12], 0, 4 * 10**12)}, bytes(8)),  # beyond the file
        ({"a": entry([3], 0, 8)}, bytes(8)),  # more numbers than bytes
        ({"a": entry([2], 0, 8)}, bytes(4)),  # truncated
        ({"a": entry([2], 0, 8)}, bytes(12)),  # something after it
        ({"a": entry([1], 0, 4), "b": entry([1], 2, 6)}, bytes(6)),  # overlapping
        ({"a": entry([-2], 0, 8)}, bytes(8)),
        ({"a": entry([2**62, 4], 0, 0)}, b""),  # a product that overflows
        ({"a": {"dtype": "F32"}}, b""),
    ]
    cut = [b"", b"\x01", *(struct.pack("<Q", size) + b"{" for size in (1, 90_000_000, 2**62))]
    for content in [*(safetensors(*lie) for lie in lies), *cut]:
        path.write_bytes(content)
        with refused("a.safetensors is truncated or damaged"):
            read_safetensors(path)
    path.write_bytes(safetensors({"a": entry([8], 0, 8, "I8")}, bytes(8)))
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


A = b"X\x01\0\0\0a"


@pytest.fixture(params=[False, True], ids=["zip", "old"])
def old(request: pytest.FixtureRequest) -> bool:
    """Whether a file is of the kind before torch 1.6."""
    return bool(request.param)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.bin"


def save(tensors: Any, path: Path, old: bool, **options: Any) -> Path:
    torch.save(tensors, path, _use_new_zipfile_serialization=not old, **options)
    return path


def test_tensors_match_torch(path: Path, old: bool) -> None:
    base = torch.randn(6, 8)
    tensors = OrderedDict(
        whole=base,
        transposed=base.T,  # as in checkpoints that came from TensorFlow
        part=base[2:5, 1:7:2],
        again=base,
        parameter=torch.nn.Parameter(torch.randn(3)),
        half=torch.randn(4, 2).half(),
        brain=torch.randn(4, 2).bfloat16(),
        scalar=torch.tensor(2.5),
        empty=torch.zeros(0, 3),
    )
    found = read_bin(save(tensors, path, old))
    assert list(found) == list(tensors)
    for name, tensor in tensors.items():
        array = found[name].read()
        assert found[name].shape == tuple(tensor.shape) == array.shape
        bits = tensor.detach()
        expected = bits.view(torch.int16).numpy() if name == "brain" else bits.numpy()
        assert (array.view(expected.dtype) == expected).all()
    state = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2)).state_dict()
    assert state._metadata, "an attribute"
    for protocol in (2, 4):
        found = read_bin(save(state, path, old, pickle_protocol=protocol))
        assert [*found] == [*state]
        assert all((found[name].read() == state[name].numpy()).all() for name in state)


def test_nothing_in_a_file_is_run(path: Path, old: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, ("touch pwned",)

    monkeypatch.chdir(path.parent)
    save({"a": torch.ones(1), "b": Evil()}, path, old)
    with refused(r"a\.bin: it asks for posix\.system, which is no part of"):
        read_bin(path)
    assert not Path("pwned").exists()


def test_other_contents_are_refused(path: Path, old: bool) -> None:
    for held, message in (
        ({"a": 3}, "'a' is a int, expected a tensor"),
        ({3: torch.ones(1)}, "it has an entry under a int, expected a name"),
        ([torch.ones(1)], "it holds a list, expected tensors by name"),
        ({"a": torch.ones(2, dtype=torch.int8)}, "it holds a 'CharStorage', expected FloatSto"),
        ({"a": torch.ones(2, dtype=torch.uint8)}, "'a' is a 'ByteStorage', expected FloatSto"),
        ({"a": torch.ones(1, 1, 2, 3) > 0}, "'a' is a 'BoolStorage', expected FloatStorage"),
        ({"a": torch.tensor(True)}, "'a' is a 'BoolStorage', expected FloatStorage"),
        ({"a": torch.eye(2).to_sparse()}, "it asks for torch._utils._rebuild_sparse_tensor"),
    ):
        with refused(message):
            read_bin(save(held, path, old))


def test_masks_of_positions_are_left_out(path: Path, old: bool) -> None:
    masks = {
        f"h.{kind}.attn.bias": torch.tril(torch.ones(8, 8)).to(kind).view(1, 1, 8, 8)
        for kind in (torch.bool, torch.uint8)
    }
    assert [*read_bin(save({"a": torch.ones(3), **masks}, path, old))] == ["a"]


def test_truncated_files_are_refused(path: Path, old: bool) -> None:
    whole = save({"a": torch.ones(1000)}, path, old).read_bytes()
    for keep in (0, 3, 100, -1, -4000):
        path.write_bytes(whole[:keep])
        with refused("a.bin is truncated or damaged"):
            read_bin(path)


def wrap(path: Path, old: bool, pickled: bytes, count: int = 16) -> Path:
    """Write a file around a pickle and 16 numbers; an old file also says how many they are."""
    if not old:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("a/data.pkl", pickled)
            archive.writestr("a/byteorder", "little")
            archive.writestr("a/data/0", bytes(64))
        return path
    with path.open("wb") as file:
        for plain in (OLD_MAGIC, OLD_PROTOCOL, {"little_endian": True}):
            pickle.dump(plain, file, 2)
        file.write(pickled)
        pickle.dump(["0"], file, 2)
        file.write(struct.pack("<q", count) + bytes(64))
    return path


def tensor(
    old: bool = False, numel: int = 16, shape: Any = b"K\x02\x85", strides: Any = (1,)
) -> bytes:
    """Return the opcodes of a tensor that may claim any size, in numbers or opcodes."""
    sizes = (numel, shape, strides)
    dumped = [v if isinstance(v, bytes) else pickle.dumps(v, 2)[2:-1] for v in sizes]
    return (
        b"ctorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagectorch\nFloatStorage\n"
        b"X\x01\0\0\x000X\x03\0\0\0cpu%b%btQK\0%b%b\x89NtR"
        % (dumped[0], b"N" if old else b"", *dumped[1:])
    )


def test_sizes_are_checked_against_the_file(path: Path, old: bool) -> None:
    cases = [
        (10**12, (10**12,), (1,), 10**12),
        (16, (4, 4), (5, 1), 16),
        (16, (8,), (-1,), 16),
        (-16, (8,), (1,), 16),
    ]
    cases += [(16, (16,), (1,), 15)] * old  # only old files have a count
    for numel, shape, strides, count in cases:
        wrap(path, old, b"\x80\x02}" + A + tensor(old, numel, shape, strides) + b"s.", count)
        with refused("a.bin is truncated or damaged"):
            read_bin(path)


def test_a_pickle_cannot_change_what_it_has_made(path: Path, old: bool) -> None:
    """By the BUILD opcode, which sets attributes, and so could evade checks already made."""
    # As Python 2 wrote dictionaries: from a list of lists, with strings of bytes.
    pickled = b"\x80\x02ccollections\nOrderedDict\n](](U\x01a" + tensor(old) + b"ee\x85R."
    assert read_bin(wrap(path, old, pickled))["a"].read().tolist() == [0, 0]

    made = b"\x80\x02}" + A + tensor(old)
    assert read_bin(wrap(path, old, made + b"s."))["a"].read().tolist() == [0, 0]
    state = b"}X\x07\0\0\0stridesJ\xff\xff\xff\xffJ\xff\xff\xff\xff\x86s"
    for built in (state + b"b", b"N" + state + b"\x86b"):
        with refused("a.bin is truncated or damaged"):
            read_bin(wrap(path, old, made + built + b"s."))


SENSELESS = (
    b"N\x86.", b"q\0.", b"h\5.", b"Nt.", b"}(X\1\0\0\0au.", b"NX\1\0\0\0aNs.", b"NNa.", b"N)R.",
    b"ctorch\nFloatStorage\n)R.", b"ccollections\nOrderedDict\nNR.", b"NQ.", b"ctorch",
    b"\x01", b"N", b"X\x01\0\0\0\xff.",
)  # fmt: skip


def test_senseless_pickles_are_refused(path: Path) -> None:
    for pickled in SENSELESS:
        with refused(f"{path} is truncated or damaged: .{{10,}}; download"):
            read_bin(wrap(path, False, b"\x80\x02" + pickled))


# Values of few bytes that are nested 200,000 deep, or that have 2**60 parts.
DEEP = b"N" + b"\x85" * 200_000
SHARED = b"Nq\x09" + b"h\x09\x86q\x09" * 60
FLOATS, STORED = b"ctorch\nFloatStorage\n", b"X\x07\0\0\0storage"
DEEP_IN = ("a key", "a storage's key")
LONG = b"\x8a\xff" + (2**2000).to_bytes(255, "little")
PAIRS = b"](](X\x01\0\0\0bNeq\x01" + b"h\x01" * 30_000 + b"eq\x02"
ORDERED, USES = b"ccollections\nOrderedDict\n", b"h\x03h\x02\x85Ra" * 30_000
HUGE = tensor(shape=(2**31 - 1, 2**31 - 1), strides=(0, 0))

ATTACKS = {
    "8 GB of bytes": b"\x96" + struct.pack("<Q", 8 << 30) + b".",
    "2 GB of a number": b"\x8b" + struct.pack("<i", 2**31 - 1) + b".",
    "4 GB of text": b"X\xff\xff\xff\xff.",
    "a far place in the memo": b"Nr\xff\xff\xff\x0f.",
    "a text of no length": b"\x8d" + struct.pack("<Q", 2**63 - 1) + b".",
    "too many opcodes": b"}" * 1_100_000 + b".",
    "many duplicates": b"N" + b"2\x86" * 60 + b".",
    "many places in the memo": b"N" + b"\x94" * 900_000 + b".",
    "a shape of long numbers": tensor(shape=b"(" + LONG * 9000 + b"t"),
    "one list as many dictionaries": PAIRS + ORDERED + b"q\x03]" + USES + b".",
    "a tensor larger than its numbers": b"}" + A + HUGE + b"s.",
} | {
    f"{name} as {place}": before + value + after
    for place, before, after in (
        ("a key", b"}", b"Ns."),
        ("the file's value", b"", b"."),
        ("a storage's key", b"(" + STORED + FLOATS, b"NK\x01tQ."),
        ("one of many keys", b"}(", b"Nu."),
        ("a dictionary's value", b"}" + A, b"s."),
        ("a persistent id", b"", b"Q."),
        ("a kind of storage", b"(", FLOATS + A + b"NK\x01tQ."),
        ("a storage's size", b"(" + STORED + FLOATS + A + b"N", b"tQ."),
        ("a storage's view", b"(" + STORED + FLOATS + A + b"NK\x01", b"tQ."),
        ("a function", b"", b")R."),
        ("a module", b"", A + b"\x93."),
    )
    # Whatever is not hashed or compared with many parts is not when it is deep, so few are tried.
    for name, value in (("deep", DEEP), ("shared", SHARED))[place not in DEEP_IN :]
}

READ = """
import re, resource, sys
from pathlib import Path
sys.modules["torch"] = None
from speculative_t5.checkpoints.torch_bin import read_bin
def kilobytes(what):
    return int(re.search(rf"{what}:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
attacks, *sound = map(Path, sys.argv[1:])
for path in sound:
    for tensor in read_bin(path).values():
        for block in tensor.blocks():
            block.max()
    print(kilobytes("VmHWM"))
resource.setrlimit(resource.RLIMIT_AS, (kilobytes("VmSize") * 1024 + 400_000_000,) * 2)
for path in sorted(attacks.iterdir()):
    try:
        read_bin(path)
    except ValueError as error:
        print(path.name, error, sep=": ")
"""


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[int], dict[str, str]]:
    """The most bytes that sound files took, and what was said of each attack.

    Attacks are in zip archives; the same machine reads old files, which only a few are tried in.
    """
    place = tmp_path_factory.mktemp("attacked")
    folder = place / "attacks"
    folder.mkdir()
    for name, pickled in ATTACKS.items():
        wrap(folder / name, False, b"\x80\x02" + pickled)
    for name in ("4 GB of text", "shared as a key"):
        wrap(folder / f"{name}, old", True, b"\x80\x02" + ATTACKS[name])
    large = {f"t{i}": torch.zeros(25 * 10**5) for i in range(12)}  # 10 MB each
    sound = [save({"t": torch.zeros(10)}, place / "small.bin", False)]
    sound += [save(large, place / f"large{old}.bin", old) for old in (False, True)]
    command = [sys.executable, "-c", READ, folder, *sound]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, timeout=90)
    assert done.returncode == 0, done.stderr
    sizes, messages = done.stdout.splitlines()[:3], done.stdout.splitlines()[3:]
    said = dict(line.split(": ", 1) for line in messages)
    assert [*said] == sorted(path.name for path in folder.iterdir())
    return [1024 * int(line) for line in sizes], said


@pytest.mark.linux  # reads /proc
def test_a_large_file_takes_little_more_memory_than_a_small_one(attacked: Any) -> None:
    small, *large = attacked[0]
    assert max(large) - small < 2 * 10e6 + 5e7


@pytest.mark.linux
def test_attacks_of_few_bytes_take_neither_time_nor_memory(attacked: Any) -> None:
    """They are refused in a process that may not take more, each in a short line."""
    messages = attacked[1]
    for name, message in messages.items():
        assert len(message) < 400
        check_message(message, name)
    assert "expected 8589934592 bytes" in messages["8 GB of bytes"]
    assert "more than 1000000 opcodes" in messages["too many opcodes"]
    assert "has a shape that MLX cannot hold" in messages["a shape of long numbers"]
    assert "lies outside of 16 numbers" in messages["a tensor larger than its numbers"]
    assert "it has an entry under a tuple" in messages["shared as a key"]


def test_rewritten_members_are_refused(path: Path) -> None:
    save({"a": torch.ones(1000), "b": torch.ones(2000)}, path, old=False)
    with zipfile.ZipFile(path) as archive:
        members = {member: archive.read(member) for member in archive.namelist()}
    for name, kind, kept, message in (
        ("a/data.pkl", zipfile.ZIP_DEFLATED, None, "its a/data.pkl is compressed"),
        ("a/byteorder", zipfile.ZIP_DEFLATED, None, "its a/byteorder is compressed"),
        ("a/data/0", zipfile.ZIP_DEFLATED, None, "truncated or damaged: storage 0"),
        ("a/data/0", zipfile.ZIP_STORED, 64, "truncated or damaged: storage 0"),
    ):
        with zipfile.ZipFile(path, "w") as archive:
            for member, held in members.items():
                spoiled = (held[:kept], kind) if member == name else (held,)
                archive.writestr(member, *spoiled)
        with refused(message):
            read_bin(path)
