"""The page of the server: results that are edited, swaps, checks as one types, and whole files."""

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from speculative_t5.documents import DOCUMENT_NAMES, DOCUMENT_SUFFIXES, NOT_READ
from speculative_t5.serve.page import PAGE_HTML

import pytest
from browsing import needs_browser, text, wait_for
from docx import Document as Word
from serving import FakeService, Served, serving, started, wait_until
from test_serve_documents import RIGHT as CORRECTED
from test_serve_documents import SRT, WRONG, word_file
from test_serve_page_texts import answer, checked, download, model, open_correct, result


@pytest.fixture
def server() -> Iterator[Served]:
    with serving(FakeService(), model="correct-base") as made:
        yield made


@needs_browser
def test_checks_follow_a_pause_and_spare_what_was_edited(
    page: Any, logged: list[str], server: Served
) -> None:
    asked = open_correct(page, server)
    page.fill("#prompt", "Not a.")
    page.wait_for_timeout(1200)
    assert not asked, "nobody has asked for it"
    page.check("#live")
    page.fill("#prompt", "")
    page.locator("#prompt").press_sequentially("He is a man.", delay=20)
    wait_for(page, "status", "Done: 1 suggestion")
    assert [fields["text"] for fields in asked] == ["He is a man."]
    page.locator("#correct [contenteditable]").fill("Mine.")
    page.locator("#prompt").press_sequentially(" And a.", delay=20)
    wait_for(page, "status", "The result was edited")
    assert result(page) == "Mine." and len(asked) == 1 and not logged


@needs_browser
def test_a_late_answer_is_offered(page: Any, server: Served) -> None:
    answer(page, "v1/models", lambda _: {"data": [model("opus", [], de=["en"], en=["de"])]})
    waiting: list[Any] = []
    page.route("**/translate", lambda route: waiting.append(route))
    page.goto(f"{server.url}/")
    page.wait_for_selector("#mode_translate:checked")
    assert page.is_disabled("#swap"), "the language is not known"
    page.select_option("#from", "de")
    page.select_option("#to", "en")
    assert page.is_enabled("#swap")
    page.fill("#prompt", "Ein Haus.")
    page.click("#generate")
    page.locator("#translate [contenteditable]").fill("My house.")
    waiting[0].fulfill(json={"translatedText": "A house.", "kept": [], "passages": 1})
    wait_for(page, "status", "Done")
    assert result(page) == "My house."
    page.click("#offers button")
    assert result(page) == "A house." and text(page, "offers") == ""
    page.click("#swap")
    assert page.input_value("#prompt") == "A house."
    assert (page.input_value("#from"), page.input_value("#to")) == ("en", "de")


@needs_browser
def test_a_file_comes_back_with_what_was_not_done(page: Any, server: Served) -> None:
    open_correct(page, server)
    data, sent = b"PK\x00\xff", list[Any]()

    def reply(route: Any) -> None:
        sent.append((route.request.url, route.request.post_data_buffer))
        kept = [{"place": "paragraph 2", "text": "<b>", "reason": "too long"}]
        found = {"name": "a.corrected.docx", "file": base64.b64encode(data).decode()}
        counts = {"changed": 1, "passages": 2, "kept": kept, "notes": ["a note"]}
        route.fulfill(body=json.dumps(found | counts), content_type="application/json")

    page.route("**/v1/documents?*", reply)
    page.set_input_files("#file", [{"name": "a.docx", "mimeType": "", "buffer": b"\x00\xfe"}])
    wait_for(page, "status", "Done: 1 of 2 passages changed")
    assert "name=a.docx" in sent[0][0] and sent[0][1] == b"\x00\xfe"
    shown = page.locator("#not_done li").all_text_contents()
    assert shown == ["paragraph 2: <b>too long", "a note"]
    with page.expect_download() as found:
        page.click("#rewritten_download")
    assert found.value.suggested_filename == "a.corrected.docx"
    assert found.value.path().read_bytes() == data


@needs_browser
def test_a_file_with_a_name_that_is_known_is_sent(page: Any, server: Served) -> None:
    open_correct(page, server)
    files = [{"name": name, "mimeType": "", "buffer": b"1"} for name in ("a.xml", "strings.xml")]
    page.set_input_files("#file", files[:1])
    assert text(page, "error").startswith("a.xml is a .xml file, which is not read: name it .txt")
    page.route("**/v1/documents?*", lambda route: route.fulfill(status=400, json={"error": "no"}))
    with page.expect_request("**/v1/documents?*name=strings.xml*"):
        page.set_input_files("#file", files[1:])


def test_the_page_offers_the_files_that_are_read() -> None:
    (accepted,) = re.findall(r'accept="([^"]*)"', PAGE_HTML)
    assert accepted.split(",") == [*DOCUMENT_SUFFIXES, ".xml", "text/*"]
    (whole,) = re.findall(r"const WHOLE = (\[.*?\]);", PAGE_HTML)
    shown = {".txt", ".md", ".markdown"}
    assert {*json.loads(whole)} == {*DOCUMENT_SUFFIXES, *DOCUMENT_NAMES} - shown
    assert DOCUMENT_NAMES == ("strings.xml",)
    (refused,) = re.findall(r"const NOT_READ = (\{.*?\});", PAGE_HTML)
    assert json.loads(refused) == NOT_READ


