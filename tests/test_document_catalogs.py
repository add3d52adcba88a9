"""Files of translators, and notebooks: strings are corrected or translated, and all else stays."""

import codecs
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from speculative_t5.cli.document import FilesRun
from speculative_t5.cli.targets import OutputOptions, Target
from speculative_t5.documents import Document, RewriteOptions, format_of, is_document, read_file
from speculative_t5.documents.json_positions import MOST_NESTED, read_json_nodes
from speculative_t5.documents.translation import Translation
from speculative_t5.serve.document_files import opened_file

import pytest
import random_catalogs
import random_documents
from messages import check_message
from pieces import Scripted
from random_catalogs import CATALOG_KINDS

# Mistakes and what is right; sentences and their translations.
RIGHT = {"He go ": "He goes ", "a apple": "an apple", "They is": "They are"}
GERMAN = {
    "Open %s now.": "Öffnen Sie jetzt %s.",
    'Open the "file".': 'Öffnen Sie die "Datei".',
    "The first line is here.": "Die erste Zeile ist hier.",
    "The second one is bold.": "Die zweite Zeile ist fett.",
    "One file was found.": "Eine Datei wurde gefunden.",
    "%d files were found.": "%d Dateien wurden gefunden.",
    "%lld file was found.": "%lld Datei wurde gefunden.",
    "%lld files were found.": "%lld Dateien wurden gefunden.",
    "It's here, {name}.": 'Es ist "hier", {name}.',
    "Hello %1$s, you have %2$s.": "Sie haben %2$s, hallo %1$s.",
    "This is the shop.": "Das ist der Laden.",
    "Hello, world.": "Hallo, Welt.",
    "The title": "Der Titel",
}


def corrected(sentence: str) -> str:
    for wrong, right in RIGHT.items():
        sentence = sentence.replace(wrong, right)
    return sentence


def rewritten(data: bytes, name: str, to: str | None = None) -> tuple[bytes, list[str]]:
    """Return a file that is corrected, or translated, and what is said of it."""
    form = read_file(data, name)
    decoder: Any = Scripted(corrected, limit=10**6)
    if to:
        form.translate_into(to)
        decoder = Scripted(
            lambda text: GERMAN.get(text, text), limit=10**6, languages=("en", to), prefix=""
        )
    # The guard would leave code in corrections alone itself.
    options = RewriteOptions(by="sentence") if to else RewriteOptions(guard=False)
    document = Document(decoder, form.text, options, form.lines)
    return form.rewritten(document.result(document.rewrite()).text), form.not_kept()


def check_rewritten(before: str, after: str, name: str, to: str | None = None) -> list[str]:
    made, said = rewritten(before.encode(), name, to)
    assert made.decode() == after
    return said


def catalog(strings: dict[str, Any], **style: Any) -> str:
    style = {"indent": 2, "separators": (",", " : "), "ensure_ascii": False} | style
    return json.dumps({"sourceLanguage": "en", "strings": strings, "version": "1.0"}, **style)


def unit(value: str, state: str = "translated") -> dict[str, Any]:
    return {"stringUnit": {"state": state, "value": value}}


# --- Names


def test_names_say_the_formats() -> None:
    names = {"a.PO": "po", "a.pot": "po", "a.strings": "strings", "a.xcstrings": "xcstrings"}
    names |= {"a.ipynb": "ipynb", "res/values-de/strings.xml": "android", "strings.xml": "android"}
    names |= {"values/plurals.xml": "android", "x/values-b+de/arrays.xml": "android"}
    assert {name: format_of(name) for name in names} == names
    for name in ("a.xml", "plurals.xml", "x/arrays.xml", "layout/plurals.xml", "mystrings.xml"):
        assert not is_document(name)


# --- Placeholders

KINDS = (
    "%s %1$d %.2f %lld %-10s %*d %% %@ %1$@ %arg %#@files@ %(name)s %{name} %<name>s %1 %<PRId64> "
    "{name} ${name} {{name}} {{ name }} {0} {} {0,number} %zu %c %X"
).split(" ")


