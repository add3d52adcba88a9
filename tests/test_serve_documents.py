"""Whole files over HTTP: each comes back in its own format, with what was not done."""

import base64
import io
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

from speculative_t5.checkpoints import locate, read_tokenizer
from speculative_t5.cli.options import DecoderOptions
from speculative_t5.serve import Models, Service
from speculative_t5.serve import Served as Model
from speculative_t5.serve.workers import Workers

import pytest
from docx import Document as Word
from messages import check_message
from serving import Served, served_as, serving, wait_until
from test_languages import make_translator

# A process that ends at the name of one file, and computes on at that of another.
SPECIAL = """
import sys; sys.path[:] = {path!r}
import os, time
from speculative_t5.serve import document_files, text_worker
opened_file = document_files.opened_file
def special_file(fields, data):
    if fields.get("name") == "ends.txt": os._exit(3)
    if fields.get("name") == "waits.txt": time.sleep(4)
    return opened_file(fields, data)
document_files.opened_file = special_file
text_worker.work_on_texts()
"""
COMMAND = [sys.executable, "-c", SPECIAL.format(path=sys.path)]
# One that translates a sentence as a tiny model cannot.
TRANSLATES = """
import sys; sys.path[:] = {path!r}
from pieces import Scripted
from speculative_t5.documents import Document
from speculative_t5.serve import text_worker, texts
answers = {{"Das ist ein Haus.": "C\'est une maison."}}
def document(self, text, options, lines):
    made = Scripted(lambda read: answers.get(read, ""), languages=self.languages, prefix="")
    return Document(made, text, options, lines)
texts.Remote.document = document
text_worker.work_on_texts()
"""
TRANSLATING = [sys.executable, "-c", TRANSLATES.format(path=sys.path)]
WRONG, RIGHT = "He go home.", "He goes home."


@pytest.fixture(scope="module")
def decoder() -> Any:
    return DecoderOptions().load()


@pytest.fixture(scope="module")
def server(decoder: Any) -> Iterator[Served]:
    workers = Workers(command=COMMAND, ahead=True)
    models = served_as("correct-base", Service(lambda: decoder), workers)
    with serving(models, max_body=200_000, max_text=5_000) as running:
        wait_until(lambda: models.state == "ready")
        yield running


def send(server: Served, name: str, data: bytes, **fields: str) -> Any:
    return server.client.post("/v1/documents", content=data, params={"name": name} | fields)


def made_of(answer: Any) -> bytes:
    assert answer.status_code == 200, answer.text
    return base64.b64decode(answer.json()["file"])


def word_file() -> bytes:
    document, file = Word(), io.BytesIO()
    document.add_paragraph(WRONG).runs[0].bold = True
    document.save(file)
    return file.getvalue()


def zip_bomb() -> bytes:
    """A document of Word of 130 kB whose text unpacks to 130 MB."""
    file = io.BytesIO(word_file())
    with ZipFile(file, "a", ZIP_DEFLATED) as package, package.open("word/more.xml", "w") as member:
        for _ in range(130):
            member.write(b" " * 10**6)
    return file.getvalue()


def test_files_of_android_are_told_by_their_names(server: Served) -> None:
    text = f'<resources><string name="a">{WRONG}</string></resources>'
    for name in ("strings.xml", "res/values-en/strings.xml", r"C:\res\values\arrays.xml"):
        answer = send(server, name, text.encode(), language="en")
        assert made_of(answer).decode() == text.replace(WRONG, RIGHT)
        assert answer.json()["name"] == re.sub(r".*[/\\]", "", name[:-4]) + ".corrected.xml"
    for name in ("arrays.xml", "other/strings.xml.xml"):
        error = send(server, name, text.encode()).json()["error"]
        assert "is a .xml file, which is not read" in error


SRT = f"1\r\n00:00:01,000 --> 00:00:02,000\r\n{WRONG}\r\n\r\n"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.txt", f"{WRONG}\n"),
        ("a b.srt", SRT),
        ("a.HTML", f"<p class=x><b>{WRONG}</b> <!-- {WRONG} --></p>"),
        ("{a}.md", f"# A title\n\n{WRONG}\n"),
    ],
)
def test_files_come_back_in_their_format(server: Served, name: str, text: str) -> None:
    answer = send(server, f"/some/folder/{name}", text.encode(), language="en")
    assert made_of(answer).decode() == text.replace(WRONG, RIGHT, 1)
    found, (stem, suffix) = answer.json(), name.rsplit(".", 1)
    assert found["name"] == f"{stem}.corrected.{suffix}"
    assert (found["language"], found["changed"], found["notes"]) == ("en", 1, [])


