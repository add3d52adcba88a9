"""Downloads, from a local server in the place of the Hub."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from speculative_t5 import load
from speculative_t5.checkpoints import hub as hub_module
from speculative_t5.checkpoints.hub import Repository, download, flat_name

import numpy as np
import pytest
from checkpoints import write_causal
from conftest import REPOSITORY, edit_json
from families import write_family
from local_hub import COMMIT, Hub
from messages import check_message


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    hub = Hub(tmp_path / "hub")
    write_family(hub.root / "someone" / "tiny-t5", "flan_t5", "shards")
    yield hub
    hub.server.shutdown()
    hub.server.server_close()


def convert_py(
    hub: Hub, *arguments: str, model: str = "someone/tiny-t5", **environment: str
) -> subprocess.CompletedProcess[str]:
    cwd = hub.root.parent
    (cwd / "weights").mkdir(exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return subprocess.run(
        [sys.executable, REPOSITORY / "convert.py", "--model", model, *arguments],
        cwd=cwd,
        env=kept
        | {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(cwd / "home"), "HF_HUB_DISABLE_XET": "1"}
        | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def refusal(done: subprocess.CompletedProcess[str]) -> str:
    """The one line that a refused conversion prints."""
    lines = done.stderr.splitlines()
    assert done.returncode == 2 and not done.stdout, done
    assert len(lines) == 1 and lines[0].startswith("error: "), done.stderr
    check_message(lines[0].removeprefix("error: "))
    return lines[0]


def test_a_name_is_downloaded_once_and_converted_to_a_flat_folder(hub: Hub) -> None:
    folder = hub.root / "someone" / "tiny-t5"
    for unneeded in ("tf_model.h5", "pytorch_model.bin", "tokenizer.json", "README.md"):
        (folder / unneeded).write_text("not needed")
    done = convert_py(hub)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("weights/tiny-t5 (")
    shards = sorted(path.name for path in folder.glob("model-*.safetensors"))
    assert len(shards) > 1
    wanted = ["config.json", "model.safetensors.index.json", "spiece.model", *shards]
    assert hub.downloads() == sorted(wanted)

    made = json.loads((hub.root.parent / "weights/tiny-t5/config.json").read_text())
    assert made["converted_from"]["repository"] == "someone/tiny-t5"
    assert made["converted_from"]["commit"] == COMMIT

    hub.requests.clear()
    again = convert_py(hub)
    assert again.returncode == 0 and "is there already, of someone/tiny-t5" in again.stderr
    assert hub.requests == []
    other = convert_py(hub, "--dtype", "float16")
    assert "weights/tiny-t5 exists: use --force to replace it" in refusal(other)
    forced = convert_py(hub, "--dtype", "float16", "--force")
    assert forced.returncode == 0
    assert hub.downloads() == []  # the cache has it


def test_the_cache_serves_without_a_connection(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "not in the cache" in refusal(convert_py(hub, HF_HUB_OFFLINE="1"))
    assert hub.requests == []
    assert convert_py(hub, "--output", "first").returncode == 0
    hub.requests.clear()
    offline = convert_py(hub, "--output", "second", HF_HUB_OFFLINE="1")
    assert offline.returncode == 0, offline.stderr
    assert hub.requests == []
    unreachable = convert_py(hub, "--output", "third", HF_ENDPOINT="http://127.0.0.1:9")
    assert unreachable.returncode == 0, unreachable.stderr
    assert not unreachable.stderr
    shutil.rmtree(hub.root.parent / "home")
    monkeypatch.chdir(hub.root.parent)
    stored = [np.load(f"{name}/weights.npz")["encoder.norm.weight"] for name in ("first", "third")]
    assert (stored[0] == stored[1]).all()
    (hub.root.parent / "second").rename("weights/another-name")
    assert load("someone/tiny-t5")  # found by what it was converted from


def test_nothing_of_the_weights_is_downloaded_for_what_is_refused(hub: Hub) -> None:
    folder = hub.root / "someone" / "tiny-t5"
    edit_json(folder / "config.json", model_type="longt5")
    assert "this is a longt5 (model_type in config.json)" in refusal(convert_py(hub))
    assert hub.downloads() == ["config.json"]
    edit_json(folder / "config.json", model_type="t5", architectures=["T5EncoderModel"])
    assert "this is a T5EncoderModel" in refusal(convert_py(hub, HF_HOME="home2"))
    edit_json(folder / "config.json", architectures=None)
    (folder / "spiece.model").unlink()
    assert "no tokenizer in" in refusal(convert_py(hub, HF_HOME="home3"))
    assert not [name for name in hub.downloads() if "safetensors" in name]
    assert not any((hub.root.parent / "weights").iterdir())


def test_inspecting_a_name_downloads_no_weights(hub: Hub) -> None:
    done = convert_py(hub, "--inspect")
    assert done.returncode == 0, done.stderr
    assert "T5 v1.1" in done.stdout and "by config.json alone" in done.stdout
    assert hub.downloads() == ["config.json", "spiece.model"]


def test_a_damaged_shard_is_named(hub: Hub) -> None:
    shard = sorted((hub.root / "someone" / "tiny-t5").glob("model-*"))[1].name
    hub.wrong_digest.add(shard)
    message = refusal(convert_py(hub))
    assert f"{shard} from the Hub is damaged: its SHA-256 is" in message
    assert "expected 000000000000..." in message
    assert not any((hub.root.parent / "weights").iterdir())


def test_what_cannot_be_had_gives_one_line(hub: Hub) -> None:
    assert "no such repository on the Hub" in refusal(convert_py(hub, model="someone/else"))
    assert "has no revision 'v2'" in refusal(convert_py(hub, "--revision", "v2"))
    folder = hub.root / "someone" / "tiny-t5"
    for path in folder.glob("model*"):
        path.unlink()
    (folder / "flax_model.msgpack").write_text("")
    assert "no weights that can be read" in refusal(convert_py(hub))
    assert "found flax_model.msgpack" in refusal(convert_py(hub, HF_HOME="home2"))
    (folder / "config.json").unlink()
    assert "has no config.json" in refusal(convert_py(hub, HF_HOME="home3"))


def loaded(hub: Hub, *names: str, **environment: str) -> list[str]:
    """What a process prints that loads names and generates two tokens with each, or its errors."""
    code = (
        "from speculative_t5 import SpeculativeDecoder, load\n"
        f"for name in {names!r}:\n"
        "    try:\n"
        "        model, tokenizer = load(name)\n"
        "        out = SpeculativeDecoder(model, None, tokenizer).generate('He go', max_tokens=2)\n"
        "        print(out.stats.emitted, model.eos_token_ids)\n"
        "    except ValueError as error:\n"
        "        print(f'error: {error}')\n"
    )
    home = {"HF_HOME": str(hub.root.parent / "home"), "HF_HUB_DISABLE_XET": "1"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    kept |= {"PYTHONPATH": str(REPOSITORY), "HF_ENDPOINT": hub.endpoint} | home | environment
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=hub.root.parent, env=kept, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert "Warning" not in done.stderr
    return done.stdout.splitlines()


def test_models_are_loaded_by_name(hub: Hub) -> None:
    folder = hub.root / "someone" / "tiny-qwen3"
    write_causal(folder)
    edit_json(folder / "generation_config.json", eos_token_id=[0, 7])
    for unneeded in ("tf_model.h5", "pytorch_model.bin", "README.md", "evil.py"):
        (folder / unneeded).write_text("not needed")
    found = loaded(hub, "someone/tiny-qwen3", "someone/else", "../else")
    assert found[0] == "2 frozenset({0, 7})"
    assert hub.downloads() == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    ]  # fmt: skip
    for message, told in zip(found[1:], ("'someone/else'", "'../else'"), strict=True):
        check_message(message.removeprefix("error: "), told)
        assert "(found: correct-base, correct-small" in message
    assert "no such repository" in found[1]

    hub.requests.clear()
    again = loaded(hub, "someone/tiny-qwen3", "someone/tiny-t5")
    assert again[0] == "2 frozenset({0, 7})" and again[1].startswith("2 ")
    assert not (hub.root.parent / "weights").exists()
    # The cache has the first whole; transformers may ask for what is about no model.
    assert not [request for request in hub.requests if "tiny-qwen3" in request]
    assert [request for request in hub.requests if "tiny-t5" in request]
    refused = refusal(convert_py(hub, model="someone/tiny-qwen3"))
    assert "this is a qwen3 (model_type in config.json), which takes no conversion" in refused


def test_a_cache_without_the_tokenizer_is_completed(hub: Hub) -> None:
    write_causal(hub.root / "someone" / "tiny-qwen3")
    assert loaded(hub, "someone/tiny-qwen3")[0].startswith("2 ")
    (cached,) = (hub.root.parent / "home").rglob("tokenizer.json")
    cached.unlink()
    (message,) = loaded(hub, "someone/tiny-qwen3", HF_ENDPOINT="http://127.0.0.1:9")
    check_message(message.removeprefix("error: "), "someone--tiny-qwen3")
    assert loaded(hub, "someone/tiny-qwen3")[0].startswith("2 ")


@pytest.mark.parametrize(
    "name",
    ["./missing", "/missing/model", "a/b/c", "../up", "a/..", "..", "~/x", "a/.hidden", "a//b"],
)
def test_names_that_lead_elsewhere_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="no checkpoint folder"):
        flat_name(name)


def test_names_map_to_one_flat_folder() -> None:
    assert flat_name("google/flan-t5-small") == "flan-t5-small"
    assert flat_name("t5-11b") == "t5-11b"


def test_a_long_comparison_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_family(tmp_path, "t5")
    monkeypatch.setattr(hub_module, "SILENT_BYTES", 10)
    told: list[str] = []
    found = Repository("t5", tmp_path, COMMIT, None)
    assert download(found, note=told.append) == tmp_path
    assert told == ["comparing 0.0 GB with the Hub's SHA-256"]
