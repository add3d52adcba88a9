"""Whole texts over HTTP: LanguageTool's and LibreTranslate's protocols, spoken by real clients."""

import gzip
import importlib.util
import json
import random
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from speculative_t5.checkpoints import locate, read_tokenizer
from speculative_t5.cli.options import DecoderOptions
from speculative_t5.documents import Document, RewriteOptions, WebPage, edits
from speculative_t5.documents.judging import same_facts
from speculative_t5.serve import Models, Service, languagetool
from speculative_t5.serve import Served as Model
from speculative_t5.serve.languagetool import check
from speculative_t5.serve.libretranslate import translate
from speculative_t5.serve.requests import Refused
from speculative_t5.serve.texts import detected
from speculative_t5.tokenizers import Languages

import language_tool_python
import pytest
from conftest import REPOSITORY
from libretranslatepy import LibreTranslateAPI  # type: ignore[import-untyped]
from messages import check_message
from pieces import Scripted
from serving import Served, serving, wait_until
from test_translation import GERMAN

TEXT = "my sister have never been too paris 😀.\n\n- Its expensive and she dont has many money.\n"
RIGHT = (
    "My sister has never been to Paris 😀.\n\n- It's expensive and she doesn't have much money.\n"
)
LEARNERS = [
    line.split("\t")[0]
    for line in (REPOSITORY / "tests" / "learners.tsv").read_text("utf-8").splitlines()
]


def applied(text: str, matches: list[dict[str, Any]]) -> str:
    """A text after all matches, whose offsets count UTF-16 units."""
    units = text.encode("utf-16-le")
    for match in reversed(matches):
        start, end = match["offset"], match["offset"] + match["length"]
        assert match["length"] > 0 and 2 * end <= len(units)
        new = match["replacements"][0]["value"].encode("utf-16-le")
        units = units[: 2 * start] + new + units[2 * end :]
    return units.decode("utf-16-le")


@dataclass
class Texts:
    """What answers are made with, and the texts that a scripted decoder makes of others."""

    decoder: Any
    corrects: list[str] | None = None

    @property
    def tokenizer(self) -> Any:
        return SimpleNamespace(corrects=self.corrects, languages=Languages())

    def document(self, text: str, options: RewriteOptions) -> Document:
        return Document(self.decoder, text, options)

    def check(self, text: str, /, **fields: Any) -> list[dict[str, Any]]:
        found = check({"text": text, "language": "en"} | fields, self)  # type: ignore[arg-type]
        assert json.loads(json.dumps(found)) == found
        matches: list[dict[str, Any]] = found["matches"]
        assert [m["offset"] for m in matches] == sorted(m["offset"] for m in matches)
        return matches


# Words of several scripts: joined emoji, marks on letters, from right to left.
WORDS = (
    "a the cat has has, sat. on: (mat) e\u0301te\u0301 cafe\u0301! नमस्ते किताब क्षत्रिय "
    "😀 👩\u200d🚀 👍🏽 🇩🇪 שָׁלוֹם עולם "
    "مَرْحَبًا العالم 東京 𝒳𝒴 don't co-op it's naïve ﬁ ß İ ǆ".split()
)


def scrambled(text: str, draw: random.Random) -> str:
    """A text with words changed, added, left out and joined."""
    words = text.split(" ")
    for _ in range(draw.randint(0, 3)):
        place = draw.randrange(len(words))
        words[place : place + draw.randint(0, 1)] = draw.choices(WORDS, k=draw.randint(0, 2))
        words = words or ["x"]
    return " ".join(words).swapcase() if draw.random() < 0.1 else " ".join(words)


def test_all_matches_together_give_the_text_of_the_model() -> None:
    draw, changed = random.Random(5), 0
    texts = Texts(Scripted(lambda s: scrambled(s, random.Random(s)), limit=10**6))
    for _ in range(1200):
        sentences = (" ".join(draw.choices(WORDS, k=draw.randint(2, 12))) for _ in range(4))
        text = draw.choice(("\n", "\r\n\r\n", " ")).join(sentences)
        document = texts.document(text, RewriteOptions())
        wanted = document.result(document.rewrite()).text
        assert applied(text, texts.check(text)) == wanted
        changed += wanted != text
    assert changed > 700


