"""Damaged files are read or refused in one line; nothing else is raised, and nothing crashes."""

import faulthandler
import json
import random
import resource
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from speculative_t5.checkpoints import locate, open_checkpoint
from speculative_t5.checkpoints.conversion import convert
from speculative_t5.tokenizers import TransformersTokenizer, load_tokenizer

import pytest
from checkpoints import END, opened
from checkpoints import write_tokenizer as write_bpe
from conftest import edit_json
from families import write_adapter, write_family, write_gemma
from messages import complaint


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small checkpoints in every format."""
    root = tmp_path_factory.mktemp("originals")
    for form in ("safetensors", "bin", "old_bin"):
        write_family(root / form, "t5", form)
    convert(str(root / "safetensors"), root / "npz")
    write_family(root / "bpe", "codet5", "safetensors")
    base = root / "lora" / "base"
    write_adapter(root / "lora", write_gemma(base, 2), base, target_modules=["q_proj"])
    edit_json(root / "lora" / "adapter_config.json", base_model_name_or_path=None)
    write_gemma(root / "gemma", 1)
    (root / "json").mkdir()
    write_bpe(root / "json")
    (root / "json" / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    return root


def open_t5(folder: Path) -> None:
    checkpoint = opened(folder)
    for tensor in checkpoint.tensors.values():
        list(tensor.blocks())


def open_merged(folder: Path) -> None:
    checkpoint = open_checkpoint(locate(folder / "base", folder))
    for tensor in checkpoint.tensors.values():
        list(tensor.blocks())


def open_tokenizer(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode("He goes home, <extra_id_0> Ünder.")
    tokenizer.decode([i for i in ids if 0 <= i < tokenizer.vocabulary.size])


def open_gemma_tokenizer(folder: Path) -> None:
    tokenizer = TransformersTokenizer(folder)
    tokenizer.decode(tokenizer.encode("He goes home."))


def damaged(content: bytes, rng: random.Random) -> bytes:
    """Return the contents with some bytes changed, cut off, or copied over others."""
    changed = bytearray(content)
    for _ in range(rng.randint(1, 3)):
        # Headers are at the start, and the directories of archives at the end.
        reach = min(len(changed), rng.choice((16, 400, 10**9)))
        i = rng.randrange(reach) if rng.random() < 0.6 else len(changed) - 1 - rng.randrange(reach)
        match rng.randrange(5):
            case 0:
                changed[i] ^= 1 << rng.randrange(8)
            case 1:
                changed[i] = rng.choice(b'\x00\x01\x7f\x80\xff09-"{}[],.eN')
            case 2:
                value = rng.choice((0, 1, 2**16 - 1, 2**31 - 1, 2**32 - 1, 2**63, 2**64 - 1))
                width = rng.choice((2, 4, 8))
                changed[i : i + width] = (value % 256**width).to_bytes(width, "little")
            case 3 if len(changed) > 1:
                del changed[max(1, i) :]
            case _:
                other, length = rng.randrange(len(changed)), rng.randint(1, 40)
                changed[i : i + length] = changed[other : other + length]
    return bytes(changed)


CASES: dict[str, tuple[Callable[[Path], None], int]] = {
    "npz/weights.npz": (open_t5, 40),
    "safetensors/model.safetensors": (open_t5, 40),
    "safetensors/config.json": (open_t5, 30),
    "bin/pytorch_model.bin": (open_t5, 90),
    "old_bin/pytorch_model.bin": (open_t5, 90),
    "gemma/model.safetensors": (open_t5, 40),
    "gemma/config.json": (open_t5, 60),
    "lora/base/config.json": (open_merged, 60),
    "lora/adapter_config.json": (open_merged, 60),
    "lora/adapter_model.safetensors": (open_merged, 40),
    "npz/spiece.model": (open_tokenizer, 40),
    "json/tokenizer.json": (open_tokenizer, 60),
    "bpe/vocab.json": (open_tokenizer, 30),
    "bpe/merges.txt": (open_tokenizer, 30),
    "bpe/tokenizer_config.json": (open_tokenizer, 30),
    "gemma/tokenizer.json": (open_gemma_tokenizer, 20),
}


@pytest.mark.parametrize("case", CASES)
def test_damaged_files_are_read_or_refused(case: str, originals: Path, tmp_path: Path) -> None:
    opened, count = CASES[case]
    name, _, file = case.partition("/")
    folder = Path(shutil.copytree(originals / name, tmp_path / "copy"))
    path = folder / file
    content = path.read_bytes()
    opened(folder)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    faulthandler.dump_traceback_later(120, exit=True)  # a library's loop could not be interrupted
    for seed in range(count):
        path.unlink()  # arrays may still be mapped to it
        path.write_bytes(damaged(content, random.Random(f"{case} {seed}")))
        try:
            opened(folder)
        except (ValueError, OSError) as error:
            assert complaint(str(error)) is None, f"seed {seed}: {error}"
            assert len(str(error)) < 1000
    faulthandler.cancel_dump_traceback_later()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown * (1024 if sys.platform.startswith("linux") else 1) < 3e8