def test_a_word_file_keeps_its_marks(server: Served) -> None:
    (made,) = Word(io.BytesIO(made_of(send(server, "a.docx", word_file())))).paragraphs
    assert made.text == RIGHT and all(run.bold for run in made.runs)


def test_what_was_not_done_has_its_place_and_reason(server: Served) -> None:
    text = f"{WRONG}\n\nShe like {'a very ' * 400}big house.\n"
    answer = send(server, "a.txt", text.encode(), language="en")
    (kept,) = answer.json()["kept"]
    assert kept["place"] == "line 3" and kept["text"].startswith("She like") and kept["reason"]
    assert made_of(answer).decode() == text.replace(WRONG, RIGHT)


@pytest.mark.parametrize(
    ("name", "data", "fields", "status", "wrong"),
    [
        ("a.pdf", b"%PDF", {}, 400, "a.pdf is a .pdf file, which is not read: save it as .docx"),
        ("a.xyz", b"a", {}, 400, "name must be a name that ends in one of .txt"),
        ("a.docx", b"no package", {}, 400, "a.docx"),
        ("a.docx", zip_bomb(), {}, 400, "MB of text, and at most 100 are read: split it"),
        ("a.json", b"{}", {}, 400, "a.json is a .json file, which is not read: name it .txt"),
        ("a.txt", b"\xff\xfe", {}, 400, "a.txt"),
        ("a.txt", b"Hi. " * 1_300, {}, 413, "characters, and this server takes 5,000"),
        ("a.txt", b"a" * 200_001, {}, 413, "200,000"),
        ("a.txt", b"Hi.", {"language": "tlh"}, 400, "the language of the file is 'tlh'"),
        ("a.txt", b"Hi.", {"target": "de", "source": "en"}, 400, "into"),
        ("a.txt", b"Hi.", {"model": "absent"}, 404, "there is no model 'absent' here"),
        ("ends.txt", b"Hi.", {}, 500, "the server failed to answer"),
    ],
)
def test_a_refusal_is_one_line(
    server: Served, name: str, data: bytes, fields: dict[str, str], status: int, wrong: str
) -> None:
    answer = send(server, name, data, **fields)
    error = answer.json()["error"]
    error = error if isinstance(error, str) else error["message"]
    assert (answer.status_code, wrong in error) == (status, True), error
    check_message(error)
    assert send(server, "b.txt", WRONG.encode()).status_code == 200, "others are answered"


def test_a_file_is_translated(tmp_path: Path) -> None:
    options = DecoderOptions(model=str(make_translator(tmp_path)))
    tiny = Model(
        "tiny", lambda: Service(options.load), lambda: read_tokenizer(locate(options.model))
    )
    models = Models([tiny], workers=Workers(command=TRANSLATING))
    data = f"<!-- Hier --><p class=x>Das ist ein Haus.</p>\r\n<p>{'Wort ' * 20}</p>".encode()
    with serving(models) as server:
        wait_until(lambda: models.state == "ready")
        answer = send(server, "a.html", data, target="fr")
        again = send(server, "a.html", data, target="fr", source="fr")
        refused = send(server, "a.html", data, target="tlh")
    found = answer.json()
    assert made_of(answer) == data.replace(b"Das ist ein Haus.", b"C'est une maison.")
    assert (found["name"], found["language"], found["notes"]) == ("a.fr.html", "de", [])
    assert (found["passages"], found["changed"], len(found["kept"])) == (2, 1, 1)
    assert made_of(again) == data and again.json()["passages"] == 0, "it is in French already"
    assert refused.status_code == 400
    check_message(refused.json()["error"], "tlh")


def test_a_name_is_needed(server: Served) -> None:
    answer = server.client.post("/v1/documents", content=b"Hi.")
    assert answer.status_code == 400 and re.match("name must be text", answer.json()["error"])


def test_a_long_file_holds_up_nobody(server: Served) -> None:
    with ThreadPoolExecutor() as threads:
        long = threads.submit(send, server, "waits.txt", WRONG.encode())
        assert send(server, "b.txt", WRONG.encode()).status_code == 200
        assert not long.done()
        assert made_of(long.result()).decode() == RIGHT


def test_a_file_needs_a_key_where_there_are_keys(decoder: Any) -> None:
    models = served_as("correct-base", Service(lambda: decoder), Workers(ahead=True))
    with serving(models, api_keys=["abc"]) as server:
        wait_until(lambda: models.state == "ready")
        answer = send(server, "a.docx", b"no package")
        assert answer.status_code in (401, 403) and "key" in answer.json()["error"]
        assert send(server, "a.txt", WRONG.encode(), api_key="abc").status_code == 200
        server.client.headers["Authorization"] = "Bearer abc"
        assert send(server, "a.txt", WRONG.encode()).status_code == 200
