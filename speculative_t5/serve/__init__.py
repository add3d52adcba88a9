"""Serving over HTTP: decoders for many callers at a time, in the protocols that clients speak.

`service` has the thread in which a model decodes, `models` several of them, `app` routes and
metrics, `completions` OpenAI's answers, `requests` what is asked, `server` who may ask and how it
starts and stops, `settings` how it answers, `page` the page at /. Whole texts are worked on in
processes of their own, which `workers` starts and ends: `text_worker` runs there, with a decoder of
`texts` that asks the server for outputs; `languagetool` corrects, `libretranslate` translates, and
`text_routes` is the server's end. `vectors` has embeddings and rankings. The package needs the
extra `serve`. Imports `generation`, `documents`, `checkpoints` and rooms
below them.
"""

from .app import make_app
from .models import Models, Served, to_serve
from .server import Server, bind, check_keys, check_origins, is_loopback, read_keys
from .service import Service
from .settings import Settings
from .workers import Workers
