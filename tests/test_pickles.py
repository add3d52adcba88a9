"""PyTorch's .bin files, of both kinds: the same tensors as torch reads, and nothing is run."""

from __future__ import annotations

import io
import os
import pickle
import re
import struct
import subprocess
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

from speculative_t5.checkpoints.torch_bin import MAGIC, PROTOCOL, read_bin

import pytest
import torch
from conftest import REPOSITORY
from messages import check_message

OLD = [False, True]


def save(tensors: Any, path: Path, old: bool) -> Path:
    torch.save(tensors, path, _use_new_zipfile_serialization=not old)
    return path


@pytest.mark.parametrize("old", OLD)
def test_tensors_are_those_that_torch_reads(tmp_path: Path, old: bool) -> None:
    base = torch.randn(6, 8)
    tensors = OrderedDict(
        whole=base,
        transposed=base.T,  # as checkpoints are that came from TensorFlow
        part=base[2:5, 1:7:2],
        again=base,
        parameter=torch.nn.Parameter(torch.randn(3)),
        half=torch.randn(4, 2).half(),
        brain=torch.randn(4, 2).bfloat16(),
        scalar=torch.tensor(2.5),
        empty=torch.zeros(0, 3),
    )
    found = read_bin(save(tensors, tmp_path / "a.bin", old))
    assert list(found) == list(tensors)
    for name, tensor in tensors.items():
        array = found[name].read()
        assert found[name].shape == tuple(tensor.shape) == array.shape
        bits = tensor.detach()
        expected = bits.view(torch.int16).numpy() if name == "brain" else bits.numpy()
        assert (array.view(expected.dtype) == expected).all()


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch pwned",)


