"""Folders with tokenizers as people save them, drawn by a seed, and transformers' word on each."""

import json
import random
import shutil
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from speculative_t5.tokenizers import Detokenizer, load_tokenizer, pieces

from checkpoints import refused
from families import TEXT, train_spiece

KINDS = ("t5", "byt5", "roberta", "gpt2", "bert", "other")
FORMS = ("by_hand", "by_hand_old", "saved", "saved_and_listed", "json_without_added")
CLASSES = {
    "t5": ("T5Tokenizer", "T5TokenizerFast"),
    "byt5": ("ByT5Tokenizer",),
    "roberta": ("RobertaTokenizer", "RobertaTokenizerFast", "BartTokenizer"),
    "gpt2": ("GPT2Tokenizer", "GPT2TokenizerFast"),
    "bert": ("BertTokenizer", "BertTokenizerFast"),
    "other": ("PreTrainedTokenizerFast", "TokenizersBackend"),
}
NEW = ("<new>", "<2en>", "[EVENT]", "\n", "{", "<", "cat", "the dog", "École", "<sep>", "##x", "  ")
FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")
# What people's files have, and transformers 5 does not heed for these classes.
IGNORED = {
    "legacy": False,
    "sp_model_kwargs": {},
    "model_max_length": 7,
    "padding_side": "left",
    "truncation_side": "left",
    "keep_accents": True,
    "do_basic_tokenize": False,
    "trim_offsets": False,
    "name_or_path": "a/b",
    "use_fast": False,
    "errors": "strict",
}
CONTROL = ["<pad>", "<s>", "</s>", "<unk>", "<mask>"]
PARTS = (
    *TEXT[:6],
    *NEW,
    *CONTROL,
    "[CLS]",
    "[SEP]",
    "[UNK]",
    " ",
    "  ",
    "\t",
    "\n\n",
    ".",
    " ,",
    " n't",
    "cats",
    "Cat",
    "catalog",
    "ÉCOLE",
    "école",
    "<NEW>",
    "<extra_id_0>",
    "<extra_id_3>",
    "你好 吗",
    "don't",
    "a<5",
    "f(x){ y }",
    "\u2581a",
    "e\u0301",
    "😀",
    "'s",
)


@dataclass
class Drawn:
    """A folder, and what was drawn for it."""

    folder: Path
    kind: str
    form: str
    added: list[dict[str, Any]] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)


@cache
def spiece_bytes() -> bytes:
    return train_spiece(pad_id=0, eos_id=1, unk_id=2, bos_id=-1)


@cache
def bpe_files() -> tuple[str, str]:
    """The vocab.json and merges.txt of a byte-level BPE."""
    from tokenizers import ByteLevelBPETokenizer

    backend = ByteLevelBPETokenizer()
    backend.train_from_iterator(TEXT, vocab_size=300, special_tokens=CONTROL)
    stored = json.loads(backend.to_str())["model"]
    merges = [" ".join(each) if isinstance(each, list) else each for each in stored["merges"]]
    return json.dumps(stored["vocab"]), "#version: 0.2\n" + "\n".join(merges) + "\n"