@pytest.mark.parametrize(
    ("before", "after", "wanted"),
    [
        ("He go to shop.", "He goes to the shop.", [("go", "goes"), ("to", "to the")]),
        ("A the the b", "A the b", [("the the", "the")]),
        ("go home", "I go home", [("go", "I go")]),
        ("home", "go home now", [("home", "go home now")]),
        ("a b c", "a x b y c", [("a", "a x"), ("b", "b y")]),
        ("a  b", "a b", [("  ", " ")]),
        ("cafe\u0301", "cafe", [("cafe\u0301", "cafe")]),
        ("ca, fe", "ca fe", [("ca,", "ca")]),
        ("किताब", "कितबा", [("किताब", "कितबा")]),
        ("👩\u200d🚀 x", "👩 x", [("👩\u200d🚀", "👩")]),
        ("same", "same", []),
    ],
)
def test_edits_are_short_and_of_whole_words(
    before: str, after: str, wanted: list[tuple[str, str]]
) -> None:
    found = edits(before, after)
    assert [(before[start:end], new) for start, end, new in found] == wanted


def test_markup_stays_and_only_wanted_rules_match() -> None:
    texts = Texts(Scripted(lambda s: s.replace("have", "has").replace("  ", " ").capitalize()))
    data = {
        "annotation": [
            {"text": "she "}, {"markup": "<b>"}, {"text": "have"}, {"markup": "</b>"},
            {"text": " it 😀."}, {"markup": "<br>", "interpretAs": "\n\n"},
            {"text": "then we have. "},
            {"markup": "<img>", "interpretAs": "He have it now."},
        ]
    }  # fmt: skip
    whole = "".join(part.get("text", part.get("markup", "")) for part in data["annotation"])
    for sent in (data, json.dumps(data)):
        matches = texts.check("", data=sent)
        found = applied(whole, matches)
        assert found == "She <b>has</b> it 😀.<br>Then we has. <img>"
        assert whole.encode("utf-16-le")[2 * matches[1]["offset"] :].startswith(b"h\0a\0v\0e\0")
    tilde = [{"text": "She has"}, {"markup": "~", "interpretAs": " "}, {"text": "been here now."}]
    texts.decoder.answer = lambda s: s.replace("has been", "was")
    assert texts.check("", data={"annotation": tilde}) == [], "as long as what it is read as"
    texts.decoder.answer = lambda s: s.replace("have", "has").capitalize()
    for fields, rules in (
        ({}, {"T5_CASE", "T5_AGREEMENT"}),
        ({"disabledRules": "X,T5_CASE"}, {"T5_AGREEMENT"}),
        ({"disabledCategories": "GRAMMAR"}, {"T5_CASE"}),
        ({"enabledRules": "T5_AGREEMENT", "enabledOnly": "true"}, {"T5_AGREEMENT"}),
        ({"enabledCategories": "CASING", "enabledOnly": "true"}, {"T5_CASE"}),
        ({"enabledRules": "T5_AGREEMENT", "enabledOnly": "false"}, {"T5_CASE", "T5_AGREEMENT"}),
    ):
        assert {match["rule"]["id"] for match in texts.check("we have it.", **fields)} == rules


def test_what_was_held_back_is_shown_to_the_picky() -> None:
    texts = Texts(Scripted({"We have it.": "Nothing.", "He go.": "He goes."}.__getitem__))
    text = "We have it. He go."
    (match,) = texts.check(text)
    first, second = texts.check(text, level="picky")
    assert second == match and applied(text, [first, second]) == "Nothing. He goes."
    assert first["message"].endswith(
        "Held back: its output is too different, with a similarity of 0.26."
    )
    assert texts.check("", level="picky") == []
    texts.decoder.answer = lambda s: ""
    assert texts.check(text, level="picky") == [], "nothing can take its place"