@pytest.mark.parametrize("old", OLD)
def test_nothing_that_a_file_names_is_run(
    tmp_path: Path, old: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save({"a": torch.ones(1), "b": Evil()}, tmp_path / "a.bin", old)
    with pytest.raises(ValueError, match=r"a\.bin: it asks for posix\.system, which is no part of"):
        read_bin(tmp_path / "a.bin")
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("old", OLD)
@pytest.mark.parametrize(
    ("held", "message"),
    [
        ({"a": 3}, "'a' is a int, expected a tensor"),
        ({3: torch.ones(1)}, "it has an entry under a int, expected a name"),
        ({"a": {"b": torch.ones(1)}}, "'a' is a dict, expected a tensor"),
        ([torch.ones(1)], "it holds a list, expected tensors by name"),
        ({"a": torch.ones(2, dtype=torch.int8)}, "it holds a 'CharStorage', expected FloatSto"),
        ({"a": torch.eye(2).to_sparse()}, "it asks for torch._utils._rebuild_sparse_tensor"),
        ({"a": torch.ones(2, device="meta")}, "it asks for torch._utils._rebuild_meta_tensor"),
    ],
)
def test_files_of_other_things_are_refused(
    tmp_path: Path, old: bool, held: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read_bin(save(held, tmp_path / "a.bin", old))


@pytest.mark.parametrize("old", OLD)
@pytest.mark.parametrize("keep", [0, 1, 3, 100, -1, -4000])
def test_truncated_files_are_refused(tmp_path: Path, old: bool, keep: int) -> None:
    path = save({"a": torch.ones(1000)}, tmp_path / "a.bin", old)
    os.truncate(path, keep if keep >= 0 else path.stat().st_size + keep)
    with pytest.raises(ValueError, match="a.bin is truncated or damaged"):
        read_bin(path)


class Storage:
    pass


def write_sizes(
    path: Path, old: bool, *, numel: int, shape: tuple[int, ...], strides: Any, count: int
) -> None:
    """A file of one tensor and 16 bytes of numbers, which may say anything of its size."""

    class Pickler(pickle.Pickler):
        def persistent_id(self, held: Any) -> Any:
            if isinstance(held, Storage):
                saved = ("storage", torch.FloatStorage, "0", "cpu", numel)
                return (*saved, None) if old else saved
            return None

    class Tensor:
        def __reduce__(self) -> tuple[Any, ...]:
            arguments = (Storage(), 0, shape, strides, False, OrderedDict())
            return torch._utils._rebuild_tensor_v2, arguments

    pickled = io.BytesIO()
    Pickler(pickled, 2).dump({"a": Tensor()})
    if not old:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("a/data.pkl", pickled.getvalue())
            archive.writestr("a/byteorder", "little")
            archive.writestr("a/data/0", bytes(16))
            archive.writestr("a/version", "3")
        return
    with path.open("wb") as file:
        for plain in (MAGIC, PROTOCOL, {"little_endian": True}):
            pickle.dump(plain, file, 2)
        file.write(pickled.getvalue())
        pickle.dump(["0"], file, 2)
        file.write(struct.pack("<q", count) + bytes(16))


@pytest.mark.parametrize(
    "sizes",
    [
        {"numel": 10**12, "shape": (10**12,), "strides": (1,), "count": 10**12},
        {"numel": 4, "shape": (4,), "strides": (1,), "count": 3},
        {"numel": 4, "shape": (5,), "strides": (1,), "count": 4},
        {"numel": 4, "shape": (2, 2), "strides": (3, 1), "count": 4},
        {"numel": 4, "shape": (2,), "strides": (-1,), "count": 4},
        {"numel": 4, "shape": (2, 2), "strides": (1,), "count": 4},
        {"numel": -4, "shape": (2,), "strides": (1,), "count": 4},
    ],
)
@pytest.mark.parametrize("old", OLD)
def test_sizes_are_checked_against_the_file(
    tmp_path: Path, sizes: dict[str, Any], old: bool
) -> None:
    write_sizes(tmp_path / "good.bin", old, numel=4, shape=(2, 2), strides=(2, 1), count=4)
    assert (read_bin(tmp_path / "good.bin")["a"].read() == 0).all()
    if sizes["count"] == 3 and not old:
        return  # only old files have such a count
    write_sizes(tmp_path / "a.bin", old, **sizes)
    with pytest.raises(ValueError, match="a.bin is truncated or damaged"):
        read_bin(tmp_path / "a.bin")


def opcodes(path: Path, old: bool, pickled: bytes, keys: tuple[str, ...] = ("0",)) -> Path:
    """A file around a pickle, with 64 bytes of numbers."""
    if not old:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("a/data.pkl", pickled)
            archive.writestr("a/data/0", bytes(64))
        return path
    with path.open("wb") as file:
        for plain in (MAGIC, PROTOCOL, {"little_endian": True}):
            pickle.dump(plain, file, 2)
        file.write(pickled)
        pickle.dump(list(keys), file, 2)
        file.write(struct.pack("<q", 16) + bytes(64))
    return path


TENSOR = (
    b"ctorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagectorch\nFloatStorage\n"
    b"X\x01\0\0\x000X\x03\0\0\0cpuK\x10%stQK\0K\x02\x85K\x01\x85\x89NtR"
)


@pytest.mark.parametrize("old", OLD)
def test_dictionaries_that_python_2_wrote_are_read(tmp_path: Path, old: bool) -> None:
    """From a list of lists, with strings of bytes."""
    entries = b"](](U\x01a" + TENSOR % (b"N" if old else b"") + b"ee"
    pickled = b"\x80\x02ccollections\nOrderedDict\n" + entries + b"\x85R."
    assert read_bin(opcodes(tmp_path / "a.bin", old, pickled))["a"].read().tolist() == [0, 0]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("old", OLD)
def test_state_dicts_are_read_in_each_protocol_of_pickle(
    tmp_path: Path, old: bool, protocol: int
) -> None:
    """With the attribute _metadata, which the modules of torch give them."""
    state = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2)).state_dict()
    assert state._metadata
    torch.save(
        state, tmp_path / "a.bin", pickle_protocol=protocol, _use_new_zipfile_serialization=not old
    )
    found = read_bin(tmp_path / "a.bin")
    assert [*found] == [*state]
    assert all((found[name].read() == state[name].numpy()).all() for name in state)


@pytest.mark.parametrize("old", OLD)
def test_what_a_pickle_has_made_cannot_be_changed_by_it(tmp_path: Path, old: bool) -> None:
    """By the BUILD opcode, which sets attributes, and so could go round checks already made."""
    tensor = TENSOR % (b"N" if old else b"")
    plain = b"\x80\x02}X\x01\0\0\0a" + tensor + b"s."
    assert read_bin(opcodes(tmp_path / "good.bin", old, plain))["a"].read().tolist() == [0, 0]
    state = b"}X\x07\0\0\0stridesJ\xff\xff\xff\xffJ\xff\xff\xff\xff\x86s"
    for built in (state + b"b", b"N" + state + b"\x86b"):
        changed = b"\x80\x02}X\x01\0\0\0a" + tensor + built + b"s."
        with pytest.raises(ValueError, match="a.bin is truncated or damaged"):
            read_bin(opcodes(tmp_path / "a.bin", old, changed))