@pytest.mark.parametrize("kind", ["{when, date, short}", *KINDS])
def test_placeholders_have_to_be_in_a_translation(kind: str) -> None:
    kind = "{{ name }}" if kind in ("{{", "name", "}}") else kind
    translation = Translation("en", "de")
    assert translation.fault(f"There is {kind} here.", f"Es gibt {kind} hier.") is None
    for output in ("Es gibt etwas hier.", f"Es gibt {kind} {kind} hier."):
        fault = translation.fault(f"There is {kind} here.", output)
        assert fault and fault.startswith(f"its output has placeholder {kind!r}")


@pytest.mark.parametrize(
    ("name", "before"),
    [
        ("a.po", 'msgid "a"\nmsgstr "He go to %d and {name}."\n'),
        ("strings.xml", "<resources><string>He go to %d and {name}.</string></resources>"),
        ("a.strings", '"a" = "He go to %d and {name}.";'),
        ("a.xcstrings", catalog({"k": {"localizations": {"en": unit("He go to %d and {name}.")}}})),
    ],
)
def test_placeholders_stay_in_corrections(name: str, before: str) -> None:
    form = read_file(before.encode(), name)
    made = form.rewritten("He goes to %s and {names}.").decode()
    assert made == before.replace("He go", "He goes")
    assert "changes of a placeholder" in str(form.not_kept())


@pytest.mark.parametrize(
    "text", ["It is 100% sure.", "It is 5% of 20%.", "I {see a} set.", "50%off"]
)
def test_percents_and_braces_of_texts_are_no_placeholders(text: str) -> None:
    assert Translation("en", "de").fault(text, text.replace("%", " Prozent ").strip()) in (
        None,
        "its output is not translated",
    )


# --- gettext

HEADER = """\
# Translations.
#, fuzzy
msgid ""
msgstr ""
"Project-Id-Version: He go home.\\n"
"Content-Type: text/plain; charset=UTF-8\\n"
"Plural-Forms: nplurals=3; plural=(n%10==1 ? 0 : n%10<=4 ? 1 : 2);\\n"

"""


def test_translations_of_a_catalog_are_corrected() -> None:
    before = (
        '#. He go home.\n#: a.c:1\n#, c-format\nmsgctxt "He go "\nmsgid "He go to %s."\n'
        'msgstr ""\n"\\tHe go to %s and \\"a apple\\"\\n"\n"and They is C:\\\\x.\\n"\n\n'
        'msgid "They is"\nmsgid_plural "He go "\nmsgstr[0] "He go to <b>it</b>."\nmsgstr[1]  ""\n\n'
        '#, fuzzy\nmsgid "a apple"\nmsgstr "I ate <a "\n"href=x>a apple</a> now."\n\n'
        'msgid "He go to school."\nmsgstr ""\n\n#~ msgid "a"\n#~ msgstr "He go to school."\n'
    )
    after = before.replace('"\\tHe go to %s and \\"a apple', '"\\tHe goes to %s and \\"an apple')
    after = after.replace('"and They is C', '"and They are C').replace(
        '"He go to <b>', '"He goes to <b>'
    )
    after = after.replace(">a apple", ">an apple")
    (said,) = check_rewritten(HEADER + before, HEADER + after, "a.po")
    assert said.startswith("line 28 left as is: there is no translation to correct")
    assert "href" not in read_file((HEADER + before).encode(), "a.po").text


