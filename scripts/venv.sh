# Sourced by demo.sh and test.sh: makes .venv and installs this package into it, once.
# Usage: . scripts/venv.sh [EXTRA], from the repository's root.
extra=${1:-}
python=.venv/bin/python
if ! "$python" -m pip --version >/dev/null 2>&1; then
    if ! python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
        echo "error: Python 3.10 or newer is needed, found $(python3 --version 2>&1)" >&2
        exit 2
    fi
    python3 -m venv --clear .venv
fi
# What is installed is remembered by the contents of what it is built from: a second run is quick.
stamp=.venv/installed-${extra:-base}
sources="pyproject.toml setup.py speculative_t5/native/*"
if ! cat $sources | cmp -s - "$stamp"; then
    echo "installing into .venv${extra:+ (extra: $extra)} ..." >&2
    "$python" -m pip install --quiet --disable-pip-version-check --editable ".${extra:+[$extra]}"
    cat $sources >"$stamp"
fi
