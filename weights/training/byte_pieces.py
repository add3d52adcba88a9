"""Extend a SentencePiece model so that it encodes every text, unchanged except for blanks."""

from collections.abc import Iterable

from sentencepiece import SentencePieceNormalizer
from sentencepiece import sentencepiece_model_pb2 as model_pb2

# Characters of ordinary texts that Tatoeba's English sentences lack or seldom have.
CHARACTERS = (
    "()/@&+=#*_<>[]{}|\\~^`“”‘‚„«»‹›…–•·°£¥§©®™×÷±½²³→¿¡"
    "àáâãäåæçèéêëìíîïðñòóôõöøùúûüýþÿßÀÁÂÃÄÅÆÇÈÉÊËÌÍÎÏÐÑÒÓÔÕÖØÙÚÛÜÝÞ"
    "āăąćčďēęěğīıİłŁńňōőœŒřśŚşșšŠťțūůűźżŻžŽ"
)

# What ends a line becomes "\n", other white space a space: texts to train on have no other.
BLANKS = {
    c: "\n" if len(f"a{c}b".splitlines()) > 1 else " "
    for c in ["\r\n", *map(chr, range(2**16))]
    if c.isspace() and c not in " \n"
}


def add_pieces(stored: bytes, characters: Iterable[str] = CHARACTERS) -> bytes:
    """Add the 256 bytes, then characters, after a SentencePiece model's own pieces.

    Present ids stay. What has no piece is encoded as the bytes of its UTF-8. Of normalization only
    `BLANKS` is left: NFKC would rewrite an ellipsis, full-width letters and the like. Runs of
    spaces still become one. `stored` and what is returned are the contents of a spiece.model.
    """
    model = model_pb2.ModelProto.FromString(stored)
    known = {piece.piece for piece in model.pieces}
    rarest = min(piece.score for piece in model.pieces)
    for byte in range(256):
        model.pieces.add(piece=f"<0x{byte:02X}>", score=0.0, type=model.SentencePiece.BYTE)
    for character in dict.fromkeys(characters):
        if character not in known:
            model.pieces.add(piece=character, score=rarest)
    model.trainer_spec.byte_fallback = True
    model.trainer_spec.vocab_size = len(model.pieces)
    blanks = SentencePieceNormalizer(norm_map=[*BLANKS.items()]).serialized_normalizer_spec()
    charsmap = model_pb2.NormalizerSpec.FromString(blanks).precompiled_charsmap
    model.normalizer_spec.name = "blanks"
    model.normalizer_spec.precompiled_charsmap = charsmap
    return bytes(model.SerializeToString())
