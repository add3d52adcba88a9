"""HTML: which words of a page are read, and what of it stays."""

from speculative_t5.documents import FormatOptions, check_read, read_file
from speculative_t5.documents.web import WebPage

import pytest

ATTRIBUTES = {  # pages, and the values that are read
    '<img alt="She have a apple." title="a > b">': ["She have a apple.", "a > b"],
    "<input placeholder='Type you name'><input value=x type=submit>": ["Type you name"],
    "<IMG ALT = word><img alt=two title=three>": ["word", "two", "three"],
    '<a title="a&quot;b &amp; c" aria-label="d">link</a>': ["link", 'a"b & c', "d"],
    '<img data-x="a title=\'no\'" alt="" title>': [],
    "<img alt='it&#39;s &copy=1 &notit &copy;'>": ["it's &copy=1 &notit ©"],
    '<img alt="Hi {{ user }}, {% if a %}you{% endif %}">': ["Hi {{ user }}, you"],
    '<img alt="{{ x|default:"y" }}"><img alt="<?= $x ?>"><img alt="{% if">': [],
    "<meta name=description content='A page.'><meta name=viewport content=w>": ["A page."],
    '<meta property="og:title" content="A title">': ["A title"],
    '<textarea placeholder="Your text" title="b">a</textarea>': ["b", "Your text"],
    '<iframe title="A map"></iframe><svg aria-label="A sun"></svg>': ["A map", "A sun"],
    '<pre title="a">b</pre><template title="a"></template><style title="a"></style>': [],
    '<link rel=stylesheet title="Night"><code title="a">b</code>': [],
    '<p translate="no" title="a">b</p><img translate=no alt="a">': [],
    '<div class="notranslate"><p>a <b translate=yes title="c">d</b></p></div>': ["d", "c"],
    "<img title=\"Say translate='no'\" alt='b'>": ["Say translate='no'", "b"],
}


@pytest.mark.parametrize("page", ATTRIBUTES)
def test_attributes_are_read_on_request(page: str) -> None:
    found = WebPage(page.encode(), "a.html", attributes=True)
    assert sorted(filter(None, found.text.split("\n"))) == sorted(ATTRIBUTES[page])
    assert found.rewritten(found.text) == page.encode()
    without = WebPage(page.encode(), "a.html").text
    assert {*without.split("\n")} <= {"", "link", "d"}


@pytest.mark.parametrize(
    ("page", "old", "new", "wanted"),
    [
        ('<img alt="a b">', "a", "<\"'>&", '<img alt="&lt;&quot;\'&gt;&amp; b">'),
        ("<img alt='a b'>", "a", "<\"'>&", "<img alt='&lt;\"&#39;&gt;&amp; b'>"),
        ("<IMG ALT = a id=b>", "a", "c", "<IMG ALT = c id=b>"),
        ("<img alt=a id=b>", "a", "two words", '<img alt="two words" id=b>'),
        ("<img alt=a>", "a", "it's", '<img alt="it\'s">'),
        ("<img alt=a>", "a", "", '<img alt="">'),
        (
            '<img alt="&quot;a&#34; b  c&eacute;">',
            "b",
            "d",
            '<img alt="&quot;a&#34; d  c&eacute;">',
        ),
        ("<p>a <img alt='a > b'> c</p>", "a > b", "d", "<p>a <img alt='d'> c</p>"),
        ('<img alt="a {{ b }} c">', "c", "d e", '<img alt="a {{ b }} d e">'),
    ],
)
def test_new_values_of_attributes_are_spelled(page: str, old: str, new: str, wanted: str) -> None:
    found = WebPage(page.encode(), "a.html", attributes=True)
    lines = [line.replace(old, new) if old in line else line for line in found.text.split("\n")]
    assert found.rewritten("\n".join(lines)).decode() == wanted


def test_attributes_are_for_html_alone() -> None:
    wanted = FormatOptions(attributes=True)
    for name, form in [("a.html", None), ("a.txt", "html"), ("-", "html")]:
        check_read(name, form, wanted)
    for name, form in [("a.md", None), ("a.docx", None), ("a.html", "txt"), ("-", None)]:
        with pytest.raises(ValueError, match=r"^--attributes is for html, and .*: leave out "):
            check_read(name, form, wanted)
    page = b'<img alt="a">'
    assert read_file(page, "a.html").text == "" and read_file(page, "a.txt").text
    assert read_file(page, "a.html", None, wanted).text == "a"
    assert read_file(page, "a.txt", None, wanted).text == page.decode()