@needs_browser
def test_a_newer_text_ends_the_check_of_the_one_before(page: Any, server: Served) -> None:
    waiting: list[Any] = []
    page.route("**/v2/check", lambda route: waiting.append(route))
    page.goto(f"{server.url}/")
    page.wait_for_selector("#mode_correct:checked")
    page.check("#live")
    with page.expect_request("**/v2/check"):
        page.fill("#prompt", "He is a man.")
    with page.expect_event("requestfailed") as ended:
        page.fill("#prompt", "He is a b.")
    assert ended.value.post_data_json["text"] == "He is a man."
    wait_until(lambda: page.evaluate("1") and len(waiting) == 2)
    waiting[1].fulfill(json=checked(waiting[1].request.post_data_json))
    wait_for(page, "status", "Done: 1 suggestion, and 1 held back.")
    assert result(page) == "He is AN<b> b." and text(page, "error") == ""


@needs_browser
def test_a_check_of_what_is_typed_waits_for_a_file(page: Any, server: Served) -> None:
    asked, waiting = open_correct(page, server), list[Any]()
    page.route("**/v1/documents?*", lambda route: waiting.append(route))
    page.check("#live")
    with page.expect_request("**/v1/documents?*"):
        page.set_input_files("#file", [{"name": "a.srt", "mimeType": "", "buffer": b"1"}])
    page.fill("#prompt", "He is a man.")
    page.wait_for_timeout(1200)
    assert not asked and text(page, "status") == "Working on a.srt."
    waiting[0].fulfill(status=400, json={"error": "a.srt is wrong: save it again"})
    wait_for(page, "status", "Done: 1 suggestion")
    assert [fields["text"] for fields in asked] == ["He is a man."]


@needs_browser
def test_editing_keeps_marks_and_the_breaks_between_paragraphs(
    page: Any, logged: list[str], server: Served
) -> None:
    open_correct(page, server)
    page.fill("#prompt", "Not a.\n\n\nIs a, b.\n\nEnd")
    page.click("#generate")
    wait_for(page, "status", "Done: 2 suggestions, and 1 held back.")
    first, second, _ = page.locator("#correct [contenteditable]").all()
    first.locator("ins").click()
    assert result(page).startswith("Not AN<b>."), "a click in the result places the caret"
    page.keyboard.press("End")
    page.keyboard.type(" Mine.")
    page.keyboard.press("Enter")
    assert result(page) == "Not AN<b>. Mine.\n\n\n\nIs AN<b>, b.\n\nEnd"
    page.keyboard.press("Backspace")
    assert result(page) == "Not AN<b>. Mine.\n\n\nIs AN<b>, b.\n\nEnd"
    assert page.is_disabled("#sure li:first-child input")
    page.click("#held_take")
    page.click("#sure_leave")
    assert result(page) == "Not AN<b>. Mine.\n\n\nIs a, BN<b>.\n\nEnd", "what was edited stays"
    second.fill("One\ntwo")
    assert download(page)[1] == "Not AN<b>. Mine.\n\n\nOne\ntwo\n\nEnd"
    assert first.get_attribute("title") == "You have edited this paragraph" and not logged


@needs_browser
def test_files_are_opened_sent_or_refused_by_what_their_names_say(
    page: Any, server: Served, tmp_path: Path
) -> None:
    open_correct(page, server)
    sent: list[str] = []
    page.on("request", lambda request: sent.append(request.url))
    for name, wrong in (
        ("a.PDF", "a.PDF is a .pdf file, which is not read: save it as .docx"),
        ("a.json", "a.json is a .json file, which is not read: name it .txt"),
        ("a.constructor", ""),
        ("a.log", ""),
        ("README", ""),
    ):
        (tmp_path / name).write_text(f"{name} a")
        page.fill("#prompt", "")
        page.set_input_files("#file", tmp_path / name)
        if wrong:
            wait_for(page, "error", wrong)
            assert page.input_value("#prompt") == ""
        else:
            wait_until(lambda name=name: page.input_value("#prompt") == f"{name} a")
            assert text(page, "error") == ""
    assert not sent
    page.evaluate("openFile([new File([], 'a.txt'), new File([], 'b.txt')]).catch(complain)")
    wait_for(page, "error", "2 files were given, and one is taken at a time: choose one")


@needs_browser
def test_files_come_back_from_the_server_itself(
    page: Any, logged: list[str], tmp_path: Path
) -> None:
    with started(tmp_path, change="") as (_, client):
        page.goto(str(client.base_url))
        page.wait_for_selector("#mode_correct:checked")
        made = {}
        for name, data in (("a.docx", word_file()), ("b c.srt", SRT.encode())):
            page.set_input_files("#file", [{"name": name, "mimeType": "", "buffer": data}])
            wait_for(page, "status", "Done: 1 of 1 passage changed.")
            stem, suffix = name.split(".")
            wait_for(page, "rewritten_name", f"{stem}.corrected.{suffix}")
            with page.expect_download() as found:
                page.click("#rewritten_download")
            assert found.value.suggested_filename == f"{stem}.corrected.{suffix}"
            made[name] = found.value.path()
            assert page.input_value("#file") == "", "the same file can be chosen again"
        assert made["b c.srt"].read_bytes() == SRT.replace(WRONG, CORRECTED).encode()
        with made["a.docx"].open("rb") as file:
            (paragraph,) = Word(file).paragraphs
        assert paragraph.text == CORRECTED and all(run.bold for run in paragraph.runs)
        page.set_input_files("#file", [{"name": "d.docx", "mimeType": "", "buffer": b"no"}])
        wait_for(page, "error", "d.docx is not a document of Word: save it as .docx")
        assert text(page, "status") == "Stopped at d.docx." and not page.is_visible("#rewritten")
    assert len(logged) == 1, "the browser's line on the refusal"
