"""Serving: one decoder for many callers at a time.

`service` has the thread that owns the device, and `calls` what its callers hold: they submit
prompts, each with options of its own, and receive events as the outputs grow. What speaks HTTP is
built on these. Imports `generation`, `tokenizers`, `decoding` and `errors`.
"""

from .calls import Busy, Call, Event, Figures, State, Unavailable
from .service import Service
