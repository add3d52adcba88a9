"""The bodies of requests: how long they may be and take, and how they are compressed."""

import asyncio
import zlib

from starlette.requests import Request

from ..errors import shown
from .requests import Refused
from .settings import Settings

CLOSE_HEADERS = {"Connection": "close"}  # where a body may have no end
GZIP = b"\x1f\x8b"  # how a body by gzip begins
GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS  # for zlib: of gzip's format or of its own
SMALL_BODY = 2**16  # bytes of a body that is read however many others there are
BODY_RETRY_SECONDS = 5  # after which to send a refused one again
PLAIN_ENCODINGS, COMPRESSED_ENCODINGS = ("", "identity"), ("gzip", "x-gzip", "deflate")


class BodyReader:
    """Reads the bodies of a server's requests."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._held = 0  # bytes of bodies that have not come to their end

    async def read(self, request: Request) -> bytes:
        """Read the body of a request, and inflate it if it is compressed.

        Raises:
            Refused: If it has too many bytes, as they are sent or inflated; if it takes too long,
                or no more of it comes for a while; if there are too many others; or if it is
                compressed in another way than by gzip or zlib, or without saying so.
        """
        body = await self._received(request)
        encoding = request.headers.get("content-encoding", "").strip().casefold()
        if encoding in PLAIN_ENCODINGS and not body.startswith(GZIP):
            return body
        if encoding in COMPRESSED_ENCODINGS:
            return inflated(body, self._settings.max_body)
        if encoding in PLAIN_ENCODINGS:
            wrong = "the body is compressed by gzip: send it with the header Content-Encoding"
        else:
            wrong = f"Content-Encoding is {shown(encoding)}: send the body as gzip, or as it is"
        raise Refused(415, wrong)

    async def _received(self, request: Request) -> bytes:
        settings, found = self._settings, bytearray()
        seconds, pause = settings.body_seconds, settings.body_pause
        length = request.headers.get("content-length", "")
        too_large = length.isdigit() and int(length) > settings.max_body
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        try:
            async with asyncio.timeout_at(min(end, loop.time() + pause)) as limit:
                stream = request.stream()
                while not too_large and (part := await anext(stream, b"")):
                    found += part
                    self._held += len(part)
                    self._check_room(len(found))
                    too_large = len(found) > settings.max_body
                    limit.reschedule(min(end, loop.time() + pause))
        except TimeoutError as error:
            wrong = f"the body did not arrive in {seconds:g} seconds: send it again"
            # By the limit that was set, not by the clock, whose ticks may end before the limit.
            if limit.when() != end:
                wrong = f"no more of the body has come for {pause:g} seconds: send it again"
            raise Refused(408, wrong, headers=CLOSE_HEADERS) from error
        finally:
            self._held -= len(found)
        if too_large:
            # The rest of a known length is read and dropped, as far as `connections.Limits` say.
            raise _too_large(settings.max_body, close=not length)
        return bytes(found)

    def _check_room(self, size: int) -> None:
        """Refuse a body that is not small where there are too many others."""
        if size > SMALL_BODY and self._held > self._settings.all_bodies:
            raise Refused(
                503,
                f"the server holds {self._settings.all_bodies:,} bytes of bodies that have not "
                "ended, which is the most: wait and send the request again",
                headers=CLOSE_HEADERS | {"Retry-After": str(BODY_RETRY_SECONDS)},
            )


def inflated(body: bytes, most: int) -> bytes:
    """Inflate a body by gzip or zlib to at most `most` bytes; for errors see `BodyReader`."""
    inflating = zlib.decompressobj(GZIP_OR_ZLIB)
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
    return Refused(413, wrong, code="request_too_large", headers=CLOSE_HEADERS if close else None)
