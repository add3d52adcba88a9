"""Makes tokenizers of the library `tokenizers` from a folder's files, as transformers 5 does.

Each function returns a `tokenizers.Tokenizer`, whose own code then reads and writes texts. A
tokenizer.json is taken as it was saved. transformers puts T5's own steps in place of those that
such a file has, where its class is T5Tokenizer; but the model was trained with the file's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .base import LANGUAGE_TOKEN
from .sentencepiece_files import SentencePieceFile
from .settings import AddedToken, TokenizerSettings

T5_CLASS, ROBERTA_CLASS = "T5Tokenizer", "RobertaTokenizer"
GPT2_CLASS, BERT_CLASS = "GPT2Tokenizer", "BertTokenizer"
ANY_CLASS = "TokenizersBackend"  # whatever a tokenizer.json has
_SAME = {"BartTokenizer": ROBERTA_CLASS, "CodeGenTokenizer": GPT2_CLASS}
_T5_NAMES = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
_END_OF_TEXT = "<|endoftext|>"
# The tokens that a class has where the files name none.
_DEFAULT_TOKENS: dict[str, Mapping[str, str]] = {
    T5_CLASS: _T5_NAMES,
    ROBERTA_CLASS: _T5_NAMES
    | {"bos_token": "<s>", "sep_token": "</s>", "cls_token": "<s>", "mask_token": "<mask>"},
    GPT2_CLASS: {"bos_token": _END_OF_TEXT, "eos_token": _END_OF_TEXT, "unk_token": _END_OF_TEXT},
    BERT_CLASS: {
        f"{role}_token": f"[{role.upper()}]" for role in ("unk", "sep", "pad", "cls", "mask")
    },
}
_NEEDED = {T5_CLASS: ("eos_token",), ROBERTA_CLASS: ("cls_token", "sep_token")}


@dataclass(frozen=True)
class Made:
    """A tokenizer of the library, and the tokens that have a role for it."""

    backend: Any  # tokenizers.Tokenizer
    named: Mapping[str, AddedToken]  # by role, such as eos_token
    missing: tuple[str, ...] = ()  # roles that the class needs and no file has a token for

    def id_of(self, role: str) -> int | None:
        """Return the id of the token with a role; None if there is none."""
        token = self.named.get(role)
        return None if token is None else self.backend.token_to_id(token.text)

    def pair(self, role: str) -> tuple[str, int]:
        """Return the text and the id of a token with a role, which has to be there."""
        token = self.id_of(role)
        assert token is not None
        return self.named[role].text, token


def class_of(settings: TokenizerSettings, default: str = T5_CLASS) -> str:
    """Return the class of a folder's tokenizer, one name for those that are alike.

    Args:
        settings: Of the folder.
        default: The class of a folder whose files say T5Tokenizer, or nothing.
    """
    kind = _SAME.get(settings.kind, settings.kind)
    return default if kind == T5_CLASS else kind


def from_json(stored: str, settings: TokenizerSettings) -> Made:
    """Read the text of a tokenizer.json, and add what other files list and it lacks."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    backend, kind = Tokenizer.from_str(stored), class_of(settings)
    backend.no_truncation()
    backend.no_padding()
    made = _made(backend, settings, kind)
    if kind == T5_CLASS:
        _add_tokens(made, settings, _t5_extras(settings))
        ids = backend.encode("").ids
        if not ids or ids[-1] != made.id_of("eos_token"):
            _end_with_eos(made)
        return made
    _add_tokens(made, settings, _extras(settings))
    is_bytewise = isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel)
    if kind in (GPT2_CLASS, ROBERTA_CLASS) and is_bytewise:
        backend.pre_tokenizer.add_prefix_space = _adds_prefix_space(settings)
        if kind == ROBERTA_CLASS:
            _put_between_ends(made, settings)
    elif kind == BERT_CLASS and isinstance(backend.model, models.WordPiece):
        if isinstance(backend.normalizer, normalizers.BertNormalizer | None):
            backend.normalizer = _bert_normalizer(settings)
        _put_between_classes(made)
    return made


def from_sentencepiece(file: SentencePieceFile, settings: TokenizerSettings) -> Made:
    """Make T5's tokenizer of a spiece.model; sentinels follow the pieces, the last one first."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    count = settings.num_sentinels(100)
    pieces = _with_languages(file) + [(f"<extra_id_{i}>", 0.0) for i in reversed(range(count))]
    backend = Tokenizer(models.Unigram(pieces, int(file.processor.unk_id()), False))
    if file.charsmap:
        backend.normalizer = normalizers.Precompiled(file.charsmap)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace("\u2581", "always", True)]
    )
    backend.decoder = decoders.Metaspace("\u2581", "always", True)
    made = _made(backend, settings, T5_CLASS)
    own = {name: AddedToken(name, special=True) for name in file.control}
    others = (name for name in file.user_defined if not LANGUAGE_TOKEN.fullmatch(name))
    own |= {name: AddedToken(name) for name in others}
    _add_tokens(made, settings, _t5_extras(settings, tuple(own.values())))
    _end_with_eos(made)
    return made


def _with_languages(file: SentencePieceFile) -> list[tuple[str, float]]:
    """Return scored pieces, among which tokens of languages win, as in SentencePiece's lattice.

    transformers 5 cuts texts at them instead, and so drops the blank (U+2581) that stands before
    them in what madlad400 was trained on.
    """
    languages = set(filter(LANGUAGE_TOKEN.fullmatch, file.user_defined))
    if not languages:
        return file.scored
    others = (*file.control, *file.user_defined)
    best = max((score for name, score in file.scored if name not in others), default=0.0)
    # SentencePiece's score of a piece that its user has defined.
    return [
        (name, len(name.encode()) * best - 0.1 if name in languages else score)
        for name, score in file.scored
    ]


def from_bpe(folder: Path, settings: TokenizerSettings) -> Made:
    """Make the byte-level BPE of a vocab.json and a merges.txt.

    RoBERTa's, as codet5 has it, puts <s> before a text and </s> after it; GPT-2's, as FRED-T5 has
    it, puts nothing unless the settings ask for it.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    kind = class_of(settings, ROBERTA_CLASS)
    files = str(folder / "vocab.json"), str(folder / "merges.txt")
    backend = Tokenizer(models.BPE.from_file(*files))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=_adds_prefix_space(settings))
    backend.decoder = decoders.ByteLevel()
    made = _made(backend, settings, kind)
    _add_tokens(made, settings, _extras(settings))
    if kind == ROBERTA_CLASS:
        _put_between_ends(made, settings)
    else:
        _put_asked_ends(made, settings)
    return made


