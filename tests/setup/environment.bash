# Where the tests' machine-wide parts live, and how a command is run among them.
# Sourced by install, run-tests and run-as-user.
# shellcheck shell=bash disable=SC2034  # what is set here is used by those who source it

test_user=hpcroll
base_dir=/var/lib/hpcroll-test
images_dir=$base_dir/images
agents_dir=$base_dir/agents
venv_dir=$base_dir/venv
engine_dir=$base_dir/engine
consumers_dir=$base_dir/consumers
source_dir=$base_dir/src
data_dir=$base_dir/data
# On a disk: /tmp may be memory (Debian 13), and images are unpacked here.
scratch_dir=/var/tmp/hpcroll-test
trusted_dir=/usr/local/lib/hpcroll/devcluster

setup_dir=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" && pwd)
checkout=$(cd "$setup_dir/../.." && pwd)
devcluster=$checkout/slurm/devcluster/devcluster
program=${0##*/}

umask 022
# Root may carry a PATH of its own programs (pyenv, conda) that the test user cannot read.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin

say() { printf '%s: %s\n' "$program" "$*"; }
die() { printf '%s: %s\n' "$program" "$*" >&2; exit 1; }

passed_names() { # names of the variables that pip and the tests may need
    compgen -e | grep -E '^(PIP_.*|UV_.*|HPCROLL_.*|.*_proxy|.*_PROXY|CI|TERM|PYTEST_ADDOPTS|SSL_CERT_FILE|SSL_CERT_DIR|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE|GIT_SSL_CAINFO)$' || true
}

become_root() { # ARGUMENTS...: go on as root, by sudo
    [ "$(id -u)" -ne 0 ] || return 0
    command -v sudo >/dev/null ||
        die "needs root (a Slurm cluster, a user of its own, packages): run it as root, or install sudo"
    sudo -n true 2>/dev/null || [ -t 0 ] ||
        die "needs root, and sudo wants a password without a terminal to ask on: run it as root"
    exec sudo --preserve-env="$(passed_names | paste -sd, -)" -- "$setup_dir/$program" "$@"
}

as_test_user() { # COMMAND...: in a clean environment and in the copy of the checkout
    local name passed=()
    for name in $(passed_names); do
        passed+=("$name=${!name}")
    done
    cd "$source_dir" || die "the copy of the checkout is gone: $source_dir"
    # setpriv and env each become the next program, so that a pid stays the command's.
    exec setpriv --reuid "$test_user" --regid "$(id -g "$test_user")" --init-groups \
        env -i "${passed[@]}" \
        HOME="$(getent passwd "$test_user" | cut -d: -f6)" USER="$test_user" LOGNAME="$test_user" \
        SHELL=/bin/bash LANG=C.UTF-8 TMPDIR="$scratch_dir" \
        PATH="$venv_dir/bin:$PATH" VIRTUAL_ENV="$venv_dir" \
        HYPOTHESIS_STORAGE_DIRECTORY="$scratch_dir/hypothesis" \
        HPCROLL_TEST_IMAGES="$images_dir" HPCROLL_TEST_AGENTS="$agents_dir" "$@"
}

# Some programs want a newer Python than Debian 12 has: HPCROLL_NEWER_PYTHON, else one on PATH or of pyenv.
newer_python() {
    local python
    for python in "${HPCROLL_NEWER_PYTHON:-}" python3.13 python3.12 \
        "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[23].*/bin/python3; do
        [ -n "$python" ] && command -v "$python" && return 0
    done
    return 1
}

# --- the copy of the checkout, and the project in the tests' environment ---------------

hold_test_lock() { # one run at a time: a second would replace the sources under the first
    exec 8>"$base_dir/lock"
    flock -n 8 || { say "waiting for another run to end ($base_dir/lock)"; flock 8; }
}

list_checkout() { # NUL-separated files of the checkout, ignored ones left out
    # A downloaded archive has no .git; a checkout may belong to another user than root.
    git -c safe.directory='*' -C "$checkout" ls-files -z --cached --others --exclude-standard 2>/dev/null ||
        (cd "$checkout" && find . -name .venv -prune -o -name __pycache__ -prune -o -type f -print0)
}

copy_checkout() {
    rm -rf "$source_dir.new"
    mkdir -p "$source_dir.new"
    # A file that was removed but not yet from git's index is still listed.
    list_checkout | (cd "$checkout" && while IFS= read -r -d '' file; do
        [ ! -e "$file" ] && [ ! -L "$file" ] || printf '%s\0' "$file"
    done | sort -zu | tar --null --no-recursion -T - -cf -) | tar -x -C "$source_dir.new" --no-same-owner
    chmod -R a+rX "$source_dir.new"
    rm -rf "$source_dir"
    mv "$source_dir.new" "$source_dir"
}

install_project() { # into the venv; skipped while what it depends on is unchanged
    local stamp=$venv_dir/.project key
    key=$({ cat "$source_dir/pyproject.toml"; "$venv_dir/bin/python" -V; } | sha256sum)
    if [ "$(cat "$stamp" 2>/dev/null)" != "$key" ]; then
        say "installing the project with [all,torch,dev] into $venv_dir"
        rm -f "$stamp"
        "$venv_dir/bin/python" -m pip install --quiet --editable "${source_dir}[all,torch,dev]" </dev/null ||
            die "pip could not install the project; is an index reachable?"
        echo "$key" >"$stamp"
    fi
    # The test user may not write there: compiled once here, not by every worker again.
    "$venv_dir/bin/python" -m compileall -q "$source_dir" >/dev/null || true
}

copy_task_data() { # sets HPCROLL_TASK_DATA to a copy that the test user can read
    local data=${HPCROLL_TASK_DATA:-$checkout/../shared/data}
    unset HPCROLL_TASK_DATA
    if [ ! -d "$data" ]; then
        say "no task data at $data (HPCROLL_TASK_DATA): the tests over it will say so"
        return 0
    fi
    rm -rf "$data_dir"
    cp -rL --no-preserve=all "$data" "$data_dir"
    chmod -R a+rX "$data_dir"
    export HPCROLL_TASK_DATA=$data_dir
}

prepare_run() {
    [ -x "$venv_dir/bin/python" ] || die "the test environment is not installed: run tests/setup/install"
    hold_test_lock
    copy_checkout
    install_project
    copy_task_data
    install -d -o "$test_user" -g "$(id -g "$test_user")" "$scratch_dir"
    # In CI a capability that the set-up installs must be there: its tests fail, not skip.
    [ "${CI:-}" != true ] || export HPCROLL_REQUIRE=${HPCROLL_REQUIRE:-slurm,apptainer,bwrap,userns,sharedfs,task-data,engine,torch,consumers}
}
