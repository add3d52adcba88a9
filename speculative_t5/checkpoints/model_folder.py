"""Folders of models: found by name, opened, and written whole or not at all."""

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

from ..decoding import Constraints
from ..errors import read_json, refuse_pointer, rounded_down, rounded_up, shown
from ..files import replacing_folder
from ..models import (
    DRAFT_TYPE,
    QUANTIZATION_CONFIG,
    ModelConfig,
    T5Config,
    T5GemmaConfig,
    is_encoder_alone,
    is_t5gemma,
    read_size,
)
from ..tokenizers import (
    TOKENIZER_FILES,
    Tokenizer,
    TransformersTokenizer,
    has_tokenizer,
    load_tokenizer,
)
from .registered import Family, family_of
from .tensors import (
    GET_MODEL_AGAIN,
    Layout,
    NewTensor,
    StoredTensor,
    names_this_package,
    read_safetensors,
    write_npz,
    write_safetensors,
)

WEIGHTS_VARIABLE = "SPECULATIVE_T5_WEIGHTS"  # names the folder that comes before all others
PACKAGE_FOLDER = Path(__file__).parent.parent
CHECKOUT_FOLDER = (
    PACKAGE_FOLDER.parent if (PACKAGE_FOLDER.parent / "convert.py").is_file() else None
)
# Names of a Hugging Face checkpoint's weights, in order of preference.
WEIGHTS_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
ADAPTER_CONFIG = "adapter_config.json"  # of PEFT
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
# What PEFT saves of a model whose vocabulary was enlarged.
_ADAPTED_EMBEDDINGS = (".shared.weight", ".embed_tokens.weight")
GENERATION_CONFIG = "generation_config.json"
SMALL_FILES = ("config.json", GENERATION_CONFIG, *TOKENIZER_FILES, "tokenizer.model")
# Of sentence-transformers: the steps after an encoder, the most tokens of a text, and prompts.
MODULES_FILE = "modules.json"
LENGTH_FILE = "sentence_bert_config.json"
PROMPTS_FILE = "config_sentence_transformers.json"
FOLDER_IS_BUSY = (
    "another conversion is at work on it: wait for it to end, or choose another --output"
)
DIGEST_BLOCK, DIGEST_BLOCKS = 2**16, 64  # bytes, and how many of each file are read for a digest

Config = TypeVar("Config", T5Config, T5GemmaConfig)
Kind = Literal["t5", "t5-draft", "registered"]