def test_languages_and_wrong_fields_are_refused_in_one_line() -> None:
    texts = Texts(Scripted(str.upper), corrects=["en", "de"])
    french = "Je ne sais pas pourquoi il est venu hier soir chez nous."
    found = check({"text": french, "language": "auto"}, texts)  # type: ignore[arg-type]
    assert found["language"]["code"] == "fr" and found["matches"] == []
    reason = "the text seems to be French (fr), and the model corrects English (en), German (de)"
    assert found["warnings"] == {"incompleteResults": True, "incompleteResultsReason": reason}
    assert languagetool.corrects({"text": french, "language": "en_GB"}, texts.tokenizer)
    assert not languagetool.corrects({"text": french, "language": "auto"}, texts.tokenizer)
    for language in ("en", "en-US", "de_AT", "auto"):
        assert texts.check("ach so.", language=language)
    cases: Any = (
        ({"language": "fr"}, "language is 'fr', and the model corrects English (en), German (de)"),
        ({"language": None}, "language must be text, got null"),
        ({"language": "en-!!!"}, "language is 'en-!!!', and the model corrects English (en)"),
        ({"text": 3}, "text must be text, got 3"),
        ({"data": '{"text": "a"}'}, "there are both text and data"),
        ({"text": "", "data": '{"text": "a", "annotation": []}'}, "data has both text and annot"),
        *(
            ({"text": "", "data": data}, "data must be an object with text, or with a list")
            for data in (
                "{",
                "[]",
                "{}",
                '{"text": 3}',
                '{"annotation": [3]}',
                '{"annotation": [{}]}',
                {"annotation": [{"markup": 1}]},
            )
        ),
    )
    for fields, wrong in cases:
        with pytest.raises(Refused, match=re.escape(wrong)) as refused:
            texts.check("a", **fields)
        check_message(str(refused.value))


def test_what_has_no_end_takes_no_time() -> None:
    """Quadratic ones would take minutes, in which the whole server would stand still."""
    began = time.perf_counter()
    for unit in ("<!--", "<script>", "<a", "<a '", "<!x", "<pre >", "</", "&"):
        page = WebPage((unit * 50_000).encode(), "x.html")
        assert page.rewritten(page.text) == (unit * 50_000).encode()
    for unit in ("a", "{", "$", "a@", "%(", "`", "<a", "1,", "www."):
        GERMAN.fault(unit * 50_000, "x")
        same_facts(unit * 50_000, unit)
    assert edits("a " * 50_000, "a " * 50_000) == []
    assert time.perf_counter() - began < 30


def test_html_with_what_is_like_tags() -> None:
    for page, text, made in (
        ('<p>Das <img alt="a > b" src=x> gut', "Das gut", None),
        ("<pre-view>Das</pre-view><pre>x</pre>", "Das", None),
        ("<b>Hallo</b> <i>wlt</i> hier", "Hallo wlt hier", "<b>Hallo</b> <i>Welt</i> hier"),
        ("<p>Das <button>gut</button> ja", "Das ja\ngut", None),
    ):
        found = WebPage(page.encode(), "x.html")
        assert found.text == text and found.rewritten(text).decode() == page
        if made:
            assert found.rewritten("Hallo Welt hier").decode() == made
    lines = WebPage(b"<p>Das <button>gut</button> ja", "x").rewritten("This yes\ngood")
    assert lines.decode() == "<p>This <button>good</button> yes"


def test_html_keeps_its_tags() -> None:
    page = (
        "<!DOCTYPE html><html><head><title>Titel hier</title><style>p {a: b}</style></head>\n"
        "<body>\n  <p class='x'>Das ist\n  <b>sehr</b> gut &amp; <a href=\"/gut\">neu</a>.</p>"
        "<!-- Das --><script>let das = '<p>';</script>\n<ul><li>eins<li> <i>zwei</i>\n</ul>"
        "<pre>das  ist</pre></body></html>"
    )
    found = WebPage(page.encode(), "x.html")
    assert found.text == "Titel hier\nDas ist sehr gut & neu.\neins\nzwei"
    assert found.rewritten(found.text) == page.encode(), "where nothing changes"
    assert [found.number(line) for line in (1, 2, 3, 4)] == [1, 3, 5, 5]
    new = "A title\nThis is very good & <new>.\none\ntwo"
    made = found.rewritten(new).decode()
    assert re.findall("<[^>]*>", made.replace("&lt;", "").replace("&gt;", "")) == re.findall(
        "<[^>]*>", page
    )
    assert "<title>A title</title>" in made and "&amp; &lt;" in made and "&gt;" in made
    assert "<pre>das  ist</pre>" in made and "let das = '<p>'" in made and "<!-- Das -->" in made
    assert WebPage(made.encode(), "x").text == new
    assert found.not_kept() == ["line 3: the places of tags within it are estimates"]


