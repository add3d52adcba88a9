"""Languages by their names and codes, and the prefixes that ask models for them."""

from pathlib import Path
from typing import Any

from speculative_t5 import SpeculativeDecoder, load
from speculative_t5.checkpoints import convert
from speculative_t5.decoding import Vocabulary
from speculative_t5.tokenizers import Languages, read_languages
from speculative_t5.tokenizers.base import as_vocabulary

import pytest
import sentencepiece as spm
from checkpoints import refused
from commands import Call
from conftest import V1_0, edit_json, write_checkpoint
from families import train_spiece
from messages import check_message

CODES = "CA Latn bg bg_Latn de en en_xx_simple fil iw mass pt sr sr_Latn zh zxx_xx_dtynoise".split()
PIECES = [*(f"<2{code}>" for code in CODES), "<2>", "<s>"]
MADLAD = as_vocabulary({piece: number for number, piece in enumerate(PIECES)}, ())
PLAIN = Vocabulary(3, "0" * 64)
TASKS = {
    "summarization": {"prefix": "summarize: "},
    "translation_en_to_de": {"prefix": "translate English to German: "},
    "translation_en_to_fr": {"prefix": "translate English to French: "},
}
OWN = {
    "prefix": "{from}>{to} {from_name} to {to_name}: ", "from": ["de", "en"], "to": ["en", "pt-BR"],
}  # fmt: skip
NONE = ", which names no language: give "
OTHER = ", which is not among the model's languages: choose "

of_madlad = read_languages({}, MADLAD)
of_t5 = read_languages({"task_specific_params": TASKS}, PLAIN)
of_own = read_languages({"languages": OWN, "task_specific_params": TASKS}, MADLAD)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model that has madlad400's way to be asked for a language."""
    return make_translator(tmp_path_factory.mktemp("languages")).parents[1]


def make_translator(place: Path) -> Path:
    """Make a tiny model that translates to German and French, and return its folder."""
    symbols = ["<2de>", "<2fr>"]
    pieces = train_spiece(pad_id=0, eos_id=1, unk_id=2, bos_id=-1, user_defined_symbols=symbols)
    write_checkpoint(place / "checkpoint", V1_0, pieces)
    convert(str(place / "checkpoint"), place / "weights" / "model")
    return place / "weights" / "model"


def test_a_blank_stands_before_the_token_of_a_language(here: Path) -> None:
    """U+2581, id 805 of madlad400: without it, its authors say, outputs degenerate."""
    _, tokenizer = load(here / "weights" / "model")
    own = spm.SentencePieceProcessor(model_file=str(here / "checkpoint" / "spiece.model"))
    blank, german = (own.piece_to_id(piece) for piece in ("\u2581", "<2de>"))
    for text in ("<2de> 1, 2, 3", "<2de>abc", of_madlad.prefix("German") + "abc"):
        assert tokenizer.encode(text)[:2] == [blank, german]
    for text in (" <2fr>  a b", "a <2de> b<2fr>c <2de>", "<2de><2fr>", "<2d e>", "<2de", "<2xx> a"):
        assert tokenizer.encode(text) == [*own.encode(text), own.eos_id()], text


@pytest.mark.parametrize(
    ("to", "expected"),
    [
        ("German", "de"), ("deutsch", "de"), ("de", "de"), ("DE", "de"), ("de-AT", "de"),
        ("pt-BR", "pt"), ("Brazilian Portuguese", "pt"), ("he", "iw"), ("Hebrew", "iw"),
        ("Tagalog", "fil"), ("sr-Latn", "sr_Latn"), ("Serbian", "sr"), ("zh-Hans", "zh"),
        ("en-GB", "en"), ("Bulgarian (Latin)", "bg_Latn"), ("Bulgarian", "bg"),
        ("Simplified Chinese", "zh"), ("cmn", "zh"),
    ],
)  # fmt: skip
def test_names_and_codes_lead_to_the_models_own_token(to: str, expected: str) -> None:
    assert of_madlad.prefix(to) == of_madlad.prefix(to, "English") == f"<2{expected}> "


