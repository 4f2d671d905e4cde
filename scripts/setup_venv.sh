#!/bin/sh
# Makes the folder VENV a virtual environment with everything that tests, demo and notebooks need.
# usage: setup_venv.sh VENV PYTHON...   (the first PYTHON that is 3.11 or newer is taken)
#
# Made for a machine with Python, make and nothing else: Debian and Ubuntu ship `venv` without
# the part that brings pip (ensurepip), so that is installed first where we may.
set -eu

venv=$1
shift

say() { echo "setup: $*" >&2; }

python=
for candidate in "$@"; do
    # Run it: a pyenv shim exists even for a version that is not installed.
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        python=$candidate
        break
    fi
done
if [ -z "$python" ]; then
    say "no Python >= 3.11 among: $*"
    say "install one, or name it: make PYTHON=/path/to/python3.11"
    exit 1
fi

has_ensurepip() { "$python" -c 'import ensurepip, venv' 2>/dev/null; }

# Kept when it works: then only what changed is installed. `--clear` replaces half a venv.
if ! "$venv/bin/python" -c 'import pip' 2>/dev/null; then
    if ! has_ensurepip; then
        package=$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
        if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
            say "$python has no ensurepip: installing $package with apt-get"
            export DEBIAN_FRONTEND=noninteractive
            apt-get update -qq || say "apt-get update failed; trying with the package lists as they are"
            apt-get install -y -qq --no-install-recommends "$package" >/dev/null || true
        fi
        if ! has_ensurepip; then
            say "$python cannot make virtual environments: it has no ensurepip."
            say "On Debian or Ubuntu:  sudo apt-get install $package"
            say "Then run make again, or name another Python: make PYTHON=/path/to/python3.11"
            exit 1
        fi
    fi
    say "making $venv with $("$python" --version)"
    "$python" -m venv --clear "$venv"
fi

pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

# The project is editable, so a change of code needs no second install.
say "installing what constraints.txt pins (a minute or two the first time)"
pip install --quiet -c constraints.txt hatchling
pip install --quiet -c constraints.txt --no-build-isolation -e '.[torch,jax,dev]'
