from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from speculative_t5.tokenizers import Detokenizer, load_tokenizer, pieces

import numpy as np
import pytest
from conftest import edit_json
from families import TEXT, write_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, spiece: bytes) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "spiece.model").write_bytes(spiece)
    (folder / "tokenizer_config.json").write_text('{"extra_ids": 10}')
    return folder


@pytest.fixture(scope="module")
def json_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer.json: its pieces can end within a character."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: i for i, piece in enumerate(["<pad>", "</s>", *letters])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<pad>", "</s>"])
    folder = tmp_path_factory.mktemp("json_tokenizer")
    backend.save(str(folder / "tokenizer.json"))
    return folder


def test_ids_match_transformers(folder: Path) -> None:
    from transformers import T5Tokenizer

    reference = T5Tokenizer.from_pretrained(folder, extra_ids=10)
    tokenizer = load_tokenizer(folder)
    for text in [
        *TEXT[:20],
        "a  b\tc",
        " lead",
        "trail ",
        "naïve café",
        "fill <extra_id_0> in",
        "a \t<extra_id_1>  <extra_id_2>",
    ]:
        assert tokenizer.encode(text) == reference(text).input_ids, text


def test_a_tokenizer_json_gives_the_ids_of_its_spiece_model(folder: Path, tmp_path: Path) -> None:
    """What transformers saves for a fine-tune, whose stored truncation must not cut prompts."""
    from transformers import T5Tokenizer

    saved = T5Tokenizer.from_pretrained(folder, extra_ids=10)
    saved(TEXT[0], truncation=True, max_length=4)
    saved.save_pretrained(tmp_path)
    assert not (tmp_path / "spiece.model").exists()
    ours, theirs = load_tokenizer(folder), load_tokenizer(tmp_path)
    for text in [*TEXT[:20], "fill <extra_id_0> in"]:
        ids = ours.encode(text)
        assert theirs.encode(text) == ids
        # The libraries mark unknown pieces, and space sentinels, each in its own way.
        if 2 not in ids and "<" not in text:
            assert theirs.decode([*ids, 0]) == ours.decode(ids)
    assert ours.vocabulary == theirs.vocabulary