@pytest.mark.parametrize("old", OLD)
def test_a_pickle_names_no_amount_of_memory(tmp_path: Path, old: bool) -> None:
    """A place in the memo, or a string, of a number that the file has no room for."""
    for opcode in (b"Nr\xff\xff\xff\x0f.", b"X\xff\xff\xff\xff.", b"\x8e" + b"\xff" * 8 + b"."):
        path = opcodes(tmp_path / "a.bin", old, b"\x80\x02" + opcode)
        command = [sys.executable, "-c", RESIDENT, str(path)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=False)
        assert int(done.stdout) * 1024 < 3e8, done.stderr


@pytest.mark.parametrize(
    ("pickled", "message"),
    [
        (b".", "takes a value where there is none"),
        (b"N\x86.", "takes a value where there is none"),
        (b"q\0.", "takes a value where there is none"),
        (b"h\5.", "recalls a value that it has not stored"),
        (b"Nt.", "goes back to a mark where there is none"),
        (b"}(X\1\0\0\0au.", "an entry in its pickle has 1 parts"),
        (b"NX\1\0\0\0aNs.", "what gets entries in its pickle is a nonetype, expected a dict"),
        (b"NNa.", "what is appended to in its pickle is a nonetype, expected a list"),
        (b"N)R.", "what is called in its pickle is a nonetype"),
        (b"ctorch\nFloatStorage\n)R.", "its pickle calls torch.FloatStorage with 0 arguments"),
        (b"ccollections\nOrderedDict\nNR.", "what a function gets in its pickle is a nonetype"),
        (b"NQ.", "it describes a storage by a nonetype"),
        (b"ctorch", "its pickle ends within a name"),
        (b"\x01", "at byte 3 of its pickle, b'\\x01' is not an opcode"),
        (b"N", "it ends early"),
        (b"X\xff", "not enough data"),
        (b"X\x01\0\0\0\xff.", "codec can't decode byte 0xff"),
    ],
)
def test_pickles_that_make_no_sense_are_refused(
    tmp_path: Path, pickled: bytes, message: str
) -> None:
    path = opcodes(tmp_path / "a.bin", False, b"\x80\x02" + pickled)
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        read_bin(path)
    check_message(str(error.value), f"{path} is truncated or damaged")


def long(number: int) -> bytes:
    return b"\x8a\xff" + number.to_bytes(255, "little")


# Values of few bytes that are nested 200,000 deep, or have 2**60 parts.
DEEP = b"N" + b"\x85" * 200_000
DUPLICATED = b"N" + b"2\x86" * 60
SHARED = b"Nq\x09" + b"h\x09\x86q\x09" * 60
A, FLOATS = b"X\x01\0\0\0a", b"ctorch\nFloatStorage\n"
STORED = b"X\x07\0\0\0storage"
PAIRS = b"](](X\x01\0\0\0bNeq\x01" + b"h\x01" * 100_000 + b"eq\x02"

ATTACKS = {
    "8 GB of bytes": b"\x96" + struct.pack("<Q", 8 << 30) + b".",
    "2 GB of a number": b"\x8b" + struct.pack("<i", 2**31 - 1) + b".",
    "4 GB of text": b"X\xff\xff\xff\xff.",
    "a text of no length": b"\x8d" + struct.pack("<Q", 2**63 - 1) + b".",
    "a deep value": b"}" + A + DEEP + b"s.",
    "too many opcodes": b"N" + b"\x85" * 1_100_000 + b".",
    "many values": b"}" * 900_000 + b"N.",
    "many places in the memo": b"N" + b"\x94" * 900_000 + b".",
    "a shape of long numbers": (TENSOR % b"").replace(
        b"K\x02\x85", b"(" + long(2**2000) * 9000 + b"t"
    ),
    "one list as many dictionaries": PAIRS
    + b"ccollections\nOrderedDict\nq\x03]"
    + b"h\x03h\x02\x85Ra" * 100_000
    + b".",
    "a tensor larger than its numbers": b"}" + A + (TENSOR % b"").replace(
        b"K\x02\x85K\x01\x85", b"J\xff\xff\xff\x7fJ\xff\xff\xff\x7f\x86K\0K\0\x86"
    ) + b"s.",
} | {
    f"{name} as {place}": before + value + after
    for name, value in (("deep", DEEP), ("duplicated", DUPLICATED), ("shared", SHARED))
    for place, before, after in (
        ("a key", b"}", b"Ns."),
        ("one of many keys", b"}(", b"Nu."),
        ("the file's value", b"", b"."),
        ("a dictionary's value", b"}" + A, b"s."),
        ("a persistent id", b"", b"Q."),
        ("a kind of storage", b"(", FLOATS + A + b"NK\x01tQ."),
        ("a type of storage", b"(" + STORED, A + b"NK\x01tQ."),
        ("a storage's key", b"(" + STORED + FLOATS, b"NK\x01tQ."),
        ("a storage's size", b"(" + STORED + FLOATS + A + b"N", b"tQ."),
        ("a storage's view", b"(" + STORED + FLOATS + A + b"NK\x01", b"tQ."),
        ("a tensor's storage", b"ctorch._utils\n_rebuild_tensor_v2\n(", b"K\0))tR."),
        ("a function", b"", b")R."),
        ("arguments", b"ccollections\nOrderedDict\n", b"R."),
        ("a module", b"", A + b"\x93."),
        ("what gets attributes", b"", b"Nb."),
        ("a list", b"", b"Na."),
    )
}  # fmt: skip