def test_catalogs_are_filled_by_translating() -> None:
    before = (
        '#: a.c:1\n#, c-format\nmsgctxt "menu"\nmsgid "Open %s now."\nmsgstr ""\n\n'
        '#| msgid "old"\nmsgid "Open\\tthe \\"file\\".\\n"\nmsgstr ""\n\n'
        'msgid ""\n"The first line is here.\\n"\n"The second one "\n"is <b>bold</b>.\\n"\n'
        'msgstr ""\n\n'
        'msgid "One file was found."\nmsgid_plural "%d files were found."\n'
        'msgstr[0] ""\nmsgstr[1] ""\n\n'
        '#, fuzzy\nmsgid "Hello, world."\nmsgstr "Hullo."\n\n'
        'msgid "This is the shop."\nmsgstr "Der Laden."\n\n'
        'msgid "OK"\nmsgstr ""\n\n#~ msgid "Hello, world."\n#~ msgstr ""\n'
    )
    after = (
        '#: a.c:1\n#, fuzzy, c-format\nmsgctxt "menu"\nmsgid "Open %s now."\n'
        'msgstr "Öffnen Sie jetzt %s."\n\n'
        '#, fuzzy\n#| msgid "old"\nmsgid "Open\\tthe \\"file\\".\\n"\n'
        'msgstr "Öffnen Sie die \\"Datei\\".\\n"\n\n'
        '#, fuzzy\nmsgid ""\n"The first line is here.\\n"\n"The second one "\n'
        '"is <b>bold</b>.\\n"\nmsgstr ""\n"Die erste Zeile ist hier.\\n"\n'
        '"Die zweite Zeile ist <b>fett</b>.\\n"\n\n'
        '#, fuzzy\nmsgid "One file was found."\nmsgid_plural "%d files were found."\n'
        'msgstr[0] "Eine Datei wurde gefunden."\nmsgstr[1] "%d Dateien wurden gefunden."\n'
        'msgstr[2] "%d Dateien wurden gefunden."\n\n'
    )
    rest = before[before.index('#, fuzzy\nmsgid "Hello') :]
    said = check_rewritten(HEADER + before, HEADER + after + rest, "a.po", "de")
    assert any(each.startswith("line 31 left as is: a translator has to look") for each in said)
    assert any("stay empty" in each for each in said)
    crlf = (HEADER + before).replace("\n", "\r\n")
    assert rewritten(crlf.encode(), "a.po", "de")[0].decode() == (HEADER + after + rest).replace(
        "\n", "\r\n"
    )


@pytest.mark.parametrize(
    ("rule", "texts"),
    [
        ("nplurals=1; plural=0;", ["%d Dateien wurden gefunden."]),
        (
            "nplurals=2; plural=(n == 1);",
            ["%d Dateien wurden gefunden.", "Eine Datei wurde gefunden."],
        ),
        ("nplurals=2; plural=(((;", ["Eine Datei wurde gefunden.", "%d Dateien wurden gefunden."]),
    ],
)
def test_the_form_of_the_number_1_is_the_singular(rule: str, texts: list[str]) -> None:
    header = f'msgid ""\nmsgstr "Plural-Forms: {rule}\\n"\n\n'
    entry = 'msgid "One file was found."\nmsgid_plural "%d files were found."\n'
    empty = "".join(f'msgstr[{i}] ""\n' for i in range(len(texts)))
    full = "".join(f'msgstr[{i}] "{text}"\n' for i, text in enumerate(texts))
    check_rewritten(header + entry + empty, f"{header}#, fuzzy\n{entry}{full}", "a.po", "de")


def test_a_long_translation_is_wrapped_as_gettext_does() -> None:
    text = " ".join(["word"] * 40) + "."
    GERMAN[text] = " ".join(["wort"] * 40) + "."
    before = f'msgid ""\n"{text}"\nmsgstr ""\n'
    made = read_file(before.encode(), "a.po")
    made.translate_into("de")
    lines = made.rewritten(GERMAN[text]).decode().splitlines()
    assert (
        max(map(len, lines[4:])) <= 79 and "".join(line[1:-1] for line in lines[4:]) == GERMAN[text]
    )