def from_wordpiece(folder: Path, settings: TokenizerSettings) -> Made:
    """Make BERT's tokenizer of a vocab.txt, as T5s for Chinese have it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    path, unknown = (
        str(folder / "vocab.txt"),
        settings.named(_DEFAULT_TOKENS[BERT_CLASS])["unk_token"].text,
    )
    backend = Tokenizer(models.WordPiece.from_file(path, unk_token=unknown))
    backend.normalizer = _bert_normalizer(settings)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##")
    made = _made(backend, settings, BERT_CLASS)
    _add_tokens(made, settings, _extras(settings))
    _put_between_classes(made)
    return made


def _made(backend: Any, settings: TokenizerSettings, kind: str) -> Made:
    """Return a tokenizer to which nothing has been added yet."""
    listed = {token.text for token in settings.listed.values()}
    named, given = settings.named(_DEFAULT_TOKENS.get(kind, {})), settings.named({})
    missing = tuple(
        role
        for role in _NEEDED.get(kind, ())
        if backend.token_to_id(named[role].text) is None
        and named[role].text not in listed
        and (role == "eos_token" or role not in given)
    )
    return Made(backend, named, missing)


def _add_tokens(made: Made, settings: TokenizerSettings, extras: Iterable[AddedToken]) -> None:
    """Add the tokens that the files list; each that has no id gets the next free one."""
    import tokenizers

    tokens = [settings.listed[token] for token in sorted(settings.listed)]
    known = {token.content for token in made.backend.get_added_tokens_decoder().values()}
    known |= {token.text for token in tokens}
    # Of two with other flags, the later counts.
    more = dict.fromkeys((*made.named.values(), *extras))
    tokens += [token for token in more if token.text not in known]
    special = {token.text for token in made.named.values()}
    made.backend.add_tokens(
        [
            tokenizers.AddedToken(
                token.text,
                single_word=token.single_word,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=token.normalized,
                special=token.special or token.text in special,
            )
            for token in tokens
        ]
    )


def _extras(settings: TokenizerSettings) -> tuple[AddedToken, ...]:
    return (settings.old_extras or ()) if settings.extras is None else settings.extras


def _t5_extras(
    settings: TokenizerSettings, own: tuple[AddedToken, ...] | None = None
) -> tuple[AddedToken, ...]:
    """Return the special tokens of a T5: sentinels, unless the files list others.

    Args:
        settings: Of the folder.
        own: Control and user-defined pieces of a spiece.model, in place of what an old file lists.
    """
    if settings.extras is not None:
        return settings.extras
    listed = (settings.old_extras or ()) if own is None else own
    if any("<extra_id_" in token.text for token in listed):
        return listed
    count = settings.num_sentinels(100)
    return (*listed, *(AddedToken(f"<extra_id_{i}>", special=True) for i in range(count)))


def _adds_prefix_space(settings: TokenizerSettings) -> bool:
    return bool(settings.config.get("add_prefix_space"))


def _bert_normalizer(settings: TokenizerSettings) -> Any:
    from tokenizers import normalizers

    config = settings.config
    return normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=bool(config.get("tokenize_chinese_chars", True)),
        strip_accents=config.get("strip_accents"),
        lowercase=bool(config.get("do_lower_case", True)),
    )


def _end_with_eos(made: Made) -> None:
    _, end = made.pair("eos_token")
    _put_around(made, [], [("</s>", end)])


def _put_between_classes(made: Made) -> None:
    _put_around(made, [made.pair("cls_token")], [made.pair("sep_token")])


def _put_asked_ends(made: Made, settings: TokenizerSettings) -> None:
    asked = {role: bool(settings.config.get(f"add_{role}_token")) for role in ("bos", "eos")}
    before, after = ([made.pair(f"{role}_token")] if asked[role] else [] for role in asked)
    _put_around(made, before, after)


def _put_around(made: Made, before: list[tuple[str, int]], after: list[tuple[str, int]]) -> None:
    """Put control tokens, texts with their ids, before and after each text."""
    from tokenizers import processors

    single = [*(text for text, _ in before), "$A", *(text for text, _ in after)]
    made.backend.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[*before, *after]
    )


def _put_between_ends(made: Made, settings: TokenizerSettings) -> None:
    from tokenizers import processors

    made.backend.post_processor = processors.RobertaProcessing(
        made.pair("sep_token"),
        made.pair("cls_token"),
        add_prefix_space=_adds_prefix_space(settings),
    )
