"""Tokenizers in JSON files: tokenizer.json, or vocab.json and merges.txt; read by tokenizers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..decoding import Vocabulary
from ..errors import first_line
from .base import as_vocabulary
from .files import DOWNLOAD_AGAIN, SENTINEL, read_added_tokens, read_settings, token_text


class JSONTokenizer:
    """A folder's tokenizer.json, or the byte-level BPE in its vocab.json and merges.txt."""

    def __init__(self, folder: Path) -> None:
        settings = read_settings(folder)
        names = {
            role: token_text(settings.get(f"{role}_token")) or default
            for role, default in (("pad", "<pad>"), ("eos", "</s>"), ("bos", "<s>"))
        }
        unknown = token_text(settings.get("unk_token")) or "<unk>"
        path = folder / "tokenizer.json"
        if not path.exists():
            path = folder / "vocab.json"
        try:
            self._backend = _read_json(path) if path.name != "vocab.json" else _read_bpe(folder)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # it raises no narrower type; panics are no Exception
            raise ValueError(
                f"{path} is not a tokenizer: {first_line(error)}; {DOWNLOAD_AGAIN}"
            ) from error
        self._backend.no_truncation()
        self._backend.no_padding()
        found = {role: self._backend.token_to_id(name) for role, name in names.items()}
        if found["eos"] is None:
            raise ValueError(
                f"{path} has no piece {names['eos']} for the end of a text: "
                "name the one it has as eos_token in tokenizer_config.json"
            )
        self._eos: int = found["eos"]
        self.unknown_id: int | None = self._backend.token_to_id(unknown)
        self._backend.encode_special_tokens = bool(settings.get("split_special_tokens"))
        added = self._backend.get_added_tokens_decoder()
        control = {token for token in found.values() if token is not None}
        self._special = control | {i for i, token in added.items() if token.special}
        self._shown = {  # of the added tokens
            i
            for i, token in added.items()
            if i not in self._special or SENTINEL.fullmatch(token.content)
        }
        self._hidden = (self._special | {self.unknown_id}) - self._shown
        self._space: int | None = self._backend.token_to_id("\u2581")

    @property
    def vocabulary(self) -> Vocabulary:
        return as_vocabulary(self._backend.get_vocab(), self._special)

    @property
    def eos_token_id(self) -> int:
        return self._eos

    def encode(self, text: str) -> list[int]:
        ids = list(self._backend.encode(text).ids)
        return ids if ids[-1:] == [self._eos] else [*ids, self._eos]

    def decode(self, ids: Sequence[int]) -> str:
        shown: list[int] = []
        for token in ids:
            if token in self._shown and shown and self._space is not None:
                shown.append(self._space)  # an added token swallows the spaces before it
            if token not in self._hidden:
                shown.append(token)
        return str(self._backend.decode(shown, skip_special_tokens=False))


def _read_json(path: Path) -> Any:
    from tokenizers import Tokenizer as Backend

    return Backend.from_file(str(path))


def _read_bpe(folder: Path) -> Any:
    """Build RoBERTa's byte-level BPE, which puts <s> before a text and </s> after it."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
    from tokenizers import Tokenizer as Backend

    model = models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    backend = Backend(model)
    prefix = bool(read_settings(folder).get("add_prefix_space"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    backend.decoder = decoders.ByteLevel()
    control = ("<s>", "</s>", "<pad>", "<unk>", "<mask>")
    backend.add_special_tokens([name for name in control if backend.token_to_id(name) is not None])
    # Each gets the next free id, so they are added in the order of their ids.
    added = sorted(read_added_tokens(folder)[0].items(), key=lambda item: item[1])
    for text, token in added:
        backend.add_tokens([AddedToken(text, normalized=True)])
        if backend.token_to_id(text) != token:
            raise ValueError(f"{text} is to be {token}, which is not the next free id")
    start, end = backend.token_to_id("<s>"), backend.token_to_id("</s>")
    if start is None or end is None:
        raise ValueError("it has no <s> and </s>")
    backend.post_processor = processors.RobertaProcessing(
        ("</s>", end), ("<s>", start), add_prefix_space=prefix
    )
    return backend
