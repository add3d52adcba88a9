"""An OpenAI-compatible server: one thread decodes for all clients, a Starlette application speaks.

`service` owns the device, `app` has the routes. May import `generation` and what lies below it.
"""

from .service import Busy, Call, Event, Figures, Service, State, Unavailable
