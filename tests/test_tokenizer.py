"""Tokenizers of the T5 family: the same ids as transformers, and text as it arrives."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from speculative_t5.tokenizers import Detokenizer, load_tokenizer, pieces

import numpy as np
import pytest
from byte_pieces import BLANKS, add_pieces
from checkpoints import refused
from conftest import edit_json
from families import TEXT, write_tokenizer

TEXTS = [
    *TEXT[:20], "naïve café ☃", " lead", "trail ", "a  b\tc", "tab\tand\nline",
    "fill <extra_id_0> in <extra_id_9>!", "a \t<extra_id_1>  <extra_id_2>",
]  # fmt: skip
ODD = [
    "a ☃", "“Hi” … ﬁ ＡＢ", "e\u0301 x", "line\n\n- a\nb", "あ🎵🎵 a", "👩\u200d🚀",
    "<0x0A> b", "\ufffd c",
]  # fmt: skip

# Control tokens and sentinels within a text, every blank, marks, and runs of one character.
FORMS = [
    *TEXTS,
    *ODD,
    *(
        f"{a}{token}{b}"
        for token in ("</s>", "<pad>", "<unk>", "<extra_id_0>", "<new>", "<task>")
        for a, b in (("a ", " b"), ("a", "b"), ("", ""), ("The dog sat", "."), ("", token))
    ),
    *(f"a{blank}b {blank} c{blank}" for blank in map(chr, range(2**16)) if blank.isspace()),
    *(
        f"caf{mark} {mark}"
        for mark in (
            "e\u0301",
            "e\u0301\u0323",
            "a\u0308\u0304",
            "o\u0302\u0301",
            "\ufb01\u0301",
            "\uff45\u0301",
            "e\u0301\u0301",
            "e" + "\u0301" * 5,
            "x\u0301",
            "\u1e9b\u0323",
            "\ud55c",
            "\u2460",
            "\u2126",
            "a\u200d",
            "a\u200bb",
            "\ufeffa",
            "\xad",
        )
    ),
    "-------",
    "aaaaaaaaaa",
    "< / s >",
    "</s",
    "\u2581a\u2581b",
    "",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, spiece: bytes) -> Path:
    """A SentencePiece model of 120 pieces and 10 sentinels."""
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "spiece.model").write_bytes(spiece)
    (folder / "tokenizer_config.json").write_text('{"extra_ids": 10}')
    return folder


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    """The same, for the test to change."""
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def write_json(folder: Path) -> None:
    """Save a byte-level tokenizer.json, whose pieces may end within a character."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: i for i, piece in enumerate(["<pad>", "</s>", *letters])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<pad>", "</s>"])
    backend.save(str(folder / "tokenizer.json"))


