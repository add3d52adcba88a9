"""The fields of requests for whole texts, as JSON, forms and addresses have them."""

import json
import random
from typing import Any
from urllib.parse import urlencode

from speculative_t5.serve.fields import parse_fields
from speculative_t5.serve.requests import Refused

import httpx
import pytest
from messages import check_message

FIELDS = {"q": "Grüße & 50 % = [1]\r\nnoch eine Zeile", "source": "de", "target": "en", "empty": ""}
FORM = "application/x-www-form-urlencoded"


def multipart(fields: dict[str, Any]) -> tuple[bytes, str]:
    """A form as a client sends it, and its content type."""
    files = {name: (None, value) for name, value in fields.items()}
    request = httpx.Request("POST", "http://localhost/", files=files)
    return request.read(), request.headers["content-type"]


def test_fields_are_the_same_in_all_forms() -> None:
    for body, kind, query in (
        (json.dumps(FIELDS).encode(), "application/json; charset=utf-8", ""),
        (json.dumps(FIELDS).encode(), FORM, ""),
        (urlencode(FIELDS).encode(), FORM, ""),
        (urlencode(FIELDS).encode(), "", ""),
        (b"", "", urlencode(FIELDS)),
        (*multipart(FIELDS), ""),
        (urlencode({"q": "another"}).encode(), FORM, urlencode(FIELDS)),
    ):
        assert parse_fields(body, kind, query) == FIELDS


@pytest.mark.parametrize("as_form", [lambda form: (urlencode(form).encode(), FORM), multipart])
def test_a_list_is_for_json(as_form: Any) -> None:
    for text in ('["a"]', ' [ "a", "b" ] '):
        with pytest.raises(Refused, match="q is a list, and the q of a form is one text") as error:
            parse_fields(*as_form({"q": text.strip()}))
        check_message(str(error.value))
    for text in ("[]", "[1]", '["a", 1]', "[a]", "[" * 5000 + "]" * 5000, '["a"] b', "[1] see"):
        assert parse_fields(*as_form({"q": text})) == {"q": text}
        assert parse_fields(*as_form({"text": '["a"]'})) == {"text": '["a"]'}


def test_what_comes_twice_is_refused_unless_it_is_the_same() -> None:
    twice = [("q", "a"), ("x", "1"), ("q", "b")]
    for body, query in ((urlencode(twice), ""), ("", urlencode(twice))):
        with pytest.raises(Refused, match="q comes more than once") as error:
            parse_fields(body.encode(), FORM, query)
        check_message(str(error.value))
    assert parse_fields(b"a=1&b=2&a=1", FORM) == {"a": "1", "b": "2"}


def test_nonsense_is_refused_in_one_line() -> None:
    """Bodies and kinds of their like, changed at random places."""
    draw, refused = random.Random(11), 0
    for _ in range(3000):
        body, kind = draw.choice((multipart(FIELDS), (urlencode(FIELDS).encode(), FORM)))
        some, kinds = bytearray(body), [*kind]
        for _ in range(draw.randint(1, 6)):
            place = draw.randrange(len(some))
            some[place : place + draw.randint(0, 9)] = draw.randbytes(draw.randint(0, 3))
        if draw.random() < 0.3:
            kinds[draw.randrange(len(kinds))] = draw.choice('";=\u00e9 x')
        try:
            found = parse_fields(bytes(some), "".join(kinds))
            assert all(isinstance(value, str) for value in found.values())
        except Refused as error:
            check_message(str(error))
            refused += 1
    assert 500 < refused < 2900
