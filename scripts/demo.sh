#!/usr/bin/env bash
# Correct a few sentences with the shipped pair, by plain and by speculative decoding.
set -euo pipefail
cd "$(dirname "$0")/.."
extra=
. scripts/venv.sh
exec "$python" scripts/demo.py "$@"
