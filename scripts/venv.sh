# demo.sh and test.sh source this in the repository's root, with `extra` set. It makes .venv and
# installs the package there, with the packages of those extras. It must not read "$@": these are the arguments of the script.
python=.venv/bin/python
system=$(uname -s)

# Print why a Python will not do, with its version; nothing if it will.
unfit() {
    local at found version machine new
    at=$(command -v "$1") || { echo "not found" && return; }
    # Without the command line tools, the programs that stand for them open a dialog.
    if [[ $system == Darwin && $at == /usr/bin/* ]] && ! xcode-select -p >/dev/null 2>&1; then
        echo "needs Apple's command line tools"
        return
    fi
    found=$("$1" -c 'import platform, sys
new = sys.version_info >= (3, 11)
print("%d.%d.%d %s %s" % (sys.version_info[:3] + (platform.machine(), new)))' 2>/dev/null) || true
    read -r version machine new <<<"$found"
    if [[ $new == False ]]; then
        echo "$version"
    elif [[ $new != True ]]; then
        echo "does not run"
    elif [[ $system == Darwin && $machine != arm64 ]]; then  # Rosetta's, too: MLX has no wheels
        echo "$version for $machine"
    fi
}

if ! "$python" -m pip --version >/dev/null 2>&1; then
    tried=
    for newer in ${PYTHON:+"$PYTHON"} python3 python3.{14,13,12,11} ""; do
        [[ $newer ]] || break
        why=$(unfit "$newer")
        [[ $why ]] || break
        [[ $why == "not found" && $newer != "${PYTHON:-}" ]] || tried+="${tried:+, }$newer ($why)"
    done
    if [[ ! $newer ]]; then
        kind="Python 3.11 or newer" how="apt-get install python3.11-venv"
        if [[ $system == Darwin ]]; then
            kind+=" for arm64" how="brew install python@3.13, python.org, or uv python install 3.13"
        fi
        echo "error: $kind is needed, found ${tried:-none}: install one ($how), and run this again;" \
            "PYTHON=path names one that is not on the PATH" >&2
        exit 2
    fi
    "$newer" -m venv --clear --upgrade-deps .venv  # an old pip needs twice the time
fi

compiler() {
    # On macOS nothing is compiled, and without the command line tools c++ opens a dialog.
    [[ $system == Darwin ]] || c++ --version || cc --version || echo "no compiler"
}

# Print everything that the installed package is built from: sources, compiler, Python and MLX.
built_from() {
    cat pyproject.toml setup.py speculative_t5/kernels/native/*
    compiler 2>/dev/null | head -n 1
    "$python" --version
    "$python" -c 'import pathlib, sysconfig
print(pathlib.Path(sysconfig.get_path("include"), "Python.h").exists())'
    find .venv/lib -maxdepth 3 -name "mlx*.dist-info" | sort
}

# Whether what this stamp stands for was installed from what there is now.
is_current() {
    [[ -e .venv/installed-$1 && $(built_from) == $(<".venv/installed-$1") ]]
}

# Install only if that has changed since the last installation.
if ! is_current "${extra:-base}"; then
    echo "installing into .venv${extra:+ (extra: $extra)} ..." >&2
    wanted=(--editable ".${extra:+[$extra]}")
    if is_current base; then  # only packages are missing, and nothing is built again
        wanted=("speculative_t5[$extra]")
    fi
    # Bytecode is made when a module is first imported: of most it never is.
    # Errors alone: newer versions of pip repeat what setuptools tells those who develop it.
    "$python" -m pip install -qq --disable-pip-version-check --no-compile "${wanted[@]}"
    built_from >.venv/installed-base
    [[ ! $extra ]] || built_from >".venv/installed-$extra"
fi
