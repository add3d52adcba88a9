"""`serve_app`: the server's application as a deployment of Ray Serve."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..checkpoints import model_name
from ..errors import first_line
from ..generation import GenerationOptions, LoadingOptions, SpeculativeDecoder, num_rows
from ..options import (
    OptionError,
    described,
    option_error,
    python_option,
    takes,
)
from .options import WorkerOptions

OTHER_REQUESTS = 16  # at a time, such as for health and metrics, beside those that are decoded
JOBS_OF_REPLICA = 4  # requests for vectors or rankings that keep a replica busy
LOAD = "load"  # the figure that replicas report, see `Replica.record_autoscaling_stats`


@described
@dataclass(frozen=True, kw_only=True)
class ServingOptions(GenerationOptions, WorkerOptions):
    """The options of `serve_app`: of replicas, of a decoder, and of requests that give none."""

    seed: int | None = python_option(  # type: ignore[assignment]
        None, "Seed of requests that give none; None draws one for each.", least=0, most=2**63 - 1
    )
    name: str | None = python_option(
        None, "The model's name in requests and answers; None is that of its folder."
    )
    batch_size: int | None = python_option(
        None, "Outputs to decode side by side in a replica; None is 16, or 1 with steady."
    )
    max_queue: int = python_option(
        256, "Outputs that may wait in a replica; further requests get status 429.", least=1
    )
    min_replicas: int = python_option(1, "The fewest replicas.", least=0)
    max_replicas: int = python_option(
        1,
        "The most replicas. Between the two there are as many as have rows for the outputs that "
        "are decoded and that wait.",
        least=1,
    )
    api_keys: Sequence[str] = python_option(
        (), "Keys, of which each request must have one; without any, none is needed."
    )
    cors_origins: Sequence[str] = python_option(
        (), "Sites whose pages may send requests from a browser; '*' is all."
    )
    actor_options: Mapping[str, Any] | None = python_option(
        None, "What Ray reserves for each replica, such as {'num_cpus': 2}: its ray_actor_options."
    )
    autoscaling: Mapping[str, Any] | None = python_option(
        None, "More fields of Ray Serve's AutoscalingConfig, such as downscale_delay_s."
    )

    def __post_init__(self) -> None:
        WorkerOptions.__post_init__(self)
        GenerationOptions.__post_init__(self)
        self.check_stream(several=True)
        _ = self.rows
        if self.max_replicas < self.min_replicas:
            raise OptionError(
                "{max_replicas} must be at least {min_replicas}, which is {}, got {}",
                self.min_replicas,
                self.max_replicas,
            )
        if self.name is not None and not (isinstance(self.name, str) and self.name):
            raise option_error("name", "text", self.name)
        if self.autoscaling and self.max_replicas == self.min_replicas:
            raise OptionError(
                "{autoscaling} needs {max_replicas} above {min_replicas}, which are both {}: give "
                "both, or leave it out",
                self.max_replicas,
            )

    @property
    def rows(self) -> int:
        """How many outputs a replica decodes side by side."""
        return num_rows(self.batch_size, steady=self.steady)

    @property
    def defaults(self) -> GenerationOptions:
        """The options of requests that do not give them."""
        return GenerationOptions(**self.of(GenerationOptions) | {"seed": self.seed or 0})


@takes(ServingOptions)
def serve_app(model: str | Path, options: ServingOptions) -> Any:
    """Return an application for `ray.serve.run`: the server's routes, answered by replicas.

    Each replica loads the models and decodes its requests side by side; streams are sent as they
    are. Ray Serve chooses the replica, starts others while outputs wait, and listens where its
    `http_options` say. The server's documentation tells what requests may ask for.

    Args:
        model: The name or folder of the target, as `load` takes it; replicas look it up.
        options: Given as keywords.

    Raises:
        ValueError: If an option is out of its range, or Ray Serve is not installed.
    """
    serve = ray_serve()
    check_access(options)
    unknown = {*(options.autoscaling or {})} - {*serve.config.AutoscalingConfig.model_fields}
    if unknown:
        raise OptionError(
            "{autoscaling} has {!r}, which Ray's AutoscalingConfig has not: leave it out",
            min(unknown),
        )
    scaling: dict[str, Any] = {"num_replicas": options.min_replicas}
    if options.max_replicas > options.min_replicas:
        scaling = {
            "autoscaling_config": {
                "min_replicas": options.min_replicas,
                "max_replicas": options.max_replicas,
                "policy": serve.config.AutoscalingPolicy(policy_function=replicas_for_load),
                **(options.autoscaling or {}),
            }
        }
    deployment = serve.deployment(
        serve.ingress()(Replica),
        name="speculative_t5",
        ray_actor_options=dict(options.actor_options or {}),
        # Ray's own limit of a few would leave rows empty. What is beyond this waits at its proxy.
        max_ongoing_requests=options.rows + options.max_queue + OTHER_REQUESTS,
        **scaling,
    )
    return deployment.bind(model, options)


def check_access(options: ServingOptions) -> None:
    """Refuse keys and sites that the server would not take."""
    from ..serve import check_keys, check_origins

    check_keys(options.api_keys)
    check_origins(options.cors_origins)


def ray_serve() -> Any:
    """Return Ray Serve, or say how to install it."""
    try:
        import ray.serve
        import ray.serve.config

        from .. import serve as serve  # what it serves with
    except ModuleNotFoundError as error:
        raise ValueError(
            f"serve_app needs packages that are not installed ({first_line(error)}): run pip "
            "install 'speculative-t5[ray]'"
        ) from error
    return ray.serve


class Replica:
    """What a replica runs: an application with models of its own, and what Ray asks about it."""

    def __init__(self, model: str | Path, options: ServingOptions) -> None:
        from ..serve import Models, Settings, Workers, to_serve

        served = to_serve(
            options.name or model_name(model),
            model,
            options,
            partial(SpeculativeDecoder.from_pretrained, model, **options.of(LoadingOptions)),
            batch_size=options.rows,
            max_queue=options.max_queue,
        )
        self._rows = options.rows
        self._models = Models([served], workers=Workers(ahead=True))
        self._settings = Settings(
            options.defaults,
            options.api_keys,
            options.cors_origins,
            local=False,  # Ray's proxy listens, under names that only its user knows
            draw_seeds=options.seed is None,
        )

    def __serve_build_asgi_app__(self) -> Any:
        """Return the application; Ray starts and stops it by its lifespan."""
        from ..serve import make_app

        return make_app(self._models, self._settings, waits=True)

    def check_health(self) -> None:
        """Have Ray replace this replica once it cannot decode any more."""
        if self._models.failure is not None:
            raise self._models.failure

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return how many replicas what is asked of this one would fill, what waits included."""
        figures = self._models.figures()  # none before a model is there
        outputs = figures.get("queued", 0) + figures.get("rows", 0)
        return {LOAD: outputs / self._rows + figures.get("jobs", 0) / JOBS_OF_REPLICA}


def replicas_for_load(context: Any) -> tuple[float, dict[str, Any]]:
    """Return how many replicas have rows for all outputs, and no state; Ray keeps to the limits."""
    loads = context.aggregated_metrics.get(LOAD, {})
    return math.ceil(sum(loads.values())), {}
