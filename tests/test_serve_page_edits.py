"""The page of the server: results that are edited, swaps, checks as one types, and whole files."""

import base64
import json
from collections.abc import Iterator
from typing import Any

import pytest
from browsing import needs_browser, text, wait_for
from serving import FakeService, Served, serving
from test_serve_page_texts import answer, model, open_correct, result


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
