# Sourced by the scripts beside it: goes to the top of the repository, makes .venv when there is none, and installs into it when
# what it is made from has changed since.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

install_venv() {
    local stamp=.venv/.installed pip=(.venv/bin/python -m pip install -qq --disable-pip-version-check)
    local wanted
    wanted=$(cat pyproject.toml scripts/constraints.txt src/ringloader/_kernels/*.{py,c,h} | sha256sum)
    [[ -x .venv/bin/python ]] || python3 -m venv .venv
    [[ -f $stamp && $(<"$stamp") == "$wanted" ]] && return
    # torch by its pin first: nothing else may choose which of its builds is taken.
    "${pip[@]}" "$(grep '^torch==' scripts/constraints.txt)"
    "${pip[@]}" -c scripts/constraints.txt -e '.[test,dev,demo]'
    printf '%s\n' "$wanted" >"$stamp"
}

# Two scripts started at once install one after the other.
(flock 9 && install_venv) 9<scripts/constraints.txt
export PATH="$PWD/.venv/bin:$PATH"
# The package is run from its source. Compiled once, as an installed one is, a worker starts in two thirds of the time.
unset PYTHONDONTWRITEBYTECODE

# Print a command, then run it.
run() {
    echo "+ $*"
    "$@"
}
