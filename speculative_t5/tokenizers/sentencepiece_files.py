"""What a spiece.model holds: its pieces, and what protobuf's encoding says of their kinds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

_PIECE, _TRAINER, _NORMALIZER = 1, 2, 3  # numbers of the fields of a model
_UNIGRAM, _USER_DEFINED = 1, 4  # of a model's types, and of a piece's


@dataclass(frozen=True)
class SentencePieceFile:
    """A SentencePiece model, read."""

    processor: Any  # of sentencepiece
    names: tuple[str, ...]  # the pieces by id
    charsmap: bytes  # of its normalizer; b"" if that has none
    user_defined: tuple[str, ...]  # pieces that a text is cut at before all others
    is_unigram: bool
    stored: bytes = field(repr=False)  # the file

    @property
    def has_bytes(self) -> bool:
        """Whether there are pieces for the bytes of what no other piece has."""
        return bool(self.processor.piece_to_id("<0x00>") != self.processor.unk_id())

    @property
    def without_normalizer(self) -> Any:
        """The processor of the same pieces that leaves texts as they are."""
        import sentencepiece

        processor = sentencepiece.SentencePieceProcessor()
        # The last of two such fields counts: an empty one.
        processor.load_from_serialized_proto(self.stored + b"\x1a\x02\x12\x00")
        return processor

    @property
    def scored(self) -> list[tuple[str, float]]:
        """The pieces with their scores, natural logarithms."""
        return [(name, float(self.processor.get_score(i))) for i, name in enumerate(self.names)]

    @property
    def control(self) -> dict[str, int]:
        """The pieces that stand for no text, <unk> among them, with their ids."""
        return {
            name: i
            for i, name in enumerate(self.names)
            if self.processor.is_control(i) or self.processor.is_unknown(i)
        }


def read_sentencepiece(stored: bytes) -> SentencePieceFile:
    """Read the bytes of a file; those of another raise errors of several types."""
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_proto=stored)
    names = tuple(processor.id_to_piece(i) for i in range(len(processor)))
    parts = dict(_fields(stored, skip_pieces=True))
    kind = dict(_fields(parts.get(_TRAINER, b""))).get(3, _UNIGRAM)
    user_defined: tuple[str, ...] = ()
    marked = bytes([3 << 3, _USER_DEFINED])
    if marked in stored:  # or else the pieces, which are many, are skipped
        found = (part for number, part in _fields(stored) if number == _PIECE and marked in part)
        pieces = (dict(_fields(piece)) for piece in found)
        user_defined = tuple(piece[1].decode() for piece in pieces if piece.get(3) == _USER_DEFINED)
    charsmap = dict(_fields(parts.get(_NORMALIZER, b""))).get(2, b"")
    return SentencePieceFile(processor, names, charsmap, user_defined, kind == _UNIGRAM, stored)


def _fields(message: bytes, *, skip_pieces: bool = False) -> Iterator[tuple[int, Any]]:
    """Yield the number and the value of each field of a message: bytes, or an integer."""
    at = 0
    while at < len(message):
        if skip_pieces and message[at] == 10 and message[at + 1] < 128:  # they are many, and short
            at += 2 + message[at + 1]
            continue
        key, at = _varint(message, at)
        if key & 7 == 0:
            value, at = _varint(message, at)
            yield key >> 3, value
            continue
        size, at = {1: (8, at), 5: (4, at)}.get(key & 7) or _varint(message, at)
        yield key >> 3, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """Return the number that begins at a place, and where it ends."""
    value = shift = 0
    while message[at] >= 128:
        value |= (message[at] & 127) << shift
        at, shift = at + 1, shift + 7
    return value | message[at] << shift, at + 1