def refusal(languages: Languages, *given: str) -> str:
    with pytest.raises(ValueError) as caught:
        languages.prefix(*given)
    check_message(str(caught.value))
    return str(caught.value)


def test_the_language_of_the_text_is_needed_only_where_there_are_several() -> None:
    for given in (("German",), ("de", "en-US")):
        assert of_t5.prefix(*given) == "translate English to German: "
    assert of_own.prefix("Portuguese", "German") == "de>pt-BR German to Portuguese (Brazil): "
    assert of_own.prefix("Portuguese", "English") == "en>pt-BR English to Portuguese (Brazil): "
    assert of_own.prefix("English") == "de>en German to English: "
    found = refusal(of_own, "pt-BR")
    assert found.endswith("the language of the text: give from_, one of German (de), English (en)")


@pytest.mark.parametrize(
    ("languages", "given", "message"),
    [
        (of_madlad, ("Germen",), f"to is 'Germen'{NONE}German (de) if you meant that"),
        (of_madlad, ("xyzzy",), f"to is 'xyzzy'{NONE}a name such as German, or a code such as de"),
        (of_madlad, ("",), f"to is ''{NONE}"),
        (of_madlad, ("Klingon",), f"to is 'Klingon'{OTHER}from Bulgarian (bg), "),
        (of_madlad, ("Bosnian",), f"to is 'Bosnian'{OTHER}Serbian"),
        (of_madlad, ("Catalan",), f"to is 'Catalan'{OTHER}from Bulgarian (bg), Bulgarian (Latin)"),
        (of_madlad, ("zh-Hant",), f"to is 'zh-Hant'{OTHER}"),
        (of_madlad, (3,), "to must be a language's name or code, got 3"),
        (of_madlad, ("de", b"en"), "from_ must be a language's name or code, got b'en'"),
        (of_madlad, ("de", "my own"), f"from_ is 'my own'{NONE}"),
        (of_t5, ("Dutch",), f"to is 'Dutch'{OTHER}from German (de), French (fr)"),
        (of_t5, ("German", "French"), f"from_ is 'French'{OTHER}from English (en)"),
        (of_own, ("German",), f"to is 'German'{OTHER}from English (en), Portuguese (Brazil)"),
        (Languages(), ("de",), "to is 'de', and this model does not translate"),
    ],
)
def test_other_languages_are_refused(
    languages: Languages, given: tuple[str, ...], message: str
) -> None:
    assert message in refusal(languages, *given)


def test_a_model_is_not_asked_for_another_script() -> None:
    languages = Languages({("", code): code for code in ("sr", "zh")})
    assert languages.prefix("sr-Cyrl") == "sr" and languages.prefix("zh-CN") == "zh"
    assert refusal(languages, "sr-Latn").endswith("choose Serbian (sr), the nearest")
    assert "choose from Serbian (sr), Chinese (zh)" in refusal(languages, "zh-TW")


def test_of_many_languages_ten_are_listed() -> None:
    codes = "af ar bg cs da de el es et fi fr hu is it".split()
    languages = Languages({("", code): code for code in codes})
    assert refusal(languages, "Klingon").endswith("Finnish (fi) and 4 more")


@pytest.mark.parametrize(
    "found",
    [
        "de", [], {}, {"prefix": "<2{to}> "}, {"to": ["de"]}, OWN | {"to": 3}, OWN | {"to": None},
        OWN | {"prefix": "{too}"}, OWN | {"prefix": None}, OWN | {"to": ["d!"]}, OWN | {"from": 3},
        OWN | {"to": 60_000 * ["en"]}, OWN | {"to": [None]}, OWN | {"to": []}, OWN | {"from": []},
        OWN | {"to": ["xx"]},
        OWN | {"to": "de"}, OWN | {"prefix": "{to.x}"}, {"prefix": "{from}", "to": ["de"]},
    ],
)  # fmt: skip
def test_what_config_json_says_is_checked(found: Any) -> None:
    with refused(r"languages in config.json cannot be read \("):
        read_languages({"languages": found}, MADLAD)


