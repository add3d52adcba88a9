#!/usr/bin/env bash
# Correct a few sentences with the shipped pair, by plain and by speculative decoding.
# `--extra serve` first adds the packages of an extra of pyproject.toml; it may be repeated.
set -euo pipefail
cd "$(dirname "$0")/.."
known=$(sed -n '/^\[project.optional-dependencies\]/,/^\[tool/s/^\([a-z0-9]*\) = .*/\1/p' pyproject.toml)
extra=
while [[ ${1:-} == --extra ]]; do
    if ! grep -qx -- "${2:-}" <<<"$known"; then
        echo "error: there is no extra '${2:-}': choose one of ${known//$'\n'/, }" >&2
        exit 2
    fi
    extra+="${extra:+,}$2"
    shift 2
done
. scripts/venv.sh
exec "$python" scripts/demo.py "$@"