def test_a_line_break_within_a_sentence_is_read_as_a_blank() -> None:
    usage = (
        "This text is wrapped at the\\nend of lines, and it goes on to the\\nend of all.\\nNext a."
    )
    form = read_file(f'msgid "a"\nmsgstr "{usage}"\n'.encode(), "a.po")
    assert form.text.split("\n") == [usage.replace("\\n", " ", 2).split("\\n")[0], "Next a."]
    made = form.rewritten(form.text.replace("goes", "went")).decode()
    assert made == f'msgid "a"\nmsgstr "{usage.replace("goes", "went")}"\n'
    raw = "Here are some words, and <xliff:g id='a'>a b</xliff:g>\\nso on, {{ name }} too."
    before = f"<resources xmlns:xliff='x'><string>{raw}</string></resources>"
    form = read_file(before.encode(), "strings.xml")
    form.translate_into("de")
    made = form.rewritten("Hier sind ein paar Worte, und so weiter a b, {{ name }} auch.").decode()
    words = "Hier sind ein paar Worte, und so weiter\\n"
    lines = words + "<xliff:g id='a'>a b</xliff:g>, {{ name }} auch."
    assert made == before.replace(raw, lines)


@pytest.mark.parametrize("encoding", ["ISO-8859-1", "KOI8-R", "CP1251", "GBK", "EUC-JP"])
def test_a_catalog_keeps_its_encoding(encoding: str) -> None:
    word = {"ISO-8859-1": "né", "GBK": "中", "EUC-JP": "日本"}.get(encoding, "Ж")
    head = f'msgid ""\nmsgstr "Content-Type: text/plain; charset={encoding}\\n"\n\n'
    before = f'{head}msgid "a"\nmsgstr "{word} He go to school."\n'
    made, _ = rewritten(before.encode(encoding), "a.po")
    assert made.decode(encoding) == before.replace("He go", "He goes")
    form = read_file(before.encode(encoding), "a.po")
    made = form.rewritten(form.text.replace("school", "\N{SNOWMAN}"))
    assert made == before.encode(encoding), "what cannot be written is left, and listed"
    assert f"line 5 left as is: its new words have characters that {encoding} lacks" in str(
        form.not_kept()
    )


# --- Android and Apple

ANDROID = """\
<?xml version="1.0" encoding="utf-8"?>
<!-- He go home. -->
<!DOCTYPE resources [<!ENTITY app "He go home.">]>
<resources xmlns:xliff="urn:oasis:names:tc:xliff:document:1.2">
    <string name="He go " translatable="false">He go to school.</string>
    <string name="b">He go to \\'school\\' &amp; &lt;b&gt;a <i>apple</i>&lt;/b&gt;.
        \\nThey is caf\\u00e9.</string>
    <string name="c"><![CDATA[<b>He go home.</b> See &lt;a apple.]]></string>
    <string name="d">"He go  to  'school'."</string>
    <string name="e">@string/b</string>
    <string name="f">He go to &app; &#233;t
        <xliff:g id="n">Acme</xliff:g> and %1$s a apple.</string>
    <string name="g">He go to <xliff:g id="n">a apple</xliff:g>.</string>
    <plurals name="p">
        <item quantity="one">He go to %d
            school.</item><item quantity="other"/>
    </plurals>
    <string-array name="q"><item>They is here.</item></string-array>
    <integer-array name="r"><item>He go home.</item></integer-array>
    <string name="s">{n, plural, one {He go home.}}</string>
</resources>
"""


def test_string_resources_of_android_are_corrected() -> None:
    after = ANDROID
    for old, new in {
        "He go to \\'": "He goes to \\'",
        "&lt;b&gt;a <i>": "&lt;b&gt;an <i>",
        "They is caf": "They are caf",
        "<b>He go home": "<b>He goes home",
        "See &lt;a apple": "See &lt;an apple",
        '"He go  to': '"He goes  to',
        "He go to &app;": "He goes to &app;",
        "%1$s a apple": "%1$s an apple",
        "He go to <xliff": "He goes to <xliff",
        "He go to %d": "He goes to %d",
        "<item>They is": "<item>They are",
    }.items():
        assert after.count(old) == 1
        after = after.replace(old, new)
    (said, other) = check_rewritten(ANDROID, after, "values/strings.xml")
    assert said == "line 13: changes of a placeholder or a name, which has to stay, were left out"
    assert other.startswith("line 20 left as is: it says another thing for each number")


