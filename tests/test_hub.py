"""Downloads, from a local server that stands for the Hub."""

import errno
import shutil
import traceback
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

from speculative_t5 import SpeculativeDecoder, load
from speculative_t5.checkpoints import (
    Download,
    ModelFolder,
    announce_downloads,
    convert,
    inspect,
)
from speculative_t5.checkpoints import hub as hub_module
from speculative_t5.checkpoints.hub import flat_name
from speculative_t5.models import TextEncoder

import pytest
from checkpoints import refused
from commands import Call, Terminal
from conftest import edit_json
from families import write_family, write_gemma
from huggingface_hub import constants
from local_hub import COMMIT, Hub, use

NAME = "someone/tiny-t5"


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("originals")
    write_family(root / "tiny-t5", "flan_t5", "shards")
    write_gemma(root / "tiny-gemma", 2)
    return root


@pytest.fixture
def hub(tmp_path: Path, originals: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The Hub, with two repositories; the current folder has an empty weights/."""
    hub = Hub(tmp_path / "hub")
    monkeypatch.setattr(hub_module, "_announce", hub_module._warn)  # as before any command
    shutil.copytree(originals, hub.root / "someone")
    use(monkeypatch, hub.endpoint, cache=tmp_path / "cache")
    (tmp_path / "here" / "weights").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    yield hub
    hub.server.shutdown()
    hub.server.server_close()


def test_a_name_is_downloaded_once_and_converted_to_a_flat_folder(hub: Hub) -> None:
    folder = hub.root / "someone" / "tiny-t5"
    for unneeded in ("tf_model.h5", "pytorch_model.bin", "README.md"):
        (folder / unneeded).write_text("not needed")
    assert convert(NAME) == Path("weights/tiny-t5")
    shards = sorted(path.name for path in folder.glob("model-*.safetensors"))
    assert len(shards) > 1
    wanted = ["config.json", "generation_config.json", "spiece.model", *shards]
    wanted.append("model.safetensors.index.json")
    assert hub.downloads() == sorted(wanted)
    made = ModelFolder(Path("weights/tiny-t5")).origin
    assert (made["repository"], made["commit"]) == (NAME, COMMIT)
    hub.requests.clear()
    note = Mock()
    assert convert(NAME, note=note) == Path("weights/tiny-t5")
    line = f"weights/tiny-t5 exists already, made from {NAME}; --force converts it again"
    note.assert_called_once_with(line)
    with refused("weights/tiny-t5 exists: use --force to replace it"):
        convert(NAME, dtype="float16")
    assert hub.requests == []
    convert(NAME, dtype="float16", force=True)
    assert hub.downloads() == [], "the cache has it"


def test_a_tokenizer_json_is_downloaded_in_place_of_other_pieces(hub: Hub) -> None:
    from transformers import T5Tokenizer

    folder = hub.root / "someone" / "tiny-t5"
    tokenizer = T5Tokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(folder)
    convert(NAME)
    assert "tokenizer.json" in hub.downloads() and "spiece.model" not in hub.downloads()
    _, ours = load(NAME)
    assert ours is not None and ours.encode("a <new>") == tokenizer("a <new>").input_ids


def test_the_cache_serves_without_a_connection(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with refused("not in the Hub.s cache"):
        convert(NAME)
    assert hub.requests == []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    convert(NAME, Path("first"))
    hub.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    convert(NAME, Path("weights/another-name"))
    assert hub.requests == []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    use(monkeypatch, "http://127.0.0.1:9")
    convert(NAME, Path("third"))
    shutil.rmtree(hub.root.parent / "cache")
    assert load(NAME), "found by what it was converted from"


def test_refused_weights_are_not_downloaded(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = hub.root / "someone" / "tiny-t5"
    with refused("no matrix can be quantized in groups of 64"):
        convert(NAME, quantize=8)
    edit_json(folder / "config.json", model_type="longt5")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", "cache2")
    hub.requests.clear()
    with refused("this is a longt5 .model_type in config.json"):
        convert(NAME)
    assert hub.downloads() == ["config.json"]
    edit_json(folder / "config.json", model_type="t5")
    (folder / "spiece.model").unlink()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", "cache3")
    with refused("no tokenizer in"):
        convert(NAME)
    path = hub.root / "someone" / "tiny-gemma" / "config.json"
    edit_json(path, model_type="qwen3", is_encoder_decoder=False)
    with refused("this is a qwen3 .model_type in config.json.*: use it as it is"):
        convert("someone/tiny-gemma")
    edit_json(path, model_type="longt6")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", "cache4")
    for run in (convert, load):
        with refused("this is a longt6 .model_type in config.json"):
            run("someone/tiny-gemma")
    assert not [name for name in hub.downloads() if "safetensors" in name]
    assert not any(Path("weights").iterdir())


SHARD = "model-00001-of-{:05}.safetensors"


@pytest.fixture
def large(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """The Hub claims 11.4 GB for the first shard; 20 GB are free."""
    shards = len([*(hub.root / NAME).glob("model-*")])
    hub.sizes[SHARD.format(shards)] = 11_400_000_000
    usage = shutil.disk_usage(hub.root)._replace(free=20_000_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    return hub


SAID = f"{NAME} is to be downloaded: 11.4 GB, and 20.0 GB are free in "


def test_the_size_of_a_large_download_is_said_first(large: Hub, tmp_path: Path) -> None:
    def noted(found: Download) -> None:
        assert str(found) == f"{SAID}{tmp_path / 'cache'}"
        assert not [name for name in large.downloads() if name.endswith("safetensors")]
        raise InterruptedError

    with pytest.warns(UserWarning, match=SAID):
        load(NAME)
    assert load(NAME), "from the cache, without a word"
    shutil.rmtree(tmp_path / "cache")
    large.requests.clear()
    announce_downloads(noted)
    for run in (load, convert):
        with pytest.raises(InterruptedError):
            run(NAME)
    large.sizes.clear()
    assert load(NAME), "a small model needs no word"


def test_what_the_disk_has_no_room_for_is_not_downloaded(large: Hub) -> None:
    large.sizes[next(iter(large.sizes))] *= 2
    lack = r"22\.8 GB, and 20\.0 GB are free in .*; free some"
    for run in (load, convert):
        with pytest.raises(OSError, match=lack) as left:
            run(NAME)
        assert left.value.errno == errno.ENOSPC
    assert not [name for name in large.downloads() if name.endswith("safetensors")]
    large.sizes.clear()
    assert load(NAME)


def test_a_command_says_the_size_and_asks_a_person(hub: Hub, call: Call, tmp_path: Path) -> None:
    shards = len([*(hub.root / NAME).glob("model-*")])
    hub.sizes[SHARD.format(shards)] = 1_500_000_000
    arguments = ("--model", NAME, "--prompt", "a", "--max-tokens", "2")
    environment = {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HUB_CACHE": str(tmp_path / "cache"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
    }
    said = f"{NAME} is to be downloaded: 1.5 GB, and "
    for answer, code in (("n\n", 1), ("maybe\n", 1), ("\x04", 1), ("y\n", 0), (None, 0)):
        person = Terminal(tmp_path, "-m", "speculative_t5", *arguments, environment=environment)
        if answer is None:  # it is in the cache
            assert said not in person.rest(code)
            break
        assert said in person.type("", "Download it? [Y/n] ")
        shown = person.type(answer, "\n") + person.rest(code)
        assert ("nothing was downloaded" in shown) == bool(code)
    shutil.rmtree(tmp_path / "cache")
    done = call(*arguments)
    assert done.code == 0 and any(said in line for line in done.err)


def test_inspecting_takes_no_weights(hub: Hub) -> None:
    found = inspect(NAME)
    assert found.family.startswith("T5 v1.1") and not found.stored
    assert hub.downloads() == ["config.json", "generation_config.json", "spiece.model"]


def test_missing_things_are_named(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with refused("no such repository on the Hub"):
        convert("someone/else")
    with refused("has no revision 'v2'"):
        convert(NAME, revision="v2")
    folder = hub.root / "someone" / "tiny-t5"
    for path in folder.glob("model*"):
        path.unlink()
    (folder / "flax_model.msgpack").write_text("")
    with refused("no weights that can be read.*found flax_model.msgpack"):
        convert(NAME)
    (folder / "config.json").unlink()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", "cache2")
    with refused("has no config.json"):
        convert(NAME)
    use(monkeypatch, "http://127.0.0.1:9")
    with refused("^there is no folder .someone/other., it is not in the Hub.s cache"):
        convert("someone/other")


def test_an_error_shows_the_hubs_own_only_where_that_says_more(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shown(name: str) -> str:
        with pytest.raises(ValueError) as raised:
            load(name)
        return "".join(traceback.format_exception(raised.value))

    names = ["someone/else", "no/name/at/all", "not-here"]
    found = [shown(name) for name in names]
    with monkeypatch.context() as odd:
        odd.setattr(hub_module, "_list_files", Mock(side_effect=RuntimeError("something odd")))
        assert "RuntimeError: something odd" in shown("someone/tiny-gemma")
    use(monkeypatch, "http://127.0.0.1:9")
    for text in (*found, shown("someone/else")):
        assert text.count("Traceback") == 1 and "no model on this machine is named" in text


def test_models_are_loaded_by_name(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = hub.root / "someone" / "tiny-gemma"
    edit_json(folder / "generation_config.json", eos_token_id=[0, 7])
    (folder / "evil.py").write_text("not needed")
    assert load("someone/tiny-gemma")[0].info.eos_token_ids == {0, 7}
    assert hub.downloads() == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    with refused(
        "no model on this machine .* .found: correct-base, correct-draft, .*no such repo",
        "'someone/els",
    ):
        load("someone/else")
    with refused("no model on this machine .* .found: correct-base, correct-draft", "'../else'"):
        load("../else")
    hub.requests.clear()
    model, tokenizer = load("someone/tiny-gemma")
    assert SpeculativeDecoder(model, None, tokenizer).generate("He go", max_tokens=2).tokens
    assert not hub.requests, "the cache has it whole"
    assert load(NAME) and hub.requests and not any(Path("weights").iterdir())
    (cached,) = (hub.root.parent / "cache").rglob("tokenizer_config.json")
    (cached.parent / "tokenizer.json").unlink()
    with monkeypatch.context() as unreachable:
        use(unreachable, "http://127.0.0.1:9")
        with refused("no tokenizer in", "someone--tiny-gemma"):
            load("someone/tiny-gemma")
    assert load("someone/tiny-gemma"), "completed"


def test_names_become_one_flat_folder_or_are_refused() -> None:
    assert (flat_name("google/flan-t5-small"), flat_name("t5-11b")) == ("flan-t5-small", "t5-11b")
    impossible = "./missing /missing/model a/b/c ../up a/.. .. ~/x a/.hidden a//b a--b x.git b-"
    for name in impossible.split():
        with refused("is neither a folder here nor", name):
            flat_name(name)


def test_a_folder_is_uploaded_and_found_by_its_name(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "token")
    Path("token").write_text("hf_of_a_test")
    options = ("--dtype", "bfloat16")
    done = call("convert", NAME, "-o", "new", "--upload-repo", "me/tiny-t5-bf16", *options)
    assert done.code == 0 and done.err[-1] == f"uploaded to {hub.endpoint}/me/tiny-t5-bf16"
    there = hub.root / "me" / "tiny-t5-bf16"
    names = sorted(path.name for path in there.iterdir())
    assert names == sorted(path.name for path in Path("new").iterdir())
    assert {"README.md", "config.json", "model.safetensors"} < {*names}
    (card,) = {*hub.cards}
    assert f'base_model: "{NAME}"' in card and "# me/tiny-t5-bf16" in card
    ours, theirs = load("new")[0], load("me/tiny-t5-bf16")[0]
    assert ours.fingerprint == theirs.fingerprint
    # Asked again with the same options it is not converted again, and uploaded.
    done = call("convert", NAME, "-o", "new", "--upload-repo", "me/other", *options)
    assert done.code == 0 and "exists already" in done.err[-2]
    assert (hub.root / "me" / "other" / "config.json").is_file()


def test_an_upload_that_cannot_be_is_refused_in_a_line(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("me", "me/a--b", "me/x.git", "a b/c", "a/b/c", ""):
        with refused("cannot be a repository on the Hub: give", name):
            convert(NAME, Path("new"), upload_repo=name)
    with refused("format is npz, and what is uploaded is safetensors: leave it out"):
        convert(NAME, Path("new"), upload_repo="me/x", format="npz")
    assert not Path("new").exists()
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "none")
    with refused("run hf auth login"):
        convert(NAME, Path("new"), upload_repo="me/x")
    assert load("new")  # stays, and is uploaded next time


def test_an_encoder_that_was_made_of_a_repository_is_not_taken_for_it(hub: Hub) -> None:
    made = convert(NAME, encoder_only=True)
    assert made == Path("weights/tiny-t5") and isinstance(load(made)[0], TextEncoder)
    assert convert(NAME, encoder_only=True) == made  # again, as it is
    with refused("weights/tiny-t5 exists: use --force to replace it"):
        convert(NAME)
    whole, _ = load(NAME)
    assert not isinstance(whole, TextEncoder)
    convert(NAME, Path("weights/whole"))
    with refused("weights/whole exists: use --force to replace it"):
        convert(NAME, Path("weights/whole"), encoder_only=True)
