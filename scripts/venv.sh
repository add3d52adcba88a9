# demo.sh and test.sh source this in the repository's root, with `extra` set. It makes .venv and
# installs the package there. It must not read "$@": these are the arguments of the script.
python=.venv/bin/python
if ! "$python" -m pip --version >/dev/null 2>&1; then
    for newer in python3 python3.{14,13,12,11} ""; do
        "$newer" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break
    done
    if [[ ! $newer ]]; then
        echo "error: Python 3.11 or newer is needed, found $(python3 --version 2>&1): install one" \
            "(apt-get install python3.11-venv, brew install python, or python.org), and run this again" >&2
        exit 2
    fi
    "$newer" -m venv --clear --upgrade-deps .venv  # an old pip needs twice the time
fi

# Print everything that the installed package is built from: sources, compiler, Python and MLX.
built_from() {
    cat pyproject.toml setup.py speculative_t5/cpu/native/*
    { c++ --version || cc --version || echo "no compiler"; } 2>/dev/null | head -n 1
    "$python" --version
    "$python" -c 'import pathlib, sysconfig
print(pathlib.Path(sysconfig.get_path("include"), "Python.h").exists())'
    find .venv/lib -maxdepth 3 -name "mlx*.dist-info" | sort
}

# Install only if that has changed since the last installation.
stamp=.venv/installed-${extra:-base}
if [[ ! -e $stamp || $(built_from) != $(<"$stamp") ]]; then
    echo "installing into .venv${extra:+ (extra: $extra)} ..." >&2
    # Bytecode is made when a module is first imported: of most it never is.
    # Errors alone: newer versions of pip repeat what setuptools tells those who develop it.
    "$python" -m pip install -qq --disable-pip-version-check --no-compile \
        --editable ".${extra:+[$extra]}"
    built_from >"$stamp"
fi
