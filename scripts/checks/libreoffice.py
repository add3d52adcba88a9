"""Check a text by LibreOffice's own client of LanguageTool, against a server of ours.

    python -m speculative_t5 serve &
    soffice --headless --accept="socket,host=127.0.0.1,port=2002;urp;" &
    python scripts/checks/libreoffice.py http://127.0.0.1:8080/v2

It needs LibreOffice 7.4 or later and its module uno, which Linux distributions have for their own
Python. The server's address is written into the profile of the LibreOffice that runs.
"""

import sys

import uno
from com.sun.star.beans import PropertyValue
from com.sun.star.lang import Locale

OFFICE = "uno:socket,host=127.0.0.1,port=2002;urp;StarOffice.ComponentContext"
SETTINGS = "/org.openoffice.Office.Linguistic/GrammarChecking/LanguageTool"
TEXT = "my sister have never been too paris. Its very expensive and she dont has many money."


def main(url: str) -> None:
    here = uno.getComponentContext()
    resolver = here.ServiceManager.createInstanceWithContext(
        "com.sun.star.bridge.UnoUrlResolver", here
    )
    office = resolver.resolve(OFFICE)
    make = office.ServiceManager.createInstanceWithContext
    node = PropertyValue(Name="nodepath", Value=SETTINGS)
    settings = make(
        "com.sun.star.configuration.ConfigurationProvider", office
    ).createInstanceWithArguments("com.sun.star.configuration.ConfigurationUpdateAccess", (node,))
    settings.setPropertyValue("BaseURL", url)
    settings.setPropertyValue("IsEnabled", True)
    settings.commitChanges()
    checker = make("org.openoffice.lingu.LanguageToolGrammarChecker", office)
    english = Locale("en", "US", "")
    if not checker.hasLocale(english):
        sys.exit("error: LibreOffice does not take the server for English: see its log")
    for found in checker.doProofreading("1", TEXT, english, 0, len(TEXT), ()).aErrors:
        end = found.nErrorStart + found.nErrorLength
        print(f"{TEXT[found.nErrorStart : end]} -> {found.aSuggestions[0]}: {found.aFullComment}")


if __name__ == "__main__":
    main(sys.argv[1])
