#!/usr/bin/env bash
# Run all checks: ruff, mypy, import-linter, pytest. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
extra=test
. scripts/venv.sh
"$python" -m ruff format --check .
"$python" -m ruff check .
"$python" -m mypy
.venv/bin/lint-imports
# One process for each processor, each with one thread: more would wait for each other. One that
# crashes ends the run: once another has taken its place, pytest-xdist may hang (#1323).
OMP_NUM_THREADS=1 exec "$python" -m pytest --numprocesses auto --dist loadfile \
    --max-worker-restart 0 "$@"