# Over a real socket, with a model that corrects and one that translates:


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    from test_languages import make_translator

    own = {
        "correct-base": DecoderOptions(),
        "tiny": DecoderOptions(model=str(make_translator(tmp_path_factory.mktemp("tiny")))),
    }
    return Models([offered(name, options) for name, options in own.items()])


def offered(name: str, options: DecoderOptions) -> Model:
    return Model(name, lambda: Service(options.load), lambda: read_tokenizer(locate(options.model)))


@pytest.fixture(scope="module")
def server(models: Models) -> Iterator[Served]:
    with serving(models) as running:
        wait_until(lambda: models.state == "ready")
        yield running


def test_clients_of_languagetool_correct_texts(server: Served) -> None:
    tool = language_tool_python.LanguageTool("en-US", remote_server=server.url)
    assert tool.correct(TEXT) == RIGHT
    match = tool.check(TEXT)[1]
    assert (match.matched_text, match.replacements, match.rule_id) == (
        "have",
        ["has"],
        "T5_AGREEMENT",
    )
    tool.disabled_rules = {"T5_CASE"}
    assert tool.correct(TEXT) == RIGHT.replace("My", "my").replace("Paris", "paris")
    api = pylanguagetool()
    first, second, *others = api.get_languages(f"{server.url}/v2/")
    assert first == {"name": "English", "code": "en", "longCode": "en"}
    assert second == {"name": "English (United States)", "code": "en", "longCode": "en-US"}
    assert {each["longCode"] for each in others} >= {"en-GB", "en-AU"}
    found = api.check(TEXT, f"{server.url}/v2/", "auto", picky=True)
    assert applied(TEXT, found["matches"]) == RIGHT and found["language"]["code"] == "en"
    with pytest.raises(ValueError, match="language is 'de', and the model corrects"):
        api.check("Guten Tag", f"{server.url}/v2/", "de")


def test_texts_are_checked_in_each_of_the_ways_of_languagetool(server: Served) -> None:
    """Its users try a server by an address alone, and clients append paths to theirs."""
    text = "She have a apple."
    wanted = server.post("/v2/check", text=text, language="en-US").json()
    assert applied(text, wanted["matches"]) == "She has an apple."
    query, data = {"language": "en-US", "text": text}, json.dumps({"text": text})
    client, url = server.client, server.url
    for found in (
        client.get("/v2/check", params=query),
        client.get(f"{url}//v2/check/", params=query),
        client.post("/v2/check", params=query),
        client.post("/v2/check", params={"language": "en-US"}, data={"text": text}),
        client.post(
            "/v2/check", params={"language": "en-US"}, data={"language": "fr", "text": text}
        ),
        client.post("/v2/check", data={"language": "en-US", "data": data}),
        client.post("/v2/check/", json={"language": "en-US", "data": {"text": text}}),
        client.post("/v2/check", files={name: (None, value) for name, value in query.items()}),
        client.post(
            "/v2/check",
            content=gzip.compress(json.dumps(query).encode()),
            headers={"Content-Encoding": "gzip"},
        ),
    ):
        assert found.status_code == 200 and found.json() == wanted, found.text
    german = server.client.get(
        "/v2/check", params={"language": "auto", "text": "Das ist ein Haus, und es ist gross."}
    ).json()
    reason = german["warnings"]["incompleteResultsReason"]
    assert reason == "the text seems to be German (de), and the model corrects English (en)"
    assert german["matches"] == [] and german["warnings"]["incompleteResults"]
    for headers, status in (({}, 200), ({"sec-fetch-site": "cross-site"}, 403)):
        assert client.get("/v2/check", params=query, headers=headers).status_code == status
    for method in ("PUT", "DELETE"):
        assert client.request(method, "/v2/check").status_code == 405


