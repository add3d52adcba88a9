# Sourced by demo.sh and test.sh with `extra` set: makes .venv and installs this package into it.
# From the repository's root; its own arguments would be the script's, so it takes none.
python=.venv/bin/python
if ! "$python" -m pip --version >/dev/null 2>&1; then
    if ! python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        echo "error: Python 3.11 or newer is needed, found $(python3 --version 2>&1)" >&2
        exit 2
    fi
    python3 -m venv --clear .venv
fi

# Everything that the installed package was built from: its sources, the compiler, Python and MLX.
built_from() {
    cat pyproject.toml setup.py speculative_t5/cpu/native/*
    { c++ --version || cc --version || echo "no compiler"; } 2>/dev/null | head -n 1
    "$python" --version
    "$python" -c 'import pathlib, sysconfig
print(pathlib.Path(sysconfig.get_path("include"), "Python.h").exists())'
    find .venv/lib -maxdepth 3 -name "mlx*.dist-info" | sort
}

# A second run is quick: it compares that with what it was at the last installation.
stamp=.venv/installed-${extra:-base}
if [[ ! -e $stamp || $(built_from) != $(<"$stamp") ]]; then
    echo "installing into .venv${extra:+ (extra: $extra)} ..." >&2
    "$python" -m pip install --quiet --disable-pip-version-check --editable ".${extra:+[$extra]}"
    built_from >"$stamp"
fi
