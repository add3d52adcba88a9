"""Serving over HTTP: decoders for many callers at a time, in the protocols that clients speak.

`service` has the thread in which a model decodes, `models` several of them, `app` routes, OpenAI's
answers and metrics, `requests` what is asked, `texts` whole texts, which `languagetool` corrects
and `libretranslate` translates, `server` who may ask and how it starts and stops, `page` the page
at /. The package needs the extra `serve`. Imports `generation`, `documents`, `tokenizers`,
`decoding` and `errors`.
"""

from .app import Settings, make_app
from .models import Models, Served
from .server import Server, bind, check_origins, is_loopback, read_keys
from .service import Service