def pylanguagetool() -> Any:
    """The client's module, without its command, which imports what Python no longer has."""
    package = importlib.util.find_spec("pylanguagetool")
    assert package and package.origin
    path = Path(package.origin).with_name("api.py")
    spec = importlib.util.spec_from_file_location("pylanguagetool_api", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_clients_of_libretranslate_translate_texts(server: Served, translator: Any) -> None:
    client = LibreTranslateAPI(server.url)
    targets = {"de": ["fr"], "fr": ["de"]}
    assert {each["code"]: each["targets"] for each in client.languages()} == targets
    assert client.detect("Das ist ein Haus.")[0]["language"] == "de"
    wanted = [translator.translating("fr", "de").rewrite(text) for text in (TEXT, "Guten Tag.")]
    assert client.translate(TEXT, "de", "fr") == wanted[0].text
    fields = {"q": [TEXT, "Guten Tag."], "source": "de", "target": "French"}
    found = server.post("/translate", **fields).json()
    assert found["translatedText"] == [each.text for each in wanted]
    kept = [piece for each in wanted for piece in each.kept]
    assert found["kept"] == [{"text": p.source, "reason": p.reason} for p in kept]
    found = server.post("/translate", **fields | {"source": "auto"}).json()
    assert [each["language"] for each in found["detectedLanguage"]] == ["en", "de"]
    for changes, wrong in (
        ({"target": "tlh"}, "target is 'tlh', which is not among the model's languages"),
        ({"target": "x" * 500}, f"target is '{'x' * 27}...{'x' * 28}', which names no language"),
        ({"source": "x" * 500}, f"source is '{'x' * 27}...{'x' * 28}', which names no language"),
        ({"target": None}, "target must be text"),
        ({"q": 3}, "q must be a text or a list of"),
        ({"format": "pdf"}, "format must be text or html"),
        ({"model": "absent"}, "there is no model 'absent' here: use 'correct-base' or 'tiny'"),
    ):
        response = server.post("/translate", **fields | changes)
        assert response.status_code in (400, 404) and wrong in response.json()["error"]
        check_message(response.json()["error"])
    assert server.client.post("/translate", content=b"q=\xff").status_code == 400
    assert server.client.post("/v2/check", content=b"&".join([b"a=1"] * 200)).status_code == 400


@pytest.fixture(scope="module")
def translator(models: Models) -> Any:
    return models.models["tiny"].make()._load()


def test_forms_are_read_as_libretranslate_reads_them(server: Served) -> None:
    fields = {"q": "Guten Tag.", "source": "de", "target": "fr"}
    wanted, client = server.post("/translate", **fields).json(), server.client
    for found in (
        client.post("/translate", data=fields),
        client.post("/translate", files={name: (None, value) for name, value in fields.items()}),
        client.post("/translate", params=fields),
        client.post("/translate/", data=fields | {"q": "x"}, params={"q": "Guten Tag."}),
    ):
        assert found.status_code == 200 and found.json() == wanted
    for given, wrong in (
        ({"data": fields | {"q": '["Guten Tag.", "Ja."]'}}, "q is a list, and the q of a form is"),
        ({"data": fields | {"q": ["Guten Tag.", "Ja."]}}, "q comes more than once"),
        ({"params": fields | {"q": ["a", "b"]}}, "q comes more than once"),
        ({"files": {"q": ("q.txt", b"Guten Tag.")}}, "the form cannot be read (Too many files"),
    ):
        refused = client.post("/translate", **given)  # type: ignore[arg-type]
        assert refused.status_code == 400 and wrong in refused.json()["error"]
        check_message(refused.json()["error"])


def language_of(server: Served, text: str) -> list[dict[str, Any]]:
    """Return the languages that a text may be in, the likeliest first."""
    return server.post("/detect", q=text).json()  # type: ignore[no-any-return]


def test_languages_are_told_among_those_that_are_served(server: Served) -> None:
    for text, code, least in (
        ("Das ist ein Haus.", "de", 99),
        ("Guten Tag.", "de", 80),
        ("Bonjour !", "fr", 40),
        ("Vielen Dank.", "de", 40),
        ("Je ne sais pas.", "fr", 95),
    ):
        best, *others = found = language_of(server, text)
        assert best["language"] == code and best["confidence"] >= least and len(others) == 2
        assert {each["language"] for each in found} == {"en", "de", "fr"}
    assert language_of(server, "Questa è una bella casa, e mi piace.")[0]["confidence"] < 1
    assert language_of(server, "This is a house.")[0]["language"] == "en"


def test_languages_of_texts_are_told_one_by_one(server: Served) -> None:
    texts = ["Das ist ein Haus.", "Je ne sais pas.", "OK", "Das ist gut so."]
    found = server.post("/translate", q=texts, source="auto", target="fr").json()
    codes = [each["language"] for each in found["detectedLanguage"]]
    assert codes == ["de", "fr", "de", "de"]
    assert found["translatedText"][1] == texts[1], "it is in the target language already"


def test_texts_in_the_target_language_stay_as_they_are(server: Served) -> None:
    texts = ["Das ist ein Haus.", "Je ne sais pas.", "OK", "Das ist gut so."]
    for target, source in (("de", "de"), ("German", "de"), ("de", "de-DE"), ("fr", "French")):
        found = server.post("/translate", q=texts, source=source, target=target).json()
        assert found["translatedText"] == texts and found["kept"] == []
    found = server.post("/translate", q="Das ist ein Haus.", source="auto", target="de").json()
    assert found["translatedText"] == "Das ist ein Haus."
    assert found["detectedLanguage"]["language"] == "de"


def test_languages_that_are_not_served_are_told_of_texts_that_are_long_enough() -> None:
    assert detected("Das ist ein Haus.", ["en"])[0] == "de"
    assert detected("Guten Tag.", ["en"])[0] == "en", "too short to tell"
    assert detected("สวัสดีครับผมชื่อสมชาย", ["en"])[0] == "th", "it has no blanks between words"


def test_a_translation_that_is_none_says_so() -> None:
    """Each of its outputs was refused."""
    texts = Texts(Scripted(lambda s: s if "a" in s else "The house.", languages=("de", "en")))
    texts.decoder.prefix = ""
    texts.translate = lambda *_: None  # type: ignore[attr-defined]
    texts.document = partial(Document, texts.decoder)  # type: ignore
    fields = {"source": "de", "target": "en"}
    for q, part in (
        ("Das ist das alte Haus.", "nothing was translated"),
        (["Das ist das alte Haus.", "Die Kirche.", "Da war das."], "2 of 3 passages stayed as"),
    ):
        found = translate(fields | {"q": q}, texts)  # type: ignore[arg-type]
        assert found["warnings"]["incompleteResults"], found
        assert found["warnings"]["incompleteResultsReason"].startswith(part)
        assert found["warnings"]["incompleteResultsReason"].endswith(": see kept")


def test_a_translation_of_html_keeps_its_tags() -> None:
    words = {"Das ist ein gutes Haus.": "That is a good house.", "Tag": "Day"}
    texts = Texts(Scripted(words.__getitem__, languages=("de", "en"), prefix="", limit=99))
    texts.translate = lambda *_: None  # type: ignore[attr-defined]
    texts.document = partial(Document, texts.decoder)  # type: ignore
    fields = {"q": "<h1>Tag</h1><p>Das ist ein <b>gutes Haus</b>.", "source": "de", "target": "en"}
    found = translate(fields | {"format": "html"}, texts)  # type: ignore[arg-type]
    assert found == {
        "translatedText": "<h1>Day</h1><p>That is a <b>good house</b>.",
        "kept": [],
        "warnings": {"incompleteResults": False},
        "passages": 2,
    }


def test_models_say_what_they_do_and_are_loaded_when_asked_for(server: Served) -> None:
    first, second = server.client.get("/v1/models").json()["data"]
    assert (first["id"], first["loaded"], first["corrects"]) == ("correct-base", True, ["en"])
    assert first["translates"] == [] and second["corrects"] == [] and second["id"] == "tiny"
    assert [each["code"] for each in second["translates"]] == ["de", "fr"]
    found = server.post(model="tiny", prompt="Guten Tag.", max_tokens=3).json()
    assert found["model"] == "tiny" and found["usage"]["completion_tokens"] == 3
    assert server.client.get("/v1/models/tiny").json()["loaded"]
    assert server.post(prompt="He go home.").json()["choices"][0]["text"] == "He goes home."


def test_texts_of_many_clients_are_those_of_one(server: Served, shipped: Any) -> None:
    """They go side by side with completions, and one text cannot fill the queue."""
    texts = [" ".join(LEARNERS[i : i + 5]) for i in range(0, 40, 5)] + [" ".join(LEARNERS[:70])]
    found: dict[str, str] = {}

    def ask(text: str) -> None:
        answer = server.post("/v2/check", text=text, language="en").json()
        found[text] = applied(text, answer["matches"])

    threads = [threading.Thread(target=ask, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    assert server.post(prompt="He go home.").json()["choices"][0]["text"] == "He goes home."
    for thread in threads:
        thread.join(120)
    least = shipped.min_probability
    assert found == {text: shipped.rewrite(text, min_probability=least).text for text in texts}


def test_texts_that_have_begun_wait_for_room(
    models: Models, shipped: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only their first sentences are refused by a full queue."""
    service, text = Service(lambda: shipped, batch_size=2, max_queue=4), " ".join(LEARNERS[:12])
    submit, full = service.submit, [False, True, True, False, True]

    def submitted(*given: Any) -> Any:
        if full and full.pop(0):
            raise Refused(429, "the queue is full: wait and send the request again")
        return submit(*given)

    monkeypatch.setattr(service, "submit", submitted)
    small = replace(models.first, make=lambda: service, service=None)
    with serving(Models([small])) as server:
        wait_until(lambda: server.client.get("/health").status_code == 200)
        answer = server.post("/v2/check", text=text, language="en")
        assert answer.status_code == 200 and not full
        wanted = shipped.rewrite(text, min_probability=shipped.min_probability).text
        assert applied(text, answer.json()["matches"]) == wanted
        full.append(True)
        text = " ".join(LEARNERS[12:20])
        assert server.post("/v2/check", text=text, language="en").status_code == 429


@pytest.fixture(scope="module")
def shipped(models: Models) -> Any:
    return models.models["correct-base"].make()._load()


def test_rows_are_free_once_the_client_of_a_text_has_left(server: Served, models: Models) -> None:
    service = models.first.service
    assert service
    before = service.figures()["emitted"]
    some = [f"Yesterday {each}" for each in LEARNERS * 3]  # which no other test has asked for
    body = {"text": " ".join(some), "language": "en"}
    connection = HTTPConnection("127.0.0.1", server.port)
    connection.request("POST", "/v2/check", json.dumps(body))
    wait_until(lambda: service.figures()["emitted"] > before)
    connection.close()
    wait_until(lambda: not models.first.users)
    wait_until(lambda: not service.figures()["rows"] and not service.figures()["queued"])
    emitted = service.figures()["emitted"]
    time.sleep(0.3)
    assert service.figures()["emitted"] == emitted < before + 3000, "half of the text at most"


def test_keys_come_in_headers_or_in_fields() -> None:
    with serving(api_keys=["abc", "def"]) as server:
        for path in ("/v2/languages", "/languages"):
            assert server.client.get(path).status_code == 200
        for path in ("/v2/check", "/detect"):
            fields = {"text": "", "q": "a", "language": "en"}
            for key in ({}, {"api_key": "x"}, {"apiKey": ""}):
                refused = server.post(path, **fields | key)
                assert refused.status_code == 403 and "API key" in refused.json()["error"]
        assert server.post("/detect", **fields, api_key="def").status_code == 200
        assert server.post("/detect", **fields, apiKey="abc").status_code == 200
        headers = {"Authorization": "Bearer abc"}
        assert server.client.post("/detect", json=fields, headers=headers).status_code == 200
