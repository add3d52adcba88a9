#!/usr/bin/env bash
# Measure what a GPU gives, the most valuable first, and write the tables of docs/gpu.md.
# `scripts/gpu.sh --help` shows the options, docs/gpu.md how to install what is needed.
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-.venv/bin/python}" scripts/benchmarks/gpu.py "$@"
