"""The bodies of requests: how long they may be and take, and how they are compressed."""

import asyncio
import zlib

from starlette.requests import Request

from ..errors import shown
from .requests import Refused
from .settings import Settings

CLOSE = {"Connection": "close"}  # where a body may have no end
GZIP = b"\x1f\x8b"  # how it begins
EITHER = 32 + zlib.MAX_WBITS  # for zlib: of gzip's format or of its own
PLAIN, COMPRESSED = ("", "identity"), ("gzip", "x-gzip", "deflate")


async def read_body(request: Request, settings: Settings) -> bytes:
    """Read the body of a request, and inflate it if it is compressed.

    Raises:
        Refused: If it has too many bytes, as they are sent or inflated; if it takes too long, or
            no more of it comes for a while; or if it is compressed in another way than by gzip.
    """
    body = await _received(request, settings)
    encoding = request.headers.get("content-encoding", "").strip().casefold()
    if encoding in PLAIN and not body.startswith(GZIP):
        return body
    if encoding in COMPRESSED:
        return inflated(body, settings.max_body)
    if encoding in PLAIN:
        wrong = "the body is compressed by gzip: send it with the header Content-Encoding"
    else:
        wrong = f"Content-Encoding is {shown(encoding)}: send the body as gzip, or as it is"
    raise Refused(415, wrong)


async def _received(request: Request, settings: Settings) -> bytes:
    most, seconds, pause = settings.max_body, settings.body_seconds, settings.body_pause
    length = request.headers.get("content-length", "")
    too_large, found = length.isdigit() and int(length) > most, bytearray()
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    try:
        async with asyncio.timeout(min(seconds, pause)) as limit:
            stream = request.stream()
            while not too_large and (part := await anext(stream, b"")):
                found += part
                too_large = len(found) > most
                limit.reschedule(min(end, loop.time() + pause))
    except TimeoutError as error:
        wrong = f"the body did not arrive in {seconds:g} seconds: send it again"
        if loop.time() < end:
            wrong = f"no more of the body has come for {pause:g} seconds: send it again"
        raise Refused(408, wrong, headers=CLOSE) from error
    if too_large:
        # The rest of a known length is read and dropped, as far as `Limits` say.
        raise _too_large(most, close=not length)
    return bytes(found)


def inflated(body: bytes, most: int) -> bytes:
    """Inflate a body by gzip or zlib to at most `most` bytes; for errors see `read_body`."""
    inflating = zlib.decompressobj(EITHER)
    try:
        found = inflating.decompress(body, most + 1)
    except zlib.error as error:
        raise Refused(
            400, f"the body cannot be inflated ({error}): send it as gzip, or as it is"
        ) from error
    if len(found) > most:
        raise _too_large(most, close=False)
    if not inflating.eof or inflating.unused_data:
        raise Refused(400, "the compressed body is not whole, or is not all: send it again")
    return found


def _too_large(most: int, *, close: bool) -> Refused:
    wrong = f"the body has more than {most:,} bytes: split the request"
    return Refused(413, wrong, code="request_too_large", headers=CLOSE if close else None)