def test_sentinels_go_both_ways(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode("The <extra_id_0> is <extra_id_9> here.")
    assert 129 in ids and 120 in ids  # 120 pieces, then 10 sentinels, the first one last
    assert tokenizer.decode(ids) == "The <extra_id_0> is <extra_id_9> here."
    assert tokenizer.decode([500, 0, 1]) == ""


def test_spaces_take_no_more_than_other_text(folder: Path) -> None:
    """A rule that looked for a sentinel after each of them anew would take hours."""
    tokenizer = load_tokenizer(folder)
    spaces = " " * 1_000_000
    assert tokenizer.encode(f"a{spaces}b") == tokenizer.encode("a b")
    assert tokenizer.encode(f"a{spaces}<extra_id_0>") == tokenizer.encode("a<extra_id_0>")


def test_what_is_decoded_in_parts_is_the_whole(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    rng = np.random.default_rng(0)
    texts = [tokenizer.encode(text) for text in TEXT]
    noise = [rng.integers(0, 135, 30).tolist() for _ in range(200)]
    for ids in texts + noise:
        stream = Detokenizer(tokenizer)
        parts = [stream.add(token) for token in ids]
        assert "".join([*parts, stream.finish()]) == tokenizer.decode(ids)
        assert "".join(pieces(ids, Detokenizer(tokenizer), end=True)) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", ["pieces", "json", "bytes"])
def test_a_blank_id_that_repeats_is_not_decoded_again_and_again(
    kind: str, folder: Path, json_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spaces, line breaks and ids without a text, at the beginning and later."""
    write_tokenizer(tmp_path, "bytes")
    tokenizer = load_tokenizer({"pieces": folder, "json": json_folder, "bytes": tmp_path}[kind])
    decode, lengths = tokenizer.decode, [0]

    def watched(ids: Sequence[int]) -> str:
        lengths.append(len(ids))
        return decode(ids)

    blank = [i for i in range(270) if not decode([i]).strip()]
    whole = [i for i in range(128) if decode([i]) != "\N{REPLACEMENT CHARACTER}"]
    rng = np.random.default_rng(0)
    for number in range(300):
        runs = [[int(rng.choice(blank))] * 50, rng.choice(whole, number % 4).tolist()]
        ids = sum((runs[place] for place in rng.integers(0, 2, 4)), [])
        with monkeypatch.context() as patched:
            patched.setattr(tokenizer, "decode", watched)
            shown = "".join(pieces(ids, Detokenizer(tokenizer), end=True))
        assert shown == decode(ids), ids
    assert len(blank) > 3 and max(lengths) < 20


def test_characters_are_shown_whole(json_folder: Path) -> None:
    tokenizer = load_tokenizer(json_folder)
    ids = tokenizer.encode("né ☃!")
    assert ids[-1] == 1 and len(ids) == 9
    stream = Detokenizer(tokenizer)
    parts = [stream.add(token) for token in ids[:-1]]
    assert parts == ["n", "", "é", " ", "", "", "☃", "!"]
    cut = Detokenizer(tokenizer)
    assert [cut.add(token) for token in ids[:2]] == ["n", ""]
    assert cut.finish() == "\N{REPLACEMENT CHARACTER}"
    assert pieces(ids[:2], Detokenizer(tokenizer), end=True) == ("n", "\N{REPLACEMENT CHARACTER}")
    assert pieces([], cut, end=True) == ()


def test_vocabularies_tell_tokenizers_apart(
    folder: Path, json_folder: Path, tmp_path: Path
) -> None:
    one, other = load_tokenizer(folder).vocabulary, load_tokenizer(json_folder).vocabulary
    assert (one.size, other.size) == (130, 258)
    assert one == load_tokenizer(folder).vocabulary != other
    (tmp_path / "spiece.model").write_bytes((folder / "spiece.model").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text("{}")
    edit_json(tmp_path / "tokenizer_config.json", extra_ids=11)
    assert load_tokenizer(tmp_path).vocabulary != one


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no tokenizer in .*: expected spiece.model or tokenizer.json"),
        ({"spiece.model": "x"}, "spiece.model is not a SentencePiece model"),
        ({"tokenizer.json": "{"}, "tokenizer.json is not a tokenizer"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, files: dict[str, str], message: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        load_tokenizer(tmp_path)


TEXTS = [
    *TEXT[:20],
    "naïve café ☃",
    " lead",
    "tab\tand\nline",
    "fill <extra_id_0> in <extra_id_9>!",
]


def test_bytes_match_transformers(tmp_path: Path) -> None:
    from transformers import ByT5Tokenizer

    write_tokenizer(tmp_path, "bytes")
    reference, tokenizer = ByT5Tokenizer(), load_tokenizer(tmp_path)
    assert tokenizer.vocabulary.size == len(reference) == 384
    for text in [
        *TEXTS,
        "<extra_id_124><extra_id_125>",
        "<extra_id_007>",
        f"<extra_id_{'1' * 5000}>",
    ]:
        ids = tokenizer.encode(text)
        assert ids == reference(text).input_ids
        assert tokenizer.decode([0, *ids]) == text
        if "<" not in text:  # of sentinels transformers shows none
            assert reference.decode(ids, skip_special_tokens=True) == text


def test_bytes_are_shown_as_whole_characters(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, "bytes")
    tokenizer = load_tokenizer(tmp_path)
    stream = Detokenizer(tokenizer)
    parts = [stream.add(token) for token in tokenizer.encode("né ☃!")]
    assert parts == ["n", "", "é", " ", "", "", "☃", "!", ""]


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


def test_a_spiece_model_may_end_texts_by_another_id(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, "madlad")
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode("The old man.")
    assert ids[-1] == 2 and tokenizer.decode(ids) == "The old man."
    assert {0, 1, 2} <= tokenizer.vocabulary.special


def test_added_tokens_match_transformers(folder: Path, tmp_path: Path) -> None:
    """A fine-tune's own tokens, whichever file lists them."""
    from transformers import T5Tokenizer

    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "added_tokens.json").write_text('{"<new>": 130, "<new>er": 131}')
    reference = T5Tokenizer.from_pretrained(tmp_path, extra_ids=10)
    listed = load_tokenizer(tmp_path)
    (tmp_path / "added_tokens.json").unlink()
    entries = {"130": {"content": "<new>"}, "131": {"content": "<new>er"}}
    edit_json(tmp_path / "tokenizer_config.json", added_tokens_decoder=entries)
    decoder = load_tokenizer(tmp_path)
    assert listed.vocabulary == decoder.vocabulary != load_tokenizer(folder).vocabulary
    for text in ["a <new> b", "The<new>er man <extra_id_1> sat", "<new><new>"]:
        ids = listed.encode(text)
        assert ids == decoder.encode(text) == reference(text).input_ids, text
    assert listed.decode([*listed.encode("a <new> b"), 0]) == "a <new> b"


def test_settings_of_other_kinds_are_passed_over(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    for odd in ([1, 2], 5, {"x": {"content": "y"}, "130": 3, "-1": "z"}):
        edit_json(tmp_path / "tokenizer_config.json", added_tokens_decoder=odd)
        assert load_tokenizer(tmp_path).vocabulary == load_tokenizer(folder).vocabulary
    (tmp_path / "added_tokens.json").write_text('{"<extra_id_0>": -5, "": 131, "<x>": "132"}')
    assert load_tokenizer(tmp_path).vocabulary == load_tokenizer(folder).vocabulary
