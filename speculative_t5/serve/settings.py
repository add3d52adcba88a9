"""How a server answers: what its command line says, and bounds on requests."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..generation import GenerationOptions


@dataclass(frozen=True)
class Settings:
    """How the application answers."""

    defaults: GenerationOptions  # of requests that do not give them
    api_keys: Sequence[str] = ()  # one must come with each request; without any, none is needed
    cors_origins: Sequence[str] = ()  # the sites whose pages may ask; "*" is all
    local: bool = True  # whether only this machine reaches the server: Host headers are checked
    draw_seeds: bool = False  # whether a request without a seed gets a random one
    max_body: int = 2 * 2**20  # bytes
    all_bodies: int = 2**28  # bytes of all bodies that have not come to their end
    body_seconds: float = 30.0  # that a body may take
    body_pause: float = 10.0  # seconds in which some of it has to come
    ping_seconds: float = 15.0  # without an event, after which a stream gets a comment
    text_seconds: float = 600.0  # that a whole text may take
    max_text: int = 2 * 2**20  # its characters
    sentence_bytes: float = 2**25  # for outputs of sentences that are kept