@dataclass(frozen=True)
class ModelFolder:
    """A folder that holds a model, or a draft; its config.json is read once.

    With an adapter it stands for the model that the adapter makes of the one in the folder.
    """

    path: Path
    adapter: "ModelFolder | None" = None
    encoder_only: bool = False  # whether only the encoder is meant

    @cached_property
    def config(self) -> dict[str, Any]:
        """The object in config.json; anything else is refused."""
        path = self.path / "config.json"
        if path.is_file():
            return read_json(path, GET_MODEL_AGAIN)
        if self.is_adapter:
            raise ValueError(f"{self.path} is an adapter: convert it to a model first")
        raise ValueError(
            f"{self.path} is not a model folder: it has no config.json; give the folder that has it"
        )

    def setting(self, name: str) -> Any:
        """Return an entry of config.json; None where that cannot be read (`config` says why)."""
        try:
            return self.config.get(name)
        except (OSError, ValueError):
            return None

    @property
    def kind(self) -> Kind:
        """What it seems to hold: by default a T5, whose loader then judges it."""
        if self.setting("model_type") == DRAFT_TYPE:
            return "t5-draft"
        return "registered" if self.family else "t5"

    @cached_property
    def family(self) -> Family | None:
        """What reads it, if it is of another family that is registered."""
        try:
            config = self.config
        except (OSError, ValueError):
            return None  # `config` says why
        return family_of(config)

    @property
    def is_quantized(self) -> bool:
        """Whether config.json says that its matrices are of fewer bits."""
        return bool(self.setting("quantization") or self.setting(QUANTIZATION_CONFIG))

    @property
    def is_encoder(self) -> bool:
        """Whether there is no decoder in it, or none is meant."""
        return self.encoder_only or is_encoder_alone(self.config)

    @property
    def is_converted(self) -> bool:
        """Whether its weights are in this package's own form."""
        return (self.path / "weights.npz").is_file()

    @property
    def is_made_here(self) -> bool:
        """Whether this package has written its weights, in its own form or in safetensors."""
        shards = sorted(self.path.glob("model*.safetensors"))
        return self.is_converted or (bool(shards) and all(map(names_this_package, shards)))

    @property
    def is_adapter(self) -> bool:
        """Whether it holds what changes another model, and no model."""
        has_model = self.is_converted or (self.weights and self.weights.name in WEIGHTS_FILES)
        return not has_model and (self.path / ADAPTER_CONFIG).is_file()

    @property
    def prefix(self) -> str:
        """The text to put before each prompt, "" if none."""
        prefix = self.config.get("prefix") or ""
        if not isinstance(prefix, str):
            raise ValueError(
                f"prefix in {self.path / 'config.json'} is {prefix!r}, expected a string"
            )
        return prefix

    @property
    def trained_length(self) -> int | None:
        """The tokens of the longest sources that the model was trained on, if it says so."""
        name = "trained_length"
        return read_size(self.config, name) if name in self.config else None

    @property
    def corrects(self) -> list[str] | None:
        """The codes of the languages whose texts the model corrects, if it says so."""
        found = self.config.get("corrects")
        codes = found if isinstance(found, list) else []
        if found is not None and not (codes and all(isinstance(each, str) for each in codes)):
            raise ValueError(
                f"corrects in {self.path / 'config.json'} is {shown(found)}, expected a list of "
                "languages' codes, such as en"
            )
        return found

    @property
    def min_probability(self) -> float | None:
        """The least probability of a change that a rewritten text keeps; see `rewrite`."""
        found = self.config.get("min_probability")
        if found is not None and (type(found) not in (int, float) or not 0 <= found <= 1):
            raise ValueError(
                f"min_probability in {self.path / 'config.json'} is {shown(found)}, expected a "
                "number from 0 to 1"
            )
        return None if found is None else float(found)

    @property
    def draft(self) -> str | None:
        """The name of a draft that belongs to the model; never a path."""
        name = None if self.adapter else self.setting("draft")
        plain = isinstance(name, str) and name not in ("", "..") and name == Path(name).name
        return name if plain else None

    @property
    def origin(self) -> dict[str, Any]:
        """What the model was converted from, and how; {} if it does not say."""
        stored = self.setting("converted_from")
        return stored if isinstance(stored, dict) else {}

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        """The object in generation_config.json; {} without that file."""
        path = self.path / GENERATION_CONFIG
        return read_json(path, GET_MODEL_AGAIN) if path.is_file() else {}

    @property
    def ends(self) -> list[int]:
        """The ids that end an output, those in generation_config.json before config.json's."""
        return self._ids("eos_token_id") or self._ids("eos_token_id", "config.json")

    def check(self) -> None:
        """Refuse a model that cannot be loaded, as far as its config.json shows it."""
        if self.family:
            self.family.check(self)
        else:
            self.model_config()

    def model_config(self) -> ModelConfig:
        """Read the config of a T5 or T5Gemma; refuse other models.

        The ids in generation_config.json come before those in config.json, as in transformers.
        """
        config = self.config  # whose errors name the folder
        try:
            if is_t5gemma(config):
                ends = {"eos_token_id": self.ends} if self.ends else {}
                return self._as_meant(T5GemmaConfig.from_dict(config | ends))
            return self._as_meant(self._with_ids(T5Config.from_dict(config)))
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from error

    def _as_meant(self, config: Config) -> Config:
        """Return the config of the model, or of its encoder."""
        return replace(config, encoder_only=config.encoder_only or self.encoder_only)

    def _with_ids(self, config: T5Config) -> T5Config:
        """Return a T5's config with the ids that generation_config.json has."""
        found: dict[str, Any] = {}
        for name in ("decoder_start_token_id", "pad_token_id"):
            for each in self._ids(name)[:1]:
                if each >= config.vocab_size:
                    raise ValueError(
                        f"{name} in {GENERATION_CONFIG} is {each}, expected an id from 0 to "
                        f"{config.vocab_size - 1}"
                    )
                found[name] = each
        # What no row of the embedding stands for never ends an output.
        ends = [end for end in self._ids("eos_token_id") if end < config.vocab_size]
        if ends and self.config.get("eos_token_id") is None:
            found["eos_token_id"] = ends[0]
        if ends:
            is_usual = ends == [found.get("eos_token_id", config.eos_token_id)]
            found["end_ids"] = () if is_usual else tuple(dict.fromkeys(ends))
        return replace(config, **found)

    @property
    def constraints(self) -> Constraints:
        """What the checkpoint asks of all outputs; other options are for those who ask for them."""
        return self.constraints_below(self.new_vocab_size or self.model_config().vocab_size)

    def constraints_below(self, size: int) -> Constraints:
        """Return the same by ids below the size of a vocabulary."""
        file = GENERATION_CONFIG if self.generation_config else "config.json"
        forced, never, not_first = (
            tuple(each for each in self._ids(name, file) if each < size)
            for name in ("forced_bos_token_id", "suppress_tokens", "begin_suppress_tokens")
        )
        return Constraints(forced, never, not_first)

    def _ids(self, name: str, file: str = GENERATION_CONFIG) -> list[int]:
        """Return the ids that an entry of a JSON file names, one or several; [] if none."""
        stored = self.generation_config if file == GENERATION_CONFIG else self.config
        named = stored.get(name)
        ids = named if isinstance(named, list) else [] if named is None else [named]
        # Checked here, as a tokenizer would raise an obscure error for them.
        if not all(type(each) is int and each >= 0 for each in ids):
            raise ValueError(
                f"{name} in {self.path / file} is {shown(named)}, expected an id or several"
            )
        return ids

    @cached_property
    def new_vocab_size(self) -> int | None:
        """The rows of an embedding that an adapter brings in place of the model's; None if none."""
        if self.adapter is None:
            return None
        rows = {
            tensor.shape[0]
            for name, tensor in self.adapter.tensors().items()
            if name.endswith(_ADAPTED_EMBEDDINGS) and "lora_" not in name and len(tensor.shape) == 2
        }
        return max(rows, default=None)

    @property
    def tokenizer_path(self) -> Path:
        """The folder of the tokenizer's files: the adapter's, if it brings an embedding for it."""
        if self.adapter and self.new_vocab_size and has_tokenizer(self.adapter.path):
            return self.adapter.path
        return self.path

    def tokenizer(self) -> Tokenizer:
        """Load the tokenizer; a T5's is checked to fit it."""
        if self.family:
            return self.family.read_tokenizer(self)
        config = self.model_config()
        if isinstance(config, T5Config):
            rows = self.new_vocab_size or config.vocab_size
            return load_tokenizer(self.tokenizer_path, replace(config, vocab_size=rows))
        return TransformersTokenizer(self.tokenizer_path)

    @property
    def weights(self) -> Path | None:
        """The file of a Hugging Face checkpoint's weights, or their index, if there is one."""
        paths = (self.path / name for name in (*WEIGHTS_FILES, *ADAPTER_WEIGHTS))
        return next((path for path in paths if path.is_file()), None)

    def weight_files(self) -> list[Path]:
        """Return the files that hold a checkpoint's tensors; refuse a folder that lacks one."""
        path = self.weights
        if path is None:
            suffixes = (".safetensors", ".bin", ".npz", ".h5", ".msgpack", ".gguf", ".pt", ".ckpt")
            others = sorted(each.name for each in self.path.iterdir() if each.suffix in suffixes)
            expected = (
                ADAPTER_WEIGHTS[0]
                if self.is_adapter
                else "model.safetensors or pytorch_model.bin, "
                "or one of them in shards with its index.json"
            )
            raise ValueError(
                f"no weights in {self.path}: expected {expected}, found "
                f"{', '.join(others[:3]) or 'neither'}; download them, or save the model in that "
                "form"
            )
        refuse_pointer(path)
        if path.suffix != ".json":
            return [path]
        shards = [self.path / shard for shard in sorted({*read_index(path).values()})]
        for shard in shards:
            if not shard.is_file():
                raise ValueError(
                    f"{shard.name}, named by {path}, is missing: download it to that folder"
                )
            refuse_pointer(shard)
        return shards

    def tensors(self) -> dict[str, StoredTensor]:
        """Open all tensors of a Hugging Face checkpoint, by name; none is read yet."""
        read = {path.name: _read_tensors(path) for path in self.weight_files()}
        index = self.weights
        assert index is not None
        if index.suffix != ".json":
            return read[index.name]
        shards = read_index(index)
        for name, shard in shards.items():
            if name not in read[shard]:
                raise ValueError(
                    f"{index} says that {name} is in {shard}, which does not have it: "
                    "download both again"
                )
        return {name: read[shard][name] for name, shard in shards.items()}

    def digest(self) -> str:
        """Return a short hexadecimal digest of the small files and of samples of the weights.

        Training moves nearly all numbers, and so is seen; a few bytes changed by hand may not be.
        """
        digest = hashlib.sha256()
        changes = self.adapter.path.iterdir() if self.adapter else ()
        for path in (*sorted(self.path.iterdir()), *sorted(changes)):
            weights = path.suffix in (".safetensors", ".npz", ".bin")
            if path.is_file() and (weights or path.name in (ADAPTER_CONFIG, *SMALL_FILES)):
                with path.open("rb") as file:
                    size = os.fstat(file.fileno()).st_size
                    digest.update(f"{path.name} {size}\n".encode())
                    last = max(0, size - DIGEST_BLOCK)
                    for i in range(DIGEST_BLOCKS if last else 1):
                        file.seek(last * i // (DIGEST_BLOCKS - 1))
                        digest.update(file.read(DIGEST_BLOCK))
        return digest.hexdigest()[:16]


def read_index(path: Path) -> dict[str, str]:
    """Read the weight map of an index, names of tensors to names of files; refuse other paths."""
    shards = read_json(path, GET_MODEL_AGAIN).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise ValueError(
            f"{path} is not an index of shards, as it has no weight_map: download it again"
        )
    for shard in shards.values():
        if not isinstance(shard, str) or not re.fullmatch(r"\w[\w.-]{,254}", shard):
            raise ValueError(
                f"{path} names the shard {shown(shard)}, expected a file's name alone: "
                "put the shards beside it, and name them so"
            )
    return shards


def weights_folders() -> list[Path]:
    """Return where names are looked up: `WEIGHTS_VARIABLE`, ./weights, the user's, the shipped."""
    named = os.environ.get(WEIGHTS_VARIABLE)
    shipped = (CHECKOUT_FOLDER or PACKAGE_FOLDER) / "weights"
    folders = (Path(named) if named else None, Path("weights"), _users_folder(), shipped)
    return [folder for folder in folders if folder]


def new_folder(name: str) -> Path:
    """Return where a model of that name is written: in the first of `weights_folders` there is."""
    if named := os.environ.get(WEIGHTS_VARIABLE):
        return Path(named) / name
    here = Path("weights")
    return (here if here.is_dir() else _users_folder() or here) / name


def name_of_folder(folder: Path) -> str:
    """Return the name of a model in an absolute path: that of its folder.

    Every run of transformers' Trainer has a checkpoint-500, so there the run's folder comes first.
    """
    of_a_run = re.fullmatch(r"checkpoint-\d+", folder.name) and folder.parent.name
    return f"{folder.parent.name}-{folder.name}" if of_a_run else folder.name


def model_name(model: str | Path) -> str:
    """Return the name of a model for people and clients, who need not see where it lies."""
    return Path(model).resolve().name if Path(model).is_dir() else str(model)


def _read_tensors(path: Path) -> dict[str, StoredTensor]:
    """Open the tensors of a file, by name."""
    if path.suffix != ".bin":
        return read_safetensors(path)
    from .torch_bin import read_bin  # with tables of what pickles may hold

    return read_bin(path)


def _users_folder() -> Path | None:
    """Return the user's own folder; None for a user without a home, as in some containers."""
    import platformdirs  # takes as long as a room of the package

    try:
        return platformdirs.user_data_path("speculative_t5", appauthor=False) / "weights"
    except RuntimeError:
        return None


def model_folders() -> list[Path]:
    """Return all model folders in `weights_folders`."""
    found: dict[Path, Path] = {}
    for weights in weights_folders():
        # The home of another user, as in some containers, cannot be read.
        with contextlib.suppress(PermissionError):
            configs = (*weights.glob("*/config.json"), *weights.glob(f"*/{ADAPTER_CONFIG}"))
            for path in sorted({config.parent for config in configs}):
                folder = ModelFolder(path)
                if folder.is_converted or folder.weights:
                    found.setdefault(path.resolve(), path)
    return list(found.values())


def find_folder(name_or_path: str | Path) -> Path | None:
    """Return the model folder with that path, or that name in `weights_folders`, if any."""
    path, found = Path(name_or_path), model_folders()
    candidates = {weights / name_or_path for weights in weights_folders()}
    named = next((folder for folder in found if folder in candidates), None)
    # A checkpoint may lie beside weights/ under the name of its conversion, which then wins.
    if path.is_dir() and (ModelFolder(path).is_converted or not named):
        return path
    name, models = str(name_or_path), map(ModelFolder, found)
    # An encoder alone is not what its repository holds.
    made = (m for m in models if m.origin.get("repository") == name and not m.is_encoder)
    return named or next((m.path for m in made), None)


def named_draft(folder: ModelFolder) -> Path | None:
    """Find the draft that a target's config.json names, beside the target or by name, if any."""
    if folder.draft is None:
        return None
    beside = folder.path.resolve().parent / folder.draft
    return beside if beside.is_dir() else find_folder(folder.draft)


def how_to_convert() -> str:
    """Return the command that converts a model, as the user would type it here."""
    program = "python convert.py" if CHECKOUT_FOLDER else "speculative-t5 convert"
    return f"{program} --model NAME_OR_PATH"


def check_model_replaceable(folder: Path) -> None:
    """Refuse to write where there is anything but a model folder."""
    if folder.resolve() == Path.cwd():
        raise ValueError(f"{folder} is the current folder: choose another --output")
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not ModelFolder(folder).is_made_here:
        raise ValueError(f"{folder} exists and is not a converted model: choose another --output")
    if others := sorted(path.name for path in folder.iterdir() if path.is_dir()):
        raise ValueError(f"{folder} also holds {others[0]}: choose another --output")


def write_folder(
    folder: Path,
    config: dict[str, Any],
    tensors: Iterable[NewTensor],
    tokenizer_files: Iterable[Path],
    *,
    num_bytes: int = 0,
    layout: Layout | None = None,
    card: str | None = None,
) -> None:
    """Write a model folder, whole or not at all, its tensors made and stored one at a time.

    Nothing is written where fewer than `num_bytes` are free, or over anything but a model folder.
    With a `layout` weights are safetensors, else a .npz file; a `card` becomes README.md.
    """
    check_model_replaceable(folder)
    with replacing_folder(folder, FOLDER_IS_BUSY) as new:
        free = shutil.disk_usage(new).free
        if free < num_bytes:
            needed, left = rounded_up(num_bytes / 1e9, 2), rounded_down(free / 1e9, 2)
            lack = f"it takes {needed} GB, and {left} GB are free"
            advice = "free some, or choose another --output"
            raise OSError(errno.ENOSPC, f"No space left on device: {lack}; {advice}")
        if layout is None:
            write_npz(new / "weights.npz", tensors)
        else:
            write_safetensors(new, layout, tensors)
        if card is not None:
            (new / "README.md").write_text(card, encoding="utf-8")
        for path in tokenizer_files:
            shutil.copyfile(path, new / path.name)
        text = json.dumps(config, indent=2) + "\n"
        (new / "config.json").write_text(text, encoding="utf-8")