def test_string_resources_of_android_are_translated() -> None:
    before = (
        '<resources><string name="a">It\\\'s here, {name}.</string>\n'
        '<string name="b">Hello <xliff:g id="a">%1$s</xliff:g>, you have %2$s.</string>\n'
        '<string name="c">"Hello,\n  world."</string></resources>'
    ).replace("<resources>", '<resources xmlns:xliff="x">')
    after = before.replace("It\\'s here", 'Es ist \\"hier\\"').replace(
        "Hello,\n  world", "Hallo, Welt"
    )
    after = after.replace(
        'Hello <xliff:g id="a">%1$s</xliff:g>, you have %2$s.',
        'Sie haben %2$s, hallo <xliff:g id="a">%1$s</xliff:g>.',
    )
    assert not check_rewritten(before, after, "strings.xml", "de")


def test_a_name_that_stays_as_a_whole_is_never_lost() -> None:
    before = "<resources xmlns:xliff='x'><string>By <xliff:g>Acme</xliff:g>.</string></resources>"
    form = read_file(before.encode(), "strings.xml")
    form.translate_into("de")
    for text in ("Von uns.", "Von Acme, Acme.", "Von Acmes."):
        made = form.rewritten(text).decode()
        assert made.count("<xliff:g>Acme</xliff:g>") == 1
        assert "Acme," in text or (made == before and "left out" in str(form.not_kept()))


def test_what_would_be_a_reference_is_none() -> None:
    form = read_file(b'<resources><string name="a">Ask.</string></resources>', "strings.xml")
    assert b">\\@me</string>" in form.rewritten("@me")
    form = read_file(b"<resources><string>a \\\\ b</string></resources>", "strings.xml")
    assert b">a \\\\ c&lt;\\'\\\\\\\"&amp;<" in form.rewritten("a \\ c<'\\\"&")


APPLE = (
    '/* He go home. "a" = "b"; */\r\n"He go home." = "He go to \\"school\\", %@.\\nThey '
    'is caf\\U00e9 \\UD83D\\uDE00.";\r\nkey_1="a apple // is /* here */ now."; // He go home.\r\n'
    '"k";\r\n'
)


@pytest.mark.parametrize("mark", [b"", codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE])
def test_strings_of_apple_keep_their_encoding(mark: bytes) -> None:
    encoding = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}.get(
        mark, "utf-8"
    )
    after = APPLE.replace('= "He go', '= "He goes').replace("They is", "They are")
    after = after.replace('="a apple', '="an apple')
    made, said = rewritten(mark + APPLE.encode(encoding), "a.strings")
    assert made == mark + after.encode(encoding) and not said


def test_strings_of_apple_are_translated() -> None:
    before = '"It\'s here, {name}." = "It\\U2019s here, {name}.";\n"a" = "It\'s here, {name}.";\n'
    after = before.replace('"a" = "It\'s here', '"a" = "Es ist \\"hier\\"')
    assert not check_rewritten(before, after, "a.strings", "de")


# --- JSON


STRINGS: dict[str, Any] = {
    "": {},
    "Hello, world.": {},
    "He go home.": {"comment": "He go home.", "shouldTranslate": False},
    "a": {"extractionState": "manual", "localizations": {"en": unit("Open %s now.")}},
    "b": {
        "localizations": {"de": unit("", "new"), "en": unit("This is the shop."), "fr": unit("x")}
    },
    "c": {"localizations": {"de": unit("Da."), "en": unit("This is the shop.")}},
    "d": {
        "localizations": {
            "ar": unit("He go home."),
            "en": {
                "variations": {
                    "plural": {
                        "one": unit("%lld file was found."),
                        "other": unit("%lld files were found."),
                    }
                }
            },
        }
    },
    "This is the shop.": {"localizations": {}, "shouldTranslate": True},
}


