"""Print what LibreOffice shows of documents whose tracked changes are accepted or rejected.

    echo '["/tmp/a.docx", "accept"]' | python3 scripts/checks/libreoffice_text.py

Each line of the input is a list of JSON with the path of a document and "accept", "reject" or
"leave"; each of the output is a list of paragraphs, those of notes, text boxes and headers
included, or null if LibreOffice cannot open it. It needs LibreOffice and its module uno, which
Linux distributions have for their own Python. The LibreOffice that it starts has a profile of its
own.
"""

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from xml.etree import ElementTree

import uno
from com.sun.star.beans import PropertyValue
from com.sun.star.connection import NoConnectException
from com.sun.star.uno import Exception as UnoException

COMMANDS = {"accept": ".uno:AcceptAllTrackedChanges", "reject": ".uno:RejectAllTrackedChanges"}
TEXT = "{urn:oasis:names:tc:opendocument:xmlns:text:1.0}"
START_SECONDS = 60


class Office:
    """A LibreOffice that runs, with a profile in a folder."""

    def __init__(self, folder: str) -> None:
        pipe = f"{Path(folder).name}-{time.monotonic_ns()}"
        accept = f"--accept=pipe,name={pipe};urp;"
        profile = f"-env:UserInstallation=file://{folder}/profile"
        self._process = subprocess.Popen(
            ["soffice", "--headless", "--norestore", accept, profile], stderr=subprocess.DEVNULL
        )
        context = _connected(pipe)
        make = context.ServiceManager.createInstanceWithContext
        self._desktop = make("com.sun.star.frame.Desktop", context)
        self._dispatcher = make("com.sun.star.frame.DispatchHelper", context)

    def text_of(self, path: str, decision: str, written: Path) -> "list[str] | None":
        """Return the paragraphs of a document; None if it cannot be opened."""
        hidden = (PropertyValue(Name="Hidden", Value=True),)
        form = (PropertyValue(Name="FilterName", Value="OpenDocument Text Flat XML"),)
        document = self._desktop.loadComponentFromURL(f"file://{path}", "_blank", 0, hidden)
        if document is None:
            return None
        if decision in COMMANDS:
            frame = document.CurrentController.Frame
            self._dispatcher.executeDispatch(frame, COMMANDS[decision], "", 0, ())
        document.storeToURL(written.as_uri(), form)
        document.close(True)
        root = ElementTree.parse(written).getroot()
        return [_shown(each) for each in root.iter() if each.tag in (TEXT + "p", TEXT + "h")]

    def end(self) -> None:
        """End it, or what is left of it."""
        with contextlib.suppress(UnoException):  # the connection ends before it answers
            self._desktop.terminate()
        try:
            self._process.wait(START_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()


def _connected(pipe: str):
    here = uno.getComponentContext()
    resolver = here.ServiceManager.createInstanceWithContext(
        "com.sun.star.bridge.UnoUrlResolver", here
    )
    end = time.monotonic() + START_SECONDS
    while True:
        try:
            return resolver.resolve(f"uno:pipe,name={pipe};urp;StarOffice.ComponentContext")
        except NoConnectException:
            if time.monotonic() > end:
                sys.exit("error: LibreOffice does not start: run soffice to see why")
            time.sleep(0.3)


def _shown(element: ElementTree.Element) -> str:
    """Return the text of a paragraph, without that of notes and frames in it."""
    found = [element.text or ""]
    for child in element:
        name = child.tag.removeprefix(TEXT)
        if name == "s":
            found.append(" " * int(child.get(TEXT + "c", "1")))
        elif name in ("tab", "line-break"):
            found.append("\t" if name == "tab" else "\n")
        elif name.endswith("-ref"):
            found.append("[a reference]")  # to nothing, in documents made up; filled in at times
        elif name not in ("note", "p") and "drawing" not in child.tag:
            found.append(_shown(child))
        found.append(child.tail or "")
    return "".join(found)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        office = Office(folder)
        for line in sys.stdin:
            found = office.text_of(*json.loads(line), Path(folder, "a.fodt"))
            print(json.dumps(found), flush=True)
        office.end()


if __name__ == "__main__":
    main()
