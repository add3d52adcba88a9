"""Serving over HTTP: one decoder for many callers at a time, in OpenAI's protocol.

`service` has the thread that owns the device, `app` routes, answers and metrics, `requests` what is
asked, `server` who may ask and how it starts and stops, `page` the page at /. The package needs the
extra `serve`. Imports `generation`, `tokenizers`, `decoding` and `errors`.
"""

from .app import Settings, make_app
from .server import Server, bind, check_origins, is_loopback, read_keys
from .service import Service