LIMITED = """
import re, resource, sys
from pathlib import Path
from speculative_t5.checkpoints.torch_bin import read_bin
used = int(re.search(r"VmSize:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
resource.setrlimit(resource.RLIMIT_AS, (used * 1024 + 400_000_000,) * 2)
for path in sorted(Path(sys.argv[1]).iterdir()):
    try:
        read_bin(path)
    except ValueError as error:
        print(path.name, error, sep=": ")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("old", OLD)
def test_attacks_of_few_bytes_take_neither_time_nor_memory(tmp_path: Path, old: bool) -> None:
    for name, pickled in ATTACKS.items():
        opcodes(tmp_path / name, old, b"\x80\x02" + pickled)
    command = [sys.executable, "-c", LIMITED, str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=REPOSITORY, timeout=90, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split(": ")[0] for line in lines] == sorted(ATTACKS)
    told = dict(line.split(": ", 1) for line in lines)
    for message in told.values():
        assert len(message) < 400
        check_message(message, str(tmp_path))
    assert "it uses the opcode BYTEARRAY8" in told["8 GB of bytes"]
    assert "more than 1000000 opcodes" in told["too many opcodes"]
    assert "shape in its pickle has 9000 dimensions" in told["a shape of long numbers"]
    assert "lies outside of 16 numbers" in told["a tensor larger than its numbers"]
    assert "it has an entry under a tuple" in told["shared as a key"]


@pytest.mark.parametrize("name", ["a/data.pkl", "a/byteorder"])
def test_compressed_members_are_not_unpacked(tmp_path: Path, name: str) -> None:
    members = {"a/data.pkl": b"\x80\x02}.", "a/byteorder": b"little"}
    with zipfile.ZipFile(tmp_path / "a.bin", "w") as archive:
        for member, content in members.items():
            kind = zipfile.ZIP_DEFLATED if member == name else zipfile.ZIP_STORED
            archive.writestr(member, content, kind)
    with pytest.raises(ValueError, match=f"its {name} is compressed"):
        read_bin(tmp_path / "a.bin")


def rewritten(path: Path, change: Any) -> Path:
    """An archive with its member of numbers stored in another way."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, contents in members.items():
            deflated, kept = change if name.endswith("data/0") else (False, None)
            kind = zipfile.ZIP_DEFLATED if deflated else zipfile.ZIP_STORED
            archive.writestr(name, contents[:kept], kind)
    return path


@pytest.mark.parametrize("change", [(True, None), (False, 64), (False, 0)])
def test_members_that_are_not_their_numbers_are_refused(tmp_path: Path, change: Any) -> None:
    save({"a": torch.ones(1000), "b": torch.ones(2000)}, tmp_path / "a.bin", old=False)
    assert rewritten(tmp_path / "a.bin", (False, None)) and read_bin(tmp_path / "a.bin")
    with pytest.raises(ValueError, match="a.bin is truncated or damaged: storage 0"):
        read_bin(rewritten(tmp_path / "a.bin", change))


RESIDENT = """
import re, sys
from pathlib import Path
from speculative_t5.checkpoints.torch_bin import read_bin
try:
    for tensor in read_bin(Path(sys.argv[1])).values():
        for block in tensor.blocks():
            block.max()
except ValueError as error:
    print(error, file=sys.stderr)
print(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
"""


def peak(path: Path) -> int:
    """Bytes of memory that reading a file takes at its peak, in a process of its own."""
    command = [sys.executable, "-c", RESIDENT, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=REPOSITORY)
    return int(done.stdout) * 1024


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("old", OLD)
def test_memory_is_bounded_whatever_the_files_size(tmp_path: Path, old: bool) -> None:
    """A file of 800 MB, in tensors of 40 MB."""
    small = save({"t": torch.zeros(10)}, tmp_path / "small.bin", old)
    large = save({f"t{i}": torch.zeros(10**7) for i in range(20)}, tmp_path / "large.bin", old)
    assert large.stat().st_size > 8e8
    assert peak(large) - peak(small) < 2 * 40e6 + 5e7