@pytest.mark.parametrize(
    "style",
    [
        {},
        {"indent": 4, "separators": (",", "   :    ")},
        {"indent": None, "separators": (",", ":")},
    ],
)
def test_a_string_catalog_gets_a_language(style: dict[str, Any]) -> None:
    after = json.loads(json.dumps(STRINGS))
    made = {key: GERMAN[key] for key in ("Hello, world.", "This is the shop.")}
    for key, text in made.items():
        after[key].setdefault("localizations", {})["de"] = unit(text, "needs_review")
    after["a"]["localizations"] = {"de": unit("Öffnen Sie jetzt %s.", "needs_review")} | STRINGS[
        "a"
    ]["localizations"]
    after["b"]["localizations"]["de"] = unit("Das ist der Laden.", "needs_review")
    forms = {
        "one": unit("%lld Datei wurde gefunden.", "needs_review"),
        "other": unit("%lld Dateien wurden gefunden.", "needs_review"),
    }
    languages = after["d"]["localizations"]
    after["d"]["localizations"] = {
        "ar": languages["ar"],
        "de": {"variations": {"plural": forms}},
        "en": languages["en"],
    }
    said = check_rewritten(catalog(STRINGS, **style), catalog(after, **style), "a.xcstrings", "de")
    assert not said
    own = read_file(catalog(STRINGS, **style).encode(), "a.xcstrings")
    own.translate_into("en")
    assert own.text == "", "the catalog has that language"


def test_texts_of_a_string_catalog_are_corrected() -> None:
    strings = {
        "He go home.": {},
        "a": {
            "localizations": {
                "en": unit('He go to "café/".\nHe go to %@.'),
                "fr": unit("He go to it."),
            }
        },
    }
    before = catalog(strings).replace("é", "\\u00E9").replace("/", "\\/")
    after = before.replace('"He go to', '"He goes to').replace("\\nHe go to", "\\nHe goes to")
    after = after.replace('"He goes to it', '"He go to it')
    (said,) = check_rewritten(before, after, "a.xcstrings")
    assert said.startswith("line 4 left as is: the name of the entry is its text")


def test_new_characters_are_written_as_the_file_does() -> None:
    for source, made in {
        '"http:\\/\\/x \\u00e9 a."': '"http:\\/\\/x \\u00e9 \\/\\u00fc."',
        '"http://x é a."': '"http://x é /ü."',
        '"http://x \\u00e9 a."': '"http://x \\u00e9 /\\u00fc."',
    }.items():
        before = catalog({"k": {"localizations": {"en": unit("")}}}).replace('""', source)
        form = read_file(before.encode(), "a.xcstrings")
        assert form.rewritten("http://x é /ü.").decode() == before.replace(source, made)


def notebook(*cells: dict[str, Any], **style: Any) -> str:
    return json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}, **style)


def test_cells_of_markdown_are_rewritten() -> None:
    markdown = [
        "# The title\n",
        "\n",
        'He go to [the café](a.md) "x".\n',
        "\n",
        "```\n",
        "He go home.",
    ]
    code = {
        "cell_type": "code",
        "execution_count": 1,
        "metadata": {"a": "He go home."},
        "outputs": [{"output_type": "stream", "name": "stdout", "text": ["He go home.\n"]}],
        "source": ["# He go home.\n", "x = 1"],
    }
    cells = [
        {"cell_type": "markdown", "metadata": {}, "source": markdown},
        code,
        {"cell_type": "raw", "metadata": {}, "source": "He go home."},
        {"cell_type": "markdown", "metadata": {}, "source": "They is\r\nhere, 😀.\r\n"},
        {"cell_type": "markdown", "metadata": {}, "source": []},
    ]
    for style in ({}, {"indent": 1, "ensure_ascii": False}):
        before = notebook(*cells, **style)
        after = before.replace('"He go to [', '"He goes to [').replace("They is", "They are")
        check_rewritten(before, after, "a.ipynb")
    made, _ = rewritten(notebook(*cells).encode(), "a.ipynb", "de")
    assert made.decode() == notebook(*cells).replace("# The title", "# Der Titel")


def test_cells_are_numbered_and_each_is_a_text_of_its_own() -> None:
    texts = [
        "---\nHe go to it.",
        "and it goes on. ~~~~\n~~~\nHe go to code.",
        "He go to *it*.\n---",
    ]
    cells = [{"cell_type": "markdown", "source": text} for text in ("a", *texts)]
    before = notebook(*cells[1:])
    form = read_file(before.encode(), "a.ipynb")
    assert [form.number(i) for i in (2, 3, 6, 11)] == [1, 1, 2, 3]
    after = before.replace("He go to it", "He goes to it").replace("He go to *", "He goes to *")
    check_rewritten(before, after, "a.ipynb")


