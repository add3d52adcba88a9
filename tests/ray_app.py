"""Ray Serve on this machine, with our application; test_ray_serve.py runs it.

    python tests/ray_app.py MODEL DRAFT PORT

Says "ready", and then how many replicas run for each line that it is given, until the last one.
"""

import os
import sys

os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}

from speculative_t5.ray import serve_app

import ray
from ray import serve


def main(model: str, draft: str, port: str) -> None:
    ray.init(num_cpus=3, include_dashboard=False, object_store_memory=2**28, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": int(port)})
    app = serve_app(
        model,
        draft,
        name="tiny",
        num_draft=5,
        max_tokens=12,
        batch_size=4,
        api_keys=["secret"],
        min_replicas=1,
        max_replicas=2,
        actor_options={"num_cpus": 1},
        autoscaling={"upscale_delay_s": 1, "metrics_interval_s": 0.5, "look_back_period_s": 1},
    )
    serve.run(app)
    print("ready", flush=True)
    for _ in sys.stdin:
        (deployment,) = serve.status().applications["default"].deployments.values()
        print(deployment.replica_states.get("RUNNING", 0), flush=True)
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