def test_a_token_that_the_tokenizer_lacks_is_refused() -> None:
    tokens = {"prefix": "<2{to}> ", "to": ["de", "nl"]}
    with refused("asks for the token <2nl>, which the tokenizer lacks"):
        read_languages({"languages": tokens}, MADLAD)


def test_a_decoder_translates_to_any_language_of_its_model(here: Path) -> None:
    folder = here / "weights" / "model"
    model, tokenizer = load(folder)
    assert tokenizer is not None
    german = SpeculativeDecoder(model, tokenizer=tokenizer, to="German", from_="English")
    french = german.translating("fr")
    text = "The old man sat."
    german.generate(text, max_tokens=2)  # with a schedule, which others share
    for decoder, code in ((german, "de"), (french, "fr"), (german.translating("de"), "de")):
        assert decoder.engine is german.engine
        assert decoder.prefix == f"<2{code}> "
        assert decoder.encode(text) == tokenizer.encode(f"<2{code}> {text}")
    assert french.model is german.model and german.prefix == "<2de> "
    assert SpeculativeDecoder(model, tokenizer=tokenizer).prefix == ""
    expected = french.generate(text, max_tokens=8).tokens
    assert expected == german.generate(tokenizer.encode(f"<2fr> {text}"), max_tokens=8).tokens
    for options, message in (
        ({"to": "de", "prefix": "x"}, "to is 'de' and prefix is 'x', and both go before the"),
        ({"from_": "de"}, "from_ is 'de', and to is missing"),
        ({"to": "Dutch"}, "to is 'Dutch', which is not among the model's languages"),
    ):
        with refused(message):
            SpeculativeDecoder(model, tokenizer=tokenizer, **options)


def test_conversion_keeps_languages_and_the_trained_length(here: Path, tmp_path: Path) -> None:
    source = here / "checkpoint"
    assert load(source)[1].trained_length == 128, "madlad400's"  # type: ignore[union-attr]
    own = {"prefix": "to {to_name}: ", "to": ["nl"]}
    (tmp_path / "source").mkdir()
    for path in source.iterdir():
        (tmp_path / "source" / path.name).write_bytes(path.read_bytes())
    edit_json(tmp_path / "source" / "config.json", languages=own, trained_length=20)
    tokenizer: Any = load(convert(str(tmp_path / "source"), tmp_path / "out"))[1]
    assert tokenizer.languages.prefix("Dutch") == "to Dutch: " and tokenizer.trained_length == 20
    edit_json(tmp_path / "source" / "config.json", trained_length=0)
    with refused("trained_length in config.json is 0, expected a positive integer"):
        load(tmp_path / "source")


def test_commands_take_languages(here: Path, call: Call) -> None:
    model = ("--model", "weights/model", "--regular-decode", "--max-tokens", "4")
    text = "The old man sat."
    said = call(*model, "--prompt", f"<2de> {text}")
    assert call(*model, "--to", "German", "--prompt", text).out == said.out
    done = call("batch", "-", *model, "--to", "deutsch", stdin=text)
    assert done.records[0]["text"] == said.out.strip()
    lines = f"/to German from English\n{text}\n/to Dutch\n"
    done = call("repl", *model[:2], *model[3:], stdin=lines)
    assert "prefix = '<2de> '" in done.out and said.out.strip() in done.out
    assert "to is 'Dutch'" in done.err[-1]
    call(*model, "--to", "Germen", "--prompt", text).check_error("to is 'Germen'")
    long = " ".join([text] * 40)
    notes = call(*model, "--to", "fr", "--prompt", long).err
    assert any("and the model was trained on at most 128: parts may be lost" in n for n in notes)


def test_texts_are_rewritten_in_pieces_of_the_trained_length(here: Path) -> None:
    decoder = SpeculativeDecoder.from_pretrained(here / "weights" / "model")
    text = " ".join(["The old man sat."] * 40)
    found = decoder.rewrite(text, by="paragraph", max_tokens=4)
    sizes = [len(decoder.encode(piece.source)) for piece in found.pieces]
    assert len(sizes) > 1 and max(sizes) <= 128 < sizes[0] + sizes[1]
