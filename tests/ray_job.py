"""A Ray Data job, one of whose two workers dies; test_ray_data.py runs it.

    python tests/ray_job.py FOLDER MODEL DRAFT

FOLDER/prompts.txt has a prompt a line. FOLDER/out gets the rows, FOLDER/log a worker's number for
each batch.
"""

import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

# Before Ray is imported: nothing is reported, each worker has one thread, and the results are not
# divided into 200 parts.
os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
os.environ["RAY_DATA_DEFAULT_MIN_PARALLELISM"] = "1"

from speculative_t5.ray import Generate

import pyarrow as pa
import pyarrow.parquet as pq
import ray
import ray.data

WORKERS = 2
BLOCK = 5  # rows


class Watched(Generate):
    """Writes its process's number as a batch is done; the first to do a second one dies in it."""

    def __init__(self, folder: Path, *names: str, **options: Any) -> None:
        super().__init__(*names, **options)
        self.log, self.killed = folder / "log", folder / "killed"

    def __call__(self, batch: Any) -> Any:
        done = super().__call__(batch)
        number = f"{os.getpid()}\n"
        if self.log.exists() and number in self.log.read_text() and not self.killed.exists():
            self.killed.write_text(number)
            os.kill(os.getpid(), signal.SIGKILL)
        with self.log.open("a") as file:
            file.write(number)
        return done


def main(folder: Path, *models: str) -> None:
    prompts = (folder / "prompts.txt").read_text(encoding="utf-8").splitlines()
    table = pa.table({"id": range(len(prompts)), "sentence": prompts})
    ray.init(
        num_cpus=WORKERS,
        include_dashboard=False,
        object_store_memory=2**28,
        logging_level="ERROR",
        log_to_driver=False,
    )
    logging.getLogger("ray.data").setLevel("ERROR")
    ray.data.DataContext.get_current().enable_progress_bars = False
    # Of one block, one worker would decode all.
    blocks = [table.slice(start, BLOCK) for start in range(0, len(prompts), BLOCK)]
    rows = ray.data.from_arrow(blocks).map_batches(
        Watched,
        fn_constructor_args=[folder, *models],
        fn_constructor_kwargs={"max_tokens": 12, "num_draft": 5, "column": "sentence"},
        compute=ray.data.ActorPoolStrategy(size=WORKERS),
        batch_format="pyarrow",
    )
    pq.write_table(pa.concat_tables(rows.iter_batches(batch_format="pyarrow")), folder / "out")
    ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