def test_json_says_where_its_values_are() -> None:
    text = '\ufeff{"a": [1, -2.5e3, true, null, "\\u00e9\\""], "b": {"c": {}, "d": [[]]}}\n'
    root = read_json_nodes(text, "a")
    found = root.get("b", "c")
    assert found and text[found.start : found.end] == "{}" and root.get("b", "x", "y") is None
    (_, array), _ = root.members.values()
    assert [each.value(text) for each in array.items] == [1, -2500.0, True, None, 'é"']


# --- What is wrong

BAD = [
    ("a.po", 'msgid "a"\nmsgstr "b\n', "line 2 of a.po is not as gettext has it, '\"b' cannot"),
    ("a.po", 'msgid "a"\n', "line 2 of a.po is not as gettext has it, the end cannot"),
    ("a.po", 'msgid "a"\nmsgstr[0] "b"\n', "line 2 of a.po is not as gettext has it, 'msgstr[0]'"),
    ("a.po", 'msgid "a"\nmsgstr "\\q"\n', "line 2 of a.po is not as gettext has it, '\\\\q'"),
    ("a.po", "msgid\nmsgstr ''\n", "line 2 of a.po is not as gettext has it"),
    ("a.po", 'x\nmsgid "a"\n', "line 1 of a.po is not as gettext has it, 'x'"),
    ("a.po", '"x"\n', "line 1 of a.po is not as gettext has it"),
    ("a.po", b'msgid "\xff"\nmsgstr ""\n', "a.po is not UTF-8: byte 0xff at offset 7"),
    ("a.po", '"Content-Type: text/plain; charset=zip\\n"', "a.po has the charset zip"),
    ("a.po", '"Content-Type: a; charset=utf-7\\n"', "a.po has the charset utf-7"),
    ("a.po", b'"Content-Type: a; charset=ASCII\\n" \xe9', "a.po is not in ASCII"),
    (
        "strings.xml",
        "<resources><string>a</resources>",
        "strings.xml is no XML at line 1, column 23",
    ),
    ("strings.xml", "<a/>\n<b/>", "strings.xml is no XML at line 2"),
    ("strings.xml", "<layout>\n<b/></layout>", "strings.xml has the element 'layout' around all"),
    ("strings.xml", '<?xml version="1.0" encoding="latin-1"?><a/>', "strings.xml is in latin-1"),
    ("strings.xml", b"<resources>\xff</resources>", "strings.xml is not UTF-8"),
    ("a.strings", '"a" = "b"\n"c" = "d";', "line 2 of a.strings, column 1, is not as Apple has it"),
    ("a.strings", '"a" = "b', "line 1 of a.strings, column 7, is not as Apple has it, '\"b'"),
    ("a.strings", '"a" = {', "line 1 of a.strings, column 7"),
    ("a.strings", '"a" = "b"', "line 1 of a.strings, column 10, is not as Apple has it, the end"),
    ("a.strings", b"bplist00x", "a.strings is a property list"),
    ("a.strings", '"a" = "b";'.encode("utf-16-le"), "a.strings is UTF-16 without its mark"),
    ("a.strings", b'\xff\xfe"\0\0\xd8', "a.strings is not UTF-16-LE at offset"),
    ("a.xcstrings", "{}", "a.xcstrings has no sourceLanguage and strings"),
    ("a.xcstrings", '{"sourceLanguage": "en", "strings": {"a": 1}}', "a.xcstrings has no source"),
    (
        "a.xcstrings",
        '{"a": 1,\n}',
        "a.xcstrings is no JSON at line 2, column 1, '}' instead of a name",
    ),
    ("a.ipynb", "[1 2]", "a.ipynb is no JSON at line 1, column 4, '2]' instead of , or the end"),
    ("a.ipynb", '{"a": 01}', "a.ipynb is no JSON at line 1, column 7"),
    ("a.ipynb", '{"a": "b\n"}', "a.ipynb is no JSON at line 1, column 7"),
    ("a.ipynb", '{"a": 1', "a.ipynb is no JSON at line 1, column 8, the end instead of"),
    ("a.ipynb", "{} {}", "a.ipynb is no JSON at line 1, column 4, '{}' instead of no more"),
    ("a.ipynb", "[" * 10**5, f"a.ipynb has more than {MOST_NESTED} values within values at line 1"),
    ("a.ipynb", '{"worksheets": [{}]}', "a.ipynb is a notebook of format 3"),
    ("a.ipynb", "{}", "a.ipynb has no cells"),
    ("a.ipynb", '{"cells": [{"cell_type": "markdown", "source": [1]}]}', "cell 1 of a.ipynb has a"),
    ("a.ipynb", '{"cells": [{"cell_type": "markdown"}]}', "cell 1 of a.ipynb has a source"),
]


