#!/usr/bin/env bash
# Correct a few sentences with the shipped pair, regular and speculative, and compare the two.
set -euo pipefail
cd "$(dirname "$0")/.."
extra=
. scripts/venv.sh
exec "$python" scripts/demo.py "$@"
