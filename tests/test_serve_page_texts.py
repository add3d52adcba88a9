"""The page of the server: how it corrects and translates texts, in a browser."""

import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from browsing import needs_browser, text, wait_for
from conftest import REPOSITORY
from serving import FakeService, Served, serving, started, wait_until


@pytest.fixture
def server() -> Iterator[Served]:
    with serving(FakeService(), model="correct-base") as made:
        yield made


def answer(page: Any, path: str, reply: Callable[[Any], Any]) -> list[Any]:
    """Let a function answer what the page asks for at a path; return the list of what it asks."""
    asked: list[Any] = []

    def answer(route: Any) -> None:
        asked.append(route.request.post_data_json)
        found = reply(asked[-1])
        if isinstance(found, Exception):
            route.fulfill(status=400, json={"error": str(found)})
        else:
            route.fulfill(json=found)

    page.route(f"**/{path}", answer)
    return asked


def model(name: str, corrects: list[str], **translates: list[str]) -> dict[str, Any]:
    found = [{"code": code, "name": code.upper(), "targets": to} for code, to in translates.items()]
    return {"id": name, "loaded": False, "corrects": corrects, "translates": found}


def match(before: str, old: str, new: str, why: str = "It may be wrong.") -> dict[str, Any]:
    """What LanguageTool's protocol says of a word with some text before it."""
    offset, length = (len(part.encode("utf-16-le")) // 2 for part in (before, old))
    return {"offset": offset, "length": length, "replacements": [{"value": new}], "message": why}


DOUBT = "It may be wrong. Held back: a token of its output has a probability of 0.5429, which ..."


def checked(fields: Any) -> Any:
    """Suggest AN for each "a", and hold back one for each "b"."""
    sent = fields["text"]
    found = [
        match(sent[: word.start()], word[0], f"{word[0].upper()}N<b>", DOUBT * (word[0] == "b"))
        for word in re.finditer(r"\b[ab]\b", sent)
    ]
    if "fail" in sent:
        return ValueError("the model is tired: ask later")
    return {"language": {"code": "de"}, "matches": found}


def open_correct(page: Any, server: Served) -> list[Any]:
    asked = answer(page, "v2/check", checked)
    page.goto(f"{server.url}/")
    page.wait_for_selector("#mode_correct:checked")
    return asked


def result(page: Any) -> str:
    return str(page.evaluate("result()"))


def download(page: Any) -> tuple[str, str]:
    with page.expect_download() as found:
        page.click("#download")
    return found.value.suggested_filename, found.value.path().read_bytes().decode()


@needs_browser
def test_the_first_mode_that_models_can_do_is_shown(page: Any, server: Served) -> None:
    base, opus = model("base", ["fr"]), model("opus", [], de=["en"])
    for models, shown, first in [
        ([model("lm", [])], ["try"], "Generate"),
        ([opus], ["translate", "try"], "Translate"),
        ([opus, base], ["correct", "translate", "try"], "Correct"),
    ]:
        answer(page, "v1/models", lambda _, models=models: {"data": models})
        page.goto(f"{server.url}/")
        page.wait_for_selector("#modes:visible")
        seen = [
            mode for mode in ("correct", "translate", "try") if page.is_visible(f"#mode_{mode}")
        ]
        assert seen == shown and text(page, "generate") == first


@needs_browser
def test_models_and_languages_are_those_of_the_mode(page: Any, server: Served) -> None:
    base, large = model("base", ["fr", "it"]), model("large", ["it"])
    opus = model("opus", [], de=["en", "fr"], en=["de"])
    answer(page, "v1/models", lambda _: {"data": [opus, base, large]})
    page.goto(f"{server.url}/")
    page.wait_for_selector("#modes:visible")
    assert page.locator("#models option").all_text_contents() == ["base", "large"]
    assert page.locator("#language option").all_text_contents() == ["auto", "French", "Italian"]
    page.select_option("#models", "large")
    assert page.locator("#language option").all_text_contents() == ["auto", "Italian"]
    page.focus("#mode_correct")
    page.keyboard.press("ArrowRight")
    assert page.is_checked("#mode_translate") and text(page, "model") == "opus"
    assert page.locator("#to option").all_text_contents() == ["DE", "EN", "French"]
    page.select_option("#from", "en")
    assert page.locator("#to option").all_text_contents() == ["DE"]
    assert not page.is_visible("#max_tokens") and not page.is_visible("#language")
    page.check("#mode_try")
    assert page.locator("#models option").all_text_contents() == ["opus", "base", "large"]
    assert page.is_visible("#max_tokens") and not page.is_visible("#from")


@pytest.fixture
def corrected(page: Any, logged: list[str], server: Served) -> Iterator[Any]:
    """The page with two suggestions that are taken, and two that were held back."""
    asked = open_correct(page, server)
    page.fill("#prompt", "\u2603\U0001f40c a <i> b.\n\n\nHe a, b.\n")
    page.click("#generate")
    wait_for(page, "status", "Done: 2 suggestions, and 2 held back.")
    assert [fields["level"] for fields in asked] == ["picky"]
    yield page
    assert not logged


@needs_browser
def test_suggestions_are_shown_in_the_text_and_doubts_beside_it(corrected: Any) -> None:
    page = corrected
    assert result(page) == "\u2603\U0001f40c AN<b> <i> b.\n\n\nHe AN<b>, b.\n"
    assert page.locator("#correct del").all_text_contents() == ["a", "a"]
    assert page.locator("#correct ins").all_text_contents() == ["AN<b>", "AN<b>"]
    for tag, line in ("del", "line-through"), ("ins", "underline"):
        assert line in page.evaluate(
            f"getComputedStyle(document.querySelector('{tag}')).textDecoration"
        )
    doubts = page.locator("#held small").all_text_contents()
    assert doubts == ["Probability 54.3 %. It may be wrong."] * 2
    assert (text(page, "sure_count"), text(page, "held_count")) == ("2 of 2 taken", "0 of 2 taken")


@needs_browser
def test_suggestions_are_taken_and_left(corrected: Any) -> None:
    page = corrected
    page.focus("#sure input")
    page.keyboard.press("Space")
    assert result(page) == "\u2603\U0001f40c a <i> b.\n\n\nHe AN<b>, b.\n"
    page.click("#correct .pair:last-child > :first-child .left")  # the second b
    assert page.is_checked("#held li:last-child input")
    assert result(page) == "\u2603\U0001f40c a <i> b.\n\n\nHe AN<b>, BN<b>.\n"
    page.click("#sure_leave")
    assert page.is_disabled("#sure_leave") and text(page, "sure_count") == "0 of 2 taken"
    page.click("#held_take")
    assert result(page) == "\u2603\U0001f40c a <i> BN<b>.\n\n\nHe a, BN<b>.\n"


@needs_browser
def test_a_chosen_text_is_saved_copied_and_kept_in_other_modes(corrected: Any) -> None:
    page = corrected
    page.click("#held_take")
    changed = "\u2603\U0001f40c AN<b> <i> BN<b>.\n\n\nHe AN<b>, BN<b>.\n"
    assert download(page) == ("text.txt", changed)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.click("#copy")
    wait_for(page, "status", "Copied.")
    assert page.evaluate("navigator.clipboard.readText()") == changed
    page.check("#mode_try")
    assert not page.is_visible("#document")
    page.check("#mode_correct")
    assert page.is_visible("#document") and result(page) == changed, "choices are kept"


@needs_browser
def test_texts_are_cut_at_blank_lines_only(page: Any, server: Served) -> None:
    page.goto(f"{server.url}/")
    parts = [
        "\n", "# Title\n \n\n", "One\ntwo\n\n", "```py\na\n\n~~~\n\n```` x\n\n````\nb\n\n",
        "- item\n\n      more\n\n", "1. ~~~\n\n   b\n   ~~~\n\n", "```a``` b\n\n",
        "> ```\n>\n> c\n> ```\n\n", "Last\u2028line",
    ]  # fmt: skip
    assert page.evaluate("text => paragraphs(text)", "".join(parts)) == parts
    sizes = [100, 1950, 10, 3000, 1, 1]
    page.evaluate("sizes => window.rows = sizes.map(n => ({text: 'x'.repeat(n)}))", sizes)
    found = page.evaluate("slices(rows).map(some => some.map(row => row.text.length))")
    assert found == [[100, 1950], [10, 3000], [1, 1]]


@needs_browser
def test_results_come_a_few_paragraphs_at_a_time(page: Any, server: Served) -> None:
    asked = open_correct(page, server)
    some = "a word " * 100 + "\n\n"
    whole = some * 5 + "```\n\n" + some * 3 + "```\n\n" + "fail\n\n" + some
    page.fill("#prompt", whole)
    page.press("#prompt", "Control+Enter")
    wait_for(page, "error", "the model is tired: ask later")
    assert text(page, "status") == "Stopped at paragraph 7 of 8."
    assert [len(fields["text"]) > 2000 for fields in asked[:2]] == [True, True]
    assert whole.startswith("".join(fields["text"] for fields in asked))
    assert [fields["language"] for fields in asked] == ["auto", "de", "de"], "that of the beginning"
    assert result(page).count("AN<b>") == 800 and result(page).endswith(some), "the rest stays"


@needs_browser
def test_a_correction_is_stopped(page: Any, server: Served) -> None:
    page.route("**/v2/check", lambda route: None)  # which never comes back
    page.goto(f"{server.url}/")
    page.wait_for_selector("#mode_correct:checked")
    page.fill("#prompt", "He stall here.")
    with page.expect_request("**/v2/check"):
        page.click("#generate")
    assert text(page, "status") == "Working on paragraph 1 of 1."
    assert page.is_disabled("#models") and page.is_disabled("#mode_try")
    with page.expect_event("requestfailed"):
        page.keyboard.press("Escape")
    wait_for(page, "status", "Stopped at paragraph 1 of 1.")
    assert text(page, "error") == ""
    assert page.evaluate("document.activeElement.id") == "generate"
    assert result(page) == "He stall here."


@needs_browser
def test_files_are_opened_and_keep_their_names(page: Any, server: Served, tmp_path: Path) -> None:
    open_correct(page, server)
    (tmp_path / "my.notes.md").write_bytes(b"\xef\xbb\xbfone a\r\n\r\ntwo\r\n")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    page.set_input_files("#file", tmp_path / "my.notes.md")
    wait_until(lambda: page.input_value("#prompt") == "one a\n\ntwo\n")
    page.click("#generate")
    wait_for(page, "status", "Done: 1 suggestion,")
    assert download(page) == ("my.notes.corrected.md", "one AN<b>\r\n\r\ntwo\r\n")
    page.set_input_files("#file", tmp_path / "latin.txt")
    wait_for(page, "error", "latin.txt is not text in UTF-8: save it as such")
    page.fill("#prompt", "")
    page.fill("#prompt", "a")
    page.click("#generate")
    wait_for(page, "status", "Done: 1 suggestion,")
    assert download(page) == ("text.txt", "AN<b>")


@needs_browser
def test_texts_are_translated(page: Any, logged: list[str], server: Served, tmp_path: Path) -> None:
    models = [model("base", ["en"]), model("opus", [], de=["en"], fr=["en"])]
    answer(page, "v1/models", lambda _: {"data": models})

    def translated(fields: Any) -> Any:
        kept = [{"text": "<i>1912</i>", "reason": "its output lacks the number"}]
        found = {"detectedLanguage": {"language": "de"}} if fields["source"] == "auto" else {}
        return {"translatedText": fields["q"].upper(), "kept": kept, **found}

    asked = answer(page, "translate", translated)
    page.goto(f"{server.url}/")
    page.check("#mode_translate")
    whole = ("wort " * 300 + "\n\n") * 3
    (tmp_path / "a.txt").write_text(whole)
    page.set_input_files("#file", tmp_path / "a.txt")
    wait_until(lambda: page.input_value("#prompt") == whole)
    page.click("#generate")
    stayed = "2 passages of 3 stayed as they were."
    wait_for(page, "status", f"Translated from DE into English, but {stayed}")
    assert [fields.pop("q") for fields in asked] == [
        whole[: 2 * len(whole) // 3],
        whole[2 * len(whole) // 3 :],
    ]
    assert asked == [{"source": each, "target": "en", "model": "opus"} for each in ("auto", "de")]
    assert page.locator("#translate .pair > :last-child").all_text_contents() == ["WORT " * 300] * 3
    assert (
        page.locator("#kept li").all_text_contents()
        == ["<i>1912</i>its output lacks the number"] * 2
    )
    assert download(page) == ("a.en.txt", whole.upper()) and not logged


@needs_browser
def test_what_was_not_translated_is_not_done(page: Any, server: Served) -> None:
    answer(page, "v1/models", lambda _: {"data": [model("opus", [], de=["en"], en=["de"])]})
    kept = {"text": "Wort", "reason": "it is copied"}

    def translated(fields: Any) -> Any:
        count = fields["q"].count("wort")
        some = [kept] * (count if "all" in fields["q"] else count // 2)
        return {
            "translatedText": fields["q"],
            "detectedLanguage": {"language": "en" if "none" in fields["q"] else "de"},
            "kept": some,
            "passages": count,
        }

    answer(page, "translate", translated)
    page.goto(f"{server.url}/")
    page.wait_for_selector("#mode_translate:checked")
    page.select_option("#to", "en")
    long = "wort " * 500 + "\n\n"
    for sent, said in (
        ("all wort wort", "Nothing was translated: 2 passages of 2 stayed as they were."),
        ("all wort", "Nothing was translated: 1 passage of 1 stayed as it was."),
        (f"all {long}all {long}", "Nothing was translated: 1000 passages of 1000 stayed"),
        (f"all {long}some {long}", "Translated from DE into EN, but 750 passages of 1000 stayed"),
        ("some wort", "Done: translated from DE into EN."),
        ("none", "Nothing was translated: the text is in EN already."),
        ("...", "Nothing was translated: there are no words in the text."),
    ):
        page.fill("#prompt", sent)
        page.click("#generate")
        wait_for(page, "status", said)
        page.wait_for_selector("#generate:not([disabled])")


@needs_browser
def test_what_was_not_corrected_is_not_done(page: Any, server: Served) -> None:
    """A text, or a part of it, in a language that no model corrects."""
    reason = "the text seems to be German (de), and the model corrects English (en)"

    def checked_in_part(fields: Any) -> Any:
        if "das" not in fields["text"]:
            return checked(fields) | {"warnings": {"incompleteResults": False}}
        warnings = {"incompleteResults": True, "incompleteResultsReason": reason}
        return {"language": {"code": "de"}, "matches": [], "warnings": warnings}

    asked = answer(page, "v2/check", checked_in_part)
    page.goto(f"{server.url}/")
    page.wait_for_selector("#mode_correct:checked")
    german, english = "das " * 600 + "\n\n", "a " + "word " * 500 + "\n\n"
    for sent, said in (
        ("das hier", f"Nothing was corrected: {reason}."),
        (german * 2, f"Nothing was corrected: {reason}."),
        (german + english, f"Only in part: {reason}. 1 suggestion, and 0 held back."),
        (english, "Done: 1 suggestion, and 0 held back."),
    ):
        page.fill("#prompt", sent)
        page.click("#generate")
        wait_for(page, "status", said)
        page.wait_for_selector("#generate:not([disabled])")
    assert {fields["language"] for fields in asked} == {"auto"}, "none is known"


@needs_browser
def test_texts_ask_for_a_key_too(page: Any, server: Served) -> None:
    page.goto(f"{server.url}/")
    page.wait_for_selector("#mode_correct:checked")
    refusal = {"error": "the API key is missing or is not valid here: send a valid one"}
    page.route("**/v2/check", lambda route: route.fulfill(status=403, json=refusal))
    page.click("#generate")
    wait_for(page, "error", "the API key is missing or is not valid here")
    page.wait_for_selector("#key:focus")
    keys: list[str] = []
    page.unroute("**/v2/check")
    page.on("request", lambda request: keys.append(request.headers.get("authorization", "")))
    answer(page, "v2/check", checked)
    page.fill("#key", "abc")
    page.press("#key", "Enter")
    wait_for(page, "status", "Done")
    assert keys == ["Bearer abc"] and text(page, "error") == ""


@needs_browser
@pytest.mark.parametrize("paragraph", [10, 3000])
def test_long_texts_fit_small_screens_and_are_not_slow(
    page: Any, server: Served, paragraph: int
) -> None:
    open_correct(page, server)
    page.set_viewport_size({"width": 400, "height": 800})
    lines = ["a b " + "word " * 18 for _ in range(150)]
    page.fill("#prompt", "\n\n".join(lines) if paragraph == 10 else " ".join(lines))
    page.click("#generate")
    wait_for(page, "status", "Done: 150 suggestions, and 150 held back.")
    for mode in ("try", "translate", "correct"):
        if page.is_visible(f"#mode_{mode}"):
            page.check(f"#mode_{mode}")
            assert page.evaluate("document.documentElement.scrollWidth") == 400
    for action in ("by('held_take').click()", "by('sure').querySelector('input').click()"):
        seconds = page.evaluate(
            f"(() => {{ const start = performance.now(); {action};"
            "document.body.getBoundingClientRect(); return (performance.now() - start) / 1000 })()"
        )
        assert seconds < 1, action
    assert text(page, "sure_count") == "149 of 150 taken"


def applied(text: str, matches: list[Any]) -> str:
    """Apply LanguageTool's matches to a text."""
    units, pieces, at = text.encode("utf-16-le"), [], 0
    for each in matches:
        start, end = each["offset"], each["offset"] + each["length"]
        pieces += [units[2 * at : 2 * start].decode("utf-16-le"), each["replacements"][0]["value"]]
        at = end
    return "".join([*pieces, units[2 * at :].decode("utf-16-le")])


@needs_browser
def test_a_long_text_is_corrected_by_the_shipped_model(
    page: Any, logged: list[str], tmp_path: Path
) -> None:
    rows = (REPOSITORY / "tests" / "learners.tsv").read_text().splitlines() * 2
    sentences = [row.split("\t")[0] for row in rows]
    starts = range(0, len(sentences) + 5, 5)
    whole = "\n\n".join(" ".join(sentences[a:b]) for a, b in pairwise(starts))
    whole = " ".join(whole.split(" ")[:3000])
    answers: list[tuple[str, Any]] = []
    with started(tmp_path, change="") as (_, client):
        page.on(
            "requestfinished",
            lambda request: (
                request.url.endswith("check")
                and answers.append((request.post_data_json["text"], request.response().json()))
            ),
        )
        page.goto(str(client.base_url))
        page.wait_for_selector("#mode_correct:checked")
        page.fill("#prompt", whole)
        page.click("#generate")
        page.wait_for_selector("#generate:not([disabled])", timeout=540_000)
        wait_for(page, "status", "Done: ")
        for place in (3, -2):
            page.locator("#sure input").nth(place).press("Space")
        name, downloaded = download(page)
    assert "".join(sent for sent, _ in answers) == whole and len(answers) > 5
    wanted = [
        [each for each in found["matches"] if "Held back" not in each["message"]]
        for _, found in answers
    ]
    assert sum(map(len, wanted)) > 100
    every = [(place, each) for place, some in enumerate(wanted) for each in some]
    for place, each in (every[3], every[-2]):
        wanted[place].remove(each)
    expected = "".join(applied(sent, some) for (sent, _), some in zip(answers, wanted, strict=True))
    assert (name, downloaded) == ("text.txt", expected) and not logged