@pytest.mark.parametrize(("name", "content", "found"), BAD)
def test_bad_files_are_refused_in_one_line(name: str, content: str | bytes, found: str) -> None:
    data = content.encode() if isinstance(content, str) else content
    with pytest.raises(ValueError) as error:
        read_file(data, name)
    check_message(str(error.value))
    assert str(error.value).startswith(found)


# --- The command and the server


def test_the_command_and_the_server_say_that_they_translate(tmp_path: Path) -> None:
    data = b'msgid "Hello, world."\nmsgstr ""\n'
    source, output = tmp_path / "a.po", tmp_path / "o.po"
    source.write_bytes(data)
    decoder: Any = Scripted(GERMAN.__getitem__, prefix="", languages=("en", "de"))
    run = FilesRun(decoder, RewriteOptions(), OutputOptions(), None, None, several=False)
    run.rewrite(Target(str(source), str(output), None))
    assert output.read_text() == '#, fuzzy\nmsgid "Hello, world."\nmsgstr "Hallo, Welt."\n'
    fields = {"name": "a.po", "target": "de"}
    assert opened_file(fields, data)["text"] == "Hello, world."
    assert opened_file({"name": "a.po"}, data)["text"] == ""


# --- Random files, and large ones


@pytest.mark.parametrize("name", CATALOG_KINDS)
def test_changes_of_random_files_leave_the_rest(name: str) -> None:
    for seed in range(150):
        assert not random_documents.faults_of(random_documents.KINDS[name], seed), seed


@pytest.mark.parametrize("name", CATALOG_KINDS)
def test_translations_of_random_files_leave_the_rest(name: str) -> None:
    for seed in range(150):
        assert not random_catalogs.faults_of_translation(CATALOG_KINDS[name], seed), seed


LARGE: dict[str, Callable[[int], str]] = {
    "a.po": lambda n: '#, c-format\nmsgid "a b %s."\nmsgstr "c \\"d\\" %s."\n\n' * n,
    "strings.xml": lambda n: "<resources>" + "<string>a <b>b</b>.</string>\n" * n + "</resources>",
    "a.strings": lambda n: '/* a */ "a" = "b %@ c.";\n' * n,
    "a.xcstrings": lambda n: catalog({f"{i} a.": {"localizations": {}} for i in range(n)}),
    "a.ipynb": lambda n: notebook(*[{"cell_type": "markdown", "source": ["a *b*.\n", "c"]}] * n),
}


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("to", [None, "de"])
def test_calls_grow_with_the_file_and_not_with_its_square(name: str, to: str | None) -> None:
    def calls(count: int) -> int:
        made, data = 0, LARGE[name](count).encode()

        def take(*_: object) -> None:
            nonlocal made
            made += 1

        sys.setprofile(take)
        try:
            form = read_file(data, name)
            if to:
                form.translate_into(to)
            form.rewritten(form.text.replace("a", "xy").replace("c", "z"))
        finally:
            sys.setprofile(None)
        return made

    calls(1)
    assert calls(400) < 4.5 * calls(100)
