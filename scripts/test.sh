#!/usr/bin/env bash
# All checks: ruff, mypy, import-linter, pytest. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
extra=test
. scripts/venv.sh
"$python" -m ruff format --check .
"$python" -m ruff check .
"$python" -m mypy
.venv/bin/lint-imports
# A process for each processor, with one thread for products: more would wait for each other.
OMP_NUM_THREADS=1 exec "$python" -m pytest --numprocesses auto --dist loadfile "$@"