@pytest.fixture(params=["json", "bytes"])
def bytewise(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """A tokenizer with an id for each byte, of a file and of none."""
    write_json(tmp_path) if request.param == "json" else write_tokenizer(tmp_path, "bytes")
    return load_tokenizer(tmp_path)


@pytest.mark.parametrize("form", ["spiece", "json", "both"])
def test_texts_read_as_in_transformers_in_every_form(folder: Path, copy: Path, form: str) -> None:
    """It leaves special tokens out of what it shows; here sentinels stay, after a space.

    A truncation that a tokenizer.json stores cuts no prompt.
    """
    from transformers import T5Tokenizer

    reference = T5Tokenizer.from_pretrained(copy, extra_ids=10)
    if form == "both":  # which tokens were added stands in tokenizer.json alone
        reference.add_tokens(["<new>"])
        reference.add_tokens(["<task>"], special_tokens=True)
    if form != "spiece":
        reference(TEXT[0], truncation=True, max_length=4)
        reference.save_pretrained(copy)
        settings = {"split_special_tokens": True}
        (copy / "config.json").write_text(json.dumps(settings))
        split = T5Tokenizer.from_pretrained(copy, **settings)
        text = "a <task> </s> b<new> <extra_id_0>"
        assert load_tokenizer(copy).encode(text) == split(text).input_ids
        (copy / "config.json").unlink()
    if form == "json":
        (copy / "spiece.model").unlink()
    ours = load_tokenizer(copy)
    assert ours.vocabulary.size == len(reference)
    assert (ours.vocabulary == load_tokenizer(folder).vocabulary) == (form != "both")
    for text in FORMS:
        ids = reference(text).input_ids
        assert ours.encode(text) == ids, text
        if not any(i in ids for i in range(120, 131)):  # sentinels and <new>
            assert ours.decode(ids) == reference.decode(ids, skip_special_tokens=True), text
    ids = reference("a <extra_id_0>b<extra_id_9> </s> <task>").input_ids
    assert ours.decode(ids) == "a <extra_id_0> b <extra_id_9>" + " task" * (form != "both")
    assert "".join(pieces(ids, Detokenizer(ours), end=True)) == ours.decode(ids)


@pytest.mark.parametrize("kind", ["spiece", "bytes"])
def test_a_text_may_be_kept_from_spelling_special_tokens(copy: Path, kind: str) -> None:
    """The shipped pair has this setting in its config.json."""
    if kind == "bytes":
        (copy / "spiece.model").unlink()
        edit_json(copy / "tokenizer_config.json", tokenizer_class="ByT5Tokenizer")
    text = "a </s> b <extra_id_0>"
    special = load_tokenizer(copy).vocabulary.special - {2}  # <unk>
    assert len(special.intersection(load_tokenizer(copy).encode(text))) == 2
    (copy / "config.json").write_text('{"split_special_tokens": true}')
    ids = load_tokenizer(copy).encode(text)
    assert special.intersection(ids) == {1} and ids.count(1) == 1, "the one at the end"


def test_parts_make_up_the_whole_text(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    assert tokenizer.decode([500, 0, 1]) == ""
    spaces = " " * 500_000  # searching for a sentinel after each of them would take hours
    assert tokenizer.encode(f"a{spaces}<extra_id_0>") == tokenizer.encode("a<extra_id_0>")
    rng = np.random.default_rng(0)
    noise = [rng.integers(0, 135, 30).tolist() for _ in range(200)]
    for ids in [tokenizer.encode(text) for text in TEXT] + noise:
        assert "".join(pieces(ids, Detokenizer(tokenizer), end=True)) == tokenizer.decode(ids)


def test_a_repeated_blank_id_is_not_decoded_again_and_again(
    bytewise: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spaces, line breaks and ids without text, at the beginning and later."""
    decode, lengths = bytewise.decode, [0]

    def watched(ids: Sequence[int]) -> str:
        lengths.append(len(ids))
        return decode(ids)

    blank = [i for i in range(270) if not decode([i]).strip()]
    letters = [i for i in range(270) if decode([i]).isalpha()][:2]
    monkeypatch.setattr(bytewise, "decode", watched)
    for i in blank:
        ids = [*[i] * 50, letters[0], *[i] * 50, letters[1]]
        shown = "".join(pieces(ids, Detokenizer(bytewise), end=True))
        assert shown == decode(ids), ids
    rng = np.random.default_rng(0)
    for _ in range(20):  # others among them, too
        ids = [letters[0], *rng.choice(blank, 60).tolist(), letters[1]]
        assert "".join(pieces(ids, Detokenizer(bytewise), end=True)) == decode(ids), ids
    assert len(blank) > 3 and max(lengths) < 20


def test_characters_are_shown_whole(bytewise: Any) -> None:
    ids = bytewise.encode("né ☃!")
    assert ids[-1] == 1 and len(ids) == 9
    stream, cut = Detokenizer(bytewise), Detokenizer(bytewise)
    assert [stream.add(token) for token in ids] == ["n", "", "é", " ", "", "", "☃", "!", ""]
    assert pieces(ids[:2], cut, end=True) == ("n", "\N{REPLACEMENT CHARACTER}")
    assert pieces([], cut, end=True) == ()


def test_bad_files_are_named(tmp_path: Path) -> None:
    for name, content, wrong in (
        ("spiece.model", "{", "a SentencePiece model"),
        ("tokenizer.json", "{", "JSON"),
        ("tokenizer.json", "{}", "a tokenizer"),
    ):
        (tmp_path / name).write_text(content)
        with refused(f"{name} is not {wrong}", tmp_path):
            load_tokenizer(tmp_path)


def test_bytes_match_transformers(tmp_path: Path) -> None:
    from transformers import ByT5Tokenizer

    write_tokenizer(tmp_path, "bytes")
    edit_json(tmp_path / "tokenizer_config.json", tokenizer_class=None)
    with refused("no tokenizer in", tmp_path):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"extra_ids": 125}')  # as byt5 is published
    (tmp_path / "config.json").write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    reference, tokenizer = ByT5Tokenizer(), load_tokenizer(tmp_path)
    assert tokenizer.vocabulary.size == len(reference) == 384
    odd = ["<extra_id_124><extra_id_125>", "<extra_id_007>", f"<extra_id_{'1' * 5000}>"]
    for text in [*TEXTS[:-1], *odd]:
        ids = tokenizer.encode(text)
        assert ids == reference(text).input_ids
        assert tokenizer.decode([0, *ids]) == text
        if "<" not in text:  # transformers does not show sentinels
            assert reference.decode(ids, skip_special_tokens=True) == text


def test_two_files_of_bpe_match_transformers(tmp_path: Path) -> None:
    from transformers import RobertaTokenizer

    write_tokenizer(tmp_path / "two", "bpe")
    reference = RobertaTokenizer.from_pretrained(tmp_path / "two")
    reference.save_pretrained(tmp_path / "one")  # a tokenizer.json, as newer checkpoints have
    two, one = load_tokenizer(tmp_path / "two"), load_tokenizer(tmp_path / "one")
    assert two.vocabulary == one.vocabulary
    for text in TEXTS:
        ids = two.encode(text)
        assert ids == one.encode(text) == reference(text).input_ids
        assert (ids[0], ids[-1]) == (1, 2)
        assert two.decode([0, *ids]) == one.decode(ids) == text


def test_added_tokens_match_transformers(folder: Path, copy: Path) -> None:
    """A fine-tune's own tokens, whichever file lists them."""
    from transformers import T5Tokenizer

    (copy / "added_tokens.json").write_text('{"<new>": 130, "<new>er": 131}')
    reference = T5Tokenizer.from_pretrained(copy, extra_ids=10)
    listed = load_tokenizer(copy)
    (copy / "added_tokens.json").unlink()
    entries = {"130": {"content": "<new>"}, "131": {"content": "<new>er"}}
    edit_json(copy / "tokenizer_config.json", added_tokens_decoder=entries)
    decoder = load_tokenizer(copy)
    assert listed.vocabulary == decoder.vocabulary != load_tokenizer(folder).vocabulary
    for text in ["a <new> b", "The<new>er man <extra_id_1> sat", "<new><new>"]:
        ids = listed.encode(text)
        assert ids == decoder.encode(text) == reference(text).input_ids, text
    assert listed.decode([*listed.encode("a <new> b"), 0]) == "a<new> b"


def test_malformed_added_tokens_are_ignored(folder: Path, copy: Path) -> None:
    (copy / "added_tokens.json").write_text('{"<extra_id_0>": -5, "": 131, "<x>": "132"}')
    for odd in ([1, 2], 5, {"x": {"content": "y"}, "130": 3, "-1": "z"}):
        edit_json(copy / "tokenizer_config.json", added_tokens_decoder=odd)
        assert load_tokenizer(copy).vocabulary == load_tokenizer(folder).vocabulary


def test_byte_pieces_let_every_text_through(tmp_path: Path, spiece: bytes) -> None:
    """Ids as `tokenizers` gives them; transformers' own T5Tokenizer ignores byte fallback."""
    from sentencepiece import SentencePieceProcessor
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    (tmp_path / "spiece.model").write_bytes(add_pieces(spiece, "“”"))
    ours = load_tokenizer(tmp_path)
    pieces_of = SentencePieceProcessor(model_file=str(tmp_path / "spiece.model"))
    size = pieces_of.get_piece_size()
    vocab = [(pieces_of.id_to_piece(i), pieces_of.get_score(i)) for i in range(size)]
    reference = Tokenizer(models.Unigram(vocab, unk_id=2, byte_fallback=True))
    reference.pre_tokenizer = pre_tokenizers.Metaspace()
    steps = [decoders.ByteFallback(), decoders.Metaspace()]
    reference.decoder = decoders.Sequence(steps)
    for text in ODD:
        ids = ours.encode(text)
        assert 2 not in ids and 1 not in ids[:-1]
        if "<0x" not in text:  # `tokenizers` takes the name of a byte for the byte
            assert ids[:-1] == reference.encode(text).ids, text
        assert ours.decode(ids) == reference.decode(ids[:-1]) == text
        parts = pieces(ids, Detokenizer(ours), end=True)
        assert "".join(parts) == text
        shown = "".join(parts[:-1])
        assert text.count("\N{REPLACEMENT CHARACTER}") == shown.count("\N{REPLACEMENT CHARACTER}")
    rng = np.random.default_rng(0)
    for ids in rng.integers(0, size, (300, 12)).tolist():
        assert "".join(pieces(ids, Detokenizer(ours), end=True)) == ours.decode(ids), ids


@pytest.mark.parametrize("name", ["new", "correct-base", "correct-small"])
def test_byte_pieces_read_every_blank_as_a_space_or_line_break(
    tmp_path: Path, spiece: bytes, name: str
) -> None:
    """The shipped pair's files are checked, too: those blanks made it invent words."""
    weights = Path(__file__).parents[1] / "weights"
    (tmp_path / "spiece.model").write_bytes(
        add_pieces(spiece) if name == "new" else (weights / name / "spiece.model").read_bytes()
    )
    tokenizer = load_tokenizer(tmp_path)
    for blank in map(chr, range(2**16)):
        if blank.isspace():
            plain = "\n" if len(f"a{blank}b".splitlines()) == 2 else " "
            assert tokenizer.encode(f"a{blank}b") == tokenizer.encode(f"a{plain}b"), blank
            assert blank in " \n" or BLANKS[blank] == plain
    assert tokenizer.decode(tokenizer.encode("a\r\n\r\nb\r\rc\t\xa0d")) == "a\n\nb\n\nc d"
    marked = "a\xa0\u0301 \u3000\u0301 ﬁ…"  # a mark stays where the blank before it is replaced
    assert tokenizer.decode(tokenizer.encode(marked)) == "a \u0301 \u0301 ﬁ…"
