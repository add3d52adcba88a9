"""Serving over HTTP: one decoder for many callers at a time, in OpenAI's protocol.

`service` has the thread that owns the device, and `calls` what its callers hold: they submit
prompts, each with options of its own, and receive events as the outputs grow. `app` has the routes,
`requests`, `fields` and `responses` the protocol, `guards` who may ask, `server` how it starts and
stops, `page` the page at /. The room needs the extra `serve`. Imports `generation`, `tokenizers`,
`decoding` and `errors`.
"""

from .app import Settings, make_app
from .calls import Busy, Call, Event, Figures, State, Unavailable, WrongPrompt
from .guards import check_origins, is_loopback, read_keys
from .server import Server, bind
from .service import Service
