"""What `/metrics` shows, in the format of Prometheus."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .service import Service

PREFIX = "speculative_t5_"
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
# Attributes of Figures: what there is now, and totals.
GAUGES = ("queued", "rows", "seconds_since_round")
HELP = {
    "queued": "Outputs that wait for a row.",
    "rows": "Outputs being decoded.",
    "rounds": "Passes of the target, each for all rows together.",
    "drafted": "Tokens that were drafted.",
    "accepted": "Drafted tokens that were accepted and emitted.",
    "emitted": "Tokens that were emitted, EOS included.",
    "prompt_tokens": "Tokens of prompts.",
    "failures": "Outputs that ended because decoding failed.",
    "seconds_since_round": "Seconds since the last pass of the target, if there was one.",
}


class Metrics:
    """Counts requests and their times; reads all else from the service when it is asked for."""

    def __init__(self, service: Service) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_FromService(service))
        self.requests = Counter(
            f"{PREFIX}requests", "Requests that were answered.", ["endpoint", "status"],
            registry=self._registry,
        )  # fmt: skip
        self.first_token, self.whole = (
            Histogram(f"{PREFIX}{name}_seconds", text, buckets=SECONDS, registry=self._registry)
            for name, text in (
                ("first_token", "From a request to the first tokens of its outputs."),
                ("request", "From a request to the end of its outputs."),
            )
        )

    def text(self) -> bytes:
        """Return all metrics as text."""
        return generate_latest(self._registry)


class _FromService(Collector):
    """Turns the service's figures into metrics."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        figures = self._service.figures()
        ready = float(figures.state == "ready")
        yield GaugeMetricFamily(f"{PREFIX}ready", "1 if requests are decoded.", value=ready)
        for name, text in HELP.items():
            family = GaugeMetricFamily if name in GAUGES else CounterMetricFamily
            if (value := getattr(figures, name)) is not None:
                yield family(PREFIX + name, text, value=value)


class Counted:
    """Counts responses by endpoint and status, those of the guards included.

    Args:
        app: The application behind it.
        metrics: Where they are counted.
        endpoints: Paths with a number of their own; a path below one of them counts with it.
    """

    def __init__(self, app: ASGIApp, *, metrics: Metrics, endpoints: Collection[str]) -> None:
        self._app = app
        self._metrics = metrics
        self._endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        statuses: list[int] = []

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            endpoint = self._endpoint(scope["path"])
            status = statuses[0] if statuses else 500
            self._metrics.requests.labels(endpoint, str(status)).inc()

    def _endpoint(self, path: str) -> str:
        """Return the endpoint of a path; "other" if there is none, or clients could name many."""
        known = "/v1/models" if path.startswith("/v1/models/") else path
        return known if known in self._endpoints else "other"


class Stopwatch:
    """Times one call: to its first tokens, and to its end."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self.began = time.monotonic()
        self._seen = False

    def saw_tokens(self) -> None:
        """Note that tokens came."""
        if not self._seen:
            self._seen = True
            self._metrics.first_token.observe(time.monotonic() - self.began)

    def ended(self) -> None:
        """Note that all outputs have ended."""
        self._metrics.whole.observe(time.monotonic() - self.began)