@cache
def word_pieces() -> str:
    words = {word.strip(".,!?\"'").lower() for line in TEXT for word in line.split()}
    letters = sorted({letter for word in words for letter in word} | set(".,!?'<>{}[]:你好"))
    control = ["[PAD]", "[unused1]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "extra0", "extra1"]
    tails = [f"##{letter}" for letter in letters]
    return "\n".join([*control, *letters, *tails, *sorted(words - set(letters))[:80]]) + "\n"


def draw_folder(seed: int, root: Path) -> Drawn:
    """Write a folder in one of `FORMS`; the same seed gives the same files."""
    draw = random.Random(seed)
    kind, form = draw.choice(KINDS), draw.choice(FORMS)
    if kind == "other" and form.startswith("by_hand"):
        form = "json_without_added"  # the class has no other file
    if kind == "byt5" and form == "by_hand_old":
        form = "by_hand"  # transformers 5 numbers its sentinels anew, and loses the tokens
    folder = root / f"{seed}-{kind}-{form}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    drawn = Drawn(folder, kind, form)
    (folder / "config.json").write_text(json.dumps({"model_type": "t5"}))
    size = _write_pieces(drawn)
    drawn.settings = _draw_settings(draw, kind)
    if kind == "t5" and form.startswith("by_hand"):
        drawn.settings.pop("split_special_tokens", None)  # it is heeded here, and not there
    if draw.random() < 0.3:  # the class is named elsewhere, or follows from the model's type
        named = {"tokenizer_class": drawn.settings.pop("tokenizer_class")}
        model = {"model_type": draw.choice(["t5", "mt5"])} if kind == "t5" else named
        write(folder / "config.json", {"model_type": "t5"} | model)
    drawn.added = _draw_added(draw)
    if form == "by_hand":
        _list_added(draw, drawn, size)
    elif form == "by_hand_old":
        _list_the_old_way(draw, drawn, size)
    else:
        _save(draw, drawn, size)
    return drawn


def _write_pieces(drawn: Drawn) -> int:
    """Write the files of pieces; returns the next free id."""
    folder = drawn.folder
    if drawn.kind == "t5":
        (folder / "spiece.model").write_bytes(spiece_bytes())
        return 120 + 10
    if drawn.kind == "byt5":
        return 3 + 256 + 10
    if drawn.kind == "bert":
        (folder / "vocab.txt").write_text(word_pieces(), encoding="utf-8")
        return len(word_pieces().splitlines())
    vocab, merges = bpe_files()
    (folder / "vocab.json").write_text(vocab)
    (folder / "merges.txt").write_text(merges)
    return len(json.loads(vocab))


def _draw_settings(draw: random.Random, kind: str) -> dict[str, Any]:
    settings: dict[str, Any] = {"tokenizer_class": draw.choice(CLASSES[kind])}
    settings |= _draw_settings_of(draw, kind)
    settings |= _draw_flag(draw, "clean_up_tokenization_spaces", given=0.4, on=0.6)
    settings |= {name: value for name, value in IGNORED.items() if draw.random() < 0.1}
    settings |= _draw_flag(draw, "split_special_tokens", given=0.15, on=0.7)
    if kind == "byt5":
        return settings  # transformers may give its ids to tokens with a role, too
    return settings | _draw_roles(draw, kind)


def _draw_settings_of(draw: random.Random, kind: str) -> dict[str, Any]:
    """Draw what the settings of this kind alone have."""
    if kind in ("t5", "byt5"):
        return {"extra_ids": 10}
    if kind == "bert":
        names = ("do_lower_case", "tokenize_chinese_chars", "strip_accents")
        return _draw_flags(draw, names, given=0.4, on=0.5)
    if kind == "other":
        return {"eos_token": "</s>", "pad_token": "<pad>"}
    settings: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    settings |= _draw_flag(draw, "add_prefix_space", given=0.4, on=0.5)
    if kind == "gpt2":
        settings |= _draw_flags(draw, ("add_bos_token", "add_eos_token"), given=0.3, on=0.6)
    return settings


def _draw_flag(draw: random.Random, name: str, *, given: float, on: float) -> dict[str, bool]:
    """Draw whether a setting is given, and whether it is true then, by these chances."""
    return {name: draw.random() < on} if draw.random() < given else {}


def _draw_flags(
    draw: random.Random, names: Sequence[str], *, given: float, on: float
) -> dict[str, bool]:
    flags: dict[str, bool] = {}
    for name in names:
        flags |= _draw_flag(draw, name, given=given, on=on)
    return flags


def _draw_roles(draw: random.Random, kind: str) -> dict[str, Any]:
    """Draw tokens with a role, which the vocabulary may lack."""
    roles: dict[str, Any] = {}
    if draw.random() < 0.2:
        name = draw.choice(["<sep>", "</s>" if kind != "bert" else "[SEP]"])
        whole = {"__type": "AddedToken", "content": name, "lstrip": True, "special": True}
        roles["sep_token"] = name if kind == "other" else draw.choice([name, whole])
    if draw.random() < 0.15:
        roles["task_token"] = "<task>"
    return roles


def _draw_added(draw: random.Random) -> list[dict[str, Any]]:
    added = []
    for text in draw.sample(NEW, draw.randint(0, 4)):
        flags = {name: draw.random() < 0.25 for name in FLAGS}
        if draw.random() < 0.3:
            flags["normalized"] = not flags["special"]
        added.append({"content": text} | flags)
    return added


def _list_added(draw: random.Random, drawn: Drawn, size: int) -> None:
    """List added tokens in tokenizer_config.json, as transformers 4.34 to 4.57 do."""
    settings = dict(drawn.settings)
    if drawn.added or draw.random() < 0.3:
        entries = {str(size + i): each for i, each in enumerate(drawn.added)}
        if drawn.kind == "byt5":  # that is how they are saved: with all others
            for i, name in enumerate(("<pad>", "</s>", "<unk>")):
                entries[str(i)] = {"content": name, "lstrip": True, "rstrip": True}
            for i in range(10):
                entries[str(259 + i)] = {"content": f"<extra_id_{i}>", "special": True}
        settings["added_tokens_decoder"] = entries
    special = [each["content"] for each in drawn.added if each["special"]]
    if special and draw.random() < 0.7:
        name = draw.choice(["additional_special_tokens", "extra_special_tokens"])
        sentinels = [f"<extra_id_{i}>" for i in range(10)] if drawn.kind in ("t5", "byt5") else []
        settings[name] = sentinels + special
    write(drawn.folder / "tokenizer_config.json", settings)


def _list_the_old_way(draw: random.Random, drawn: Drawn, size: int) -> None:
    """List them in added_tokens.json and special_tokens_map.json, as before transformers 4.34."""
    settings = dict(drawn.settings)
    special = [each["content"] for each in drawn.added if each["special"]]
    sentinels = [f"<extra_id_{i}>" for i in range(10)] if drawn.kind in ("t5", "byt5") else []
    if drawn.added:
        ids = {each["content"]: size + i for i, each in enumerate(drawn.added)}
        write(drawn.folder / "added_tokens.json", ids)
    if special:
        settings["additional_special_tokens"] = sentinels + special
        listed: dict[str, Any] = {"additional_special_tokens": sentinels + special}
        if draw.random() < 0.3:
            name = {"bert": "[SEP]"}.get(drawn.kind, "</s>")
            listed["sep_token"] = {"content": name, "lstrip": draw.random() < 0.5}
        write(drawn.folder / "special_tokens_map.json", listed)
    write(drawn.folder / "tokenizer_config.json", settings)


def _save(draw: random.Random, drawn: Drawn, size: int) -> None:
    """Save by transformers as it is here, and perhaps list more beside it by hand."""
    from transformers import AddedToken, AutoTokenizer

    folder, settings = drawn.folder, drawn.settings
    if drawn.kind == "other":
        tokenizer = _any_json(draw, settings)
    else:
        write(folder / "tokenizer_config.json", settings)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    listed = drawn.form == "json_without_added"
    for each in () if listed else drawn.added:
        token = AddedToken(**each)
        if each["special"] and draw.random() < 0.7:
            tokenizer.add_special_tokens(
                {"extra_special_tokens": [token]}, replace_extra_special_tokens=False
            )
        else:
            tokenizer.add_tokens([token], special_tokens=each["special"])
    size = max([size - 1, *tokenizer.get_vocab().values()]) + 1
    if drawn.kind != "byt5" and draw.random() < 0.3 and tokenizer.pad_token:
        tokenizer("a b c", padding="max_length", truncation=True, max_length=3)  # it is saved, too
    tokenizer.save_pretrained(folder)
    known = set() if listed else {each["content"] for each in drawn.added}
    more = drawn.added if listed else [x for x in _draw_added(draw) if x["content"] not in known]
    if drawn.form == "saved" or not more:
        return
    found = json.loads((folder / "tokenizer_config.json").read_text())
    if draw.random() < 0.6 or "added_tokens_decoder" in found:
        whole = {str(i): _flags(token) for i, token in tokenizer.added_tokens_decoder.items()}
        entries = {str(size + i): each for i, each in enumerate(more)}
        found["added_tokens_decoder"] = whole | entries  # transformers 4 lists all of them
    else:
        old = folder / "added_tokens.json"
        before = json.loads(old.read_text()) if old.exists() else {}
        write(old, before | {each["content"]: size + i for i, each in enumerate(more)})
    write(folder / "tokenizer_config.json", found)


def _flags(token: Any) -> dict[str, Any]:
    return {"content": token.content} | {name: getattr(token, name) for name in FLAGS}


def _any_json(draw: random.Random, settings: dict[str, Any]) -> Any:
    """A tokenizer.json of somebody's own, with or without an end of each text."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    letters = sorted({letter for line in TEXT for letter in line if letter != " "})
    starts = [f"\u2581{letter}" for letter in letters]
    names = ["<pad>", "</s>", "<unk>", "\u2581", *letters, *starts]
    backend = Tokenizer(models.Unigram([(name, -float(i)) for i, name in enumerate(names)], 2))
    steps = [normalizers.NFKC(), normalizers.Lowercase(), normalizers.Replace("  ", " ")]
    backend.normalizer = normalizers.Sequence(draw.sample(steps, 2))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(
        prepend_scheme=draw.choice(["always", "first"])
    )
    backend.decoder = decoders.Metaspace()
    if draw.random() < 0.5:
        backend.post_processor = processors.TemplateProcessing(
            "$A </s>", special_tokens=[("</s>", 1)]
        )
    options = {name: value for name, value in settings.items() if name != "tokenizer_class"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **options)


def draw_texts(seed: int, count: int = 12) -> list[str]:
    """Texts of words, tokens and blanks."""
    draw, texts = random.Random(seed), []
    for _ in range(count):
        parts = draw.choices(PARTS, k=draw.randint(0, 7))
        texts.append("".join(part + draw.choice(["", "", " "]) for part in parts))
    return texts


def differences(folder: Path, texts: list[str]) -> list[str]:
    """Say where ids or texts are not transformers'; sentinels, which are shown here, aside."""
    from transformers import AutoTokenizer

    reference, ours = AutoTokenizer.from_pretrained(folder), load_tokenizer(folder)
    sentinels = {i for name, i in reference.get_vocab().items() if name.startswith("<extra_id_")}
    found = []
    for text in texts:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a text that ends in </s>, a tokenizer of BPE
                right = list(reference(text).input_ids)
        except BaseException as error:  # a panic of the library, on which both stand
            assert type(error).__name__ == "PanicException", error
            with refused("fails on this text"):
                ours.encode(text)
            continue
        if (mine := ours.encode(text)) != right:
            found.append(f"ids of {text!r}: {mine}, right {right}")
        ids = [i for i in right if i not in sentinels]
        expected, shown = reference.decode(ids, skip_special_tokens=True), ours.decode(ids)
        if shown != expected:
            found.append(f"text of {ids}: {shown!r}, right {expected!r}")
        streamed = "".join(pieces(right, Detokenizer(ours), end=True))
        if streamed != (whole := ours.decode(right)):
            found.append(f"stream of {right}: {streamed!r}, whole {whole!r}")
    return found


def write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")
