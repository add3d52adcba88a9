"""A Ray Data job with `Generator`, one of whose two workers is killed; test_ray_data.py runs it.

    python tests/ray_job.py FOLDER MODEL DRAFT

FOLDER/prompts.txt has a prompt a line. FOLDER/out gets the rows, FOLDER/log a worker's number for
each batch.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

# Before Ray is imported: nothing is reported, and each worker has one thread.
os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}

from speculative_t5.ray_data import Generator

import pyarrow as pa
import pyarrow.parquet as pq
import ray
import ray.data

WORKERS = 2
BLOCK = 5  # rows


class Watched(Generator):
    """Appends its process's number to a file as a batch is done."""

    def __init__(self, log: str, *names: str, **options: Any) -> None:
        super().__init__(*names, **options)
        self.log = log

    def __call__(self, batch: Any) -> Any:
        done = super().__call__(batch)
        with open(self.log, "a") as file:
            file.write(f"{os.getpid()}\n")
        return done


def kill_one(log: Path) -> None:
    """Kill the first worker that has a batch behind it, in the midst of another."""
    while not (log.exists() and log.read_text().endswith("\n")):
        time.sleep(0.002)
    os.kill(int(log.read_text().splitlines()[0]), signal.SIGKILL)
    print("killed a worker", flush=True)


def main(folder: Path, *models: str) -> None:
    prompts = (folder / "prompts.txt").read_text(encoding="utf-8").splitlines()
    table = pa.table({"id": range(len(prompts)), "prompt": prompts})
    ray.init(
        num_cpus=WORKERS, include_dashboard=False, object_store_memory=2**28,
        logging_level="ERROR", log_to_driver=False,
    )  # fmt: skip
    logging.getLogger("ray.data").setLevel("ERROR")
    ray.data.DataContext.get_current().enable_progress_bars = False
    log = folder / "log"
    threading.Thread(target=kill_one, args=[log], daemon=True).start()
    # Of one block, one worker would decode all.
    blocks = [table.slice(start, BLOCK) for start in range(0, len(prompts), BLOCK)]
    rows = ray.data.from_arrow(blocks).map_batches(
        Watched,
        fn_constructor_args=[str(log), *models],
        fn_constructor_kwargs={"max_tokens": 32},
        compute=ray.data.ActorPoolStrategy(size=WORKERS),
        batch_format="pyarrow",
    )
    pq.write_table(pa.concat_tables(rows.iter_batches(batch_format="pyarrow")), folder / "out")
    ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
