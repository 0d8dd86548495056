#!/bin/sh
# Makes .venv hold altbackend (editable) with the given groups of extras, each group installed once:
#     sh tools/venv.sh triton,test lint
# A stamp per group, keyed by what decides its content, makes a second run cheap. A .venv that does not work
# (moved, half made, its Python gone) is made anew.
set -eu
cd "$(dirname "$0")/.."

PYTHON="${PYTHON:-python3}"
VENV=.venv
PY="$VENV/bin/python"

fail() {
    echo "tools/venv.sh: $1" >&2
    exit 1
}

key() { # of a group: the files that decide what gets installed, and the place it is installed for
    { cat constraints.txt setup.py pyproject.toml; pwd; echo "$1"; } | cksum | cut -d' ' -f1
}

works() {
    "$PY" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && "$PY" -m pip --version >/dev/null 2>&1
}

create() {
    command -v "$PYTHON" >/dev/null || fail "$PYTHON not found: install Python 3.10 or newer, or set PYTHON"
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        fail "$PYTHON is $("$PYTHON" -V 2>&1): altbackend needs Python 3.10 or newer; set PYTHON to one"
    echo "making $VENV with $("$PYTHON" -V 2>&1)"
    rm -rf "$VENV"
    "$PYTHON" -m venv "$VENV" || {
        rm -rf "$VENV"
        fail "$PYTHON -m venv failed: on Debian or Ubuntu, install the package python3-venv"
    }
}

install() {
    echo "installing altbackend[$1]"
    "$PY" -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$1]"
}

install_all() {
    for group in "$@"; do
        stamp="$VENV/.ready-$(key "$group")"
        if [ ! -e "$stamp" ]; then
            install "$group" || return 1
            touch "$stamp"
        fi
    done
    # A stamp says what was installed, this that it is still there.
    "$PY" -c 'import importlib.metadata as m; [m.version(n) for n in ("torch", "sympy", "pytest", "altbackend")]' \
        2>/dev/null || return 1
}

works || create
install_all "$@" || {
    echo "$VENV is incomplete; starting again" >&2
    create
    install_all "$@" || fail "installing failed; the messages above say why"
}
