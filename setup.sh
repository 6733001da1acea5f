#!/bin/sh
# Set-up of a checkout, called by every `make` target that needs it: Debian packages (as root),
# .venv with the locked Python dependencies, the CO-RE objects. Silent and quick when nothing is
# missing; what cannot be had is said in one line and left out. `./setup.sh bench` adds the rivals
# that the benchmarks compare with, `./setup.sh lab` what guests need: QEMU, tools, kernels,
# `./setup.sh engines [NAME]` the real engines of the live tests, each in its own environment.
set -eu
cd "$(dirname "$0")"

say() { echo "set-up: $*" >&2; }

# One set-up at a time in one checkout; the lock ends with this process.
if command -v flock >/dev/null; then
    exec 9<setup.sh
    flock 9
fi

# ---- what is there -------------------------------------------------------------------------

# The interpreter: $PYTHON, or the first that is new enough and can make a virtual environment.
find_python() {
    for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11 \
        /usr/bin/python3 /usr/bin/python3.13 /usr/bin/python3.12 /usr/bin/python3.11}; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' \
            2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
}

is_set_up() { # the stamp says which lock, in which folder, with which Python
    [ -x .venv/bin/python ] && [ "$(cat .venv/.locked 2>/dev/null)" = "$(stamp)" ]
}

stamp() {
    digest=$(cat requirements.lock pyproject.toml | sha256sum | cut -c1-64)
    echo "$digest $PWD $(readlink -f .venv/bin/python)"
}

missing_packages() {
    ls -d /usr/lib/python3*/*-packages/bcc >/dev/null 2>&1 || echo python3-bpfcc
    command -v fio >/dev/null || echo fio
    is_set_up || [ -n "$(find_python)" ] || debian_python
    objects_are_current || command -v clang >/dev/null || echo clang
    if [ "${1:-}" = bench ]; then
        command -v bpftrace >/dev/null || echo bpftrace
        command -v biosnoop-bpfcc >/dev/null || echo bpfcc-tools
    fi
    if [ "${1:-}" = engines ]; then # Mooncake gets a network of its own
        [ -x /usr/sbin/ip ] || [ -x /sbin/ip ] || echo iproute2
    fi
    if [ "${1:-}" = lab ]; then
        command -v qemu-system-x86_64 >/dev/null || echo qemu-system-x86
        command -v busybox >/dev/null || echo busybox-static
        [ -x /usr/sbin/nvme ] || echo nvme-cli
        [ -x /usr/sbin/modprobe ] || [ -x /sbin/modprobe ] || echo kmod
        [ -x /usr/bin/rdma ] || [ -x /usr/sbin/rdma ] || [ -x /sbin/rdma ] || echo iproute2
    fi
}

debian_python() { # Ubuntu 22.04 has 3.11 beside an older python3
    if python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
        ! command -v python3 >/dev/null; then
        echo python3-venv
    else
        echo python3.11-venv
    fi
}

install_packages() {
    missing=$(missing_packages "$@" | xargs)
    [ -n "$missing" ] || return 0
    if ! command -v apt-get >/dev/null; then
        say "not Debian or Ubuntu, going on without: $missing"
    elif [ "$(id -u)" != 0 ]; then
        say "not root, going on without: $missing (sudo apt-get install $missing)"
    else
        say "installing $missing"
        log=$(mktemp)
        # shellcheck disable=SC2086 # a list of words
        if ! { apt-get update -qq; DEBIAN_FRONTEND=noninteractive apt-get install -qq -y \
            --no-install-recommends -o DPkg::Lock::Timeout=120 $missing; } >"$log" 2>&1 </dev/null
        then
            say "going on without: $missing (apt-get: $(grep '^E:' "$log" | tail -1))"
        fi
        rm -f "$log"
    fi
}

# ---- Python --------------------------------------------------------------------------------

install_python() {
    is_set_up && return 0
    if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
        python=$(find_python)
        if [ -z "$python" ]; then
            say "needs Python 3.11 or newer with its venv module"
            exit 3
        fi
        "$python" -m venv --clear .venv
    fi
    say "installing the locked Python dependencies into .venv"
    pip="env PIP_DISABLE_PIP_VERSION_CHECK=1 .venv/bin/python -m pip -qq"
    $pip install --require-hashes -r requirements.lock
    $pip install --no-deps --no-build-isolation --editable .
    stamp >.venv/.locked
}

# ---- the CO-RE objects ---------------------------------------------------------------------

objects="probes/kvprobe.bpf.o probes/kvprobe-plain.bpf.o"

objects_are_current() {
    for object in $objects; do
        [ -f "$object" ] && [ -z "$(find probes kvprobe/bpf kvprobe/schema.py -newer "$object" \
            \( -name '*.bpf.[ch]' -o -name '*.toml' -o -name '*.py' \))" ] || return 1
    done
}

build_objects() { # without them kvprobe compiles with bcc on the node
    objects_are_current || ! command -v clang >/dev/null && return 0
    said=$(env -u KVPROBE_CONTENT .venv/bin/python -m kvprobe.bpf.core_object 2>&1) ||
        say "going on without the compiled probes: $(echo "$said" | tail -1)"
}

# ---- kernels for guests --------------------------------------------------------------------

fetch_kernels() { # some hundred MB, once; what fails says so in a line, and tests say it again
    if [ "${1:-}" = lab ] && [ "$(id -u)" = 0 ]; then
        .venv/bin/python -m tests.lab.kernels || true
    fi
}

# ---- real engines --------------------------------------------------------------------------

engines="vllm llamacpp mooncake sglang"

install_engines() { # ENGINE ..: all without a name; what cannot be had is said in a line
    [ "${1:-}" = engines ] || return 0
    shift
    for name in ${*:-$engines}; do
        lock=tests/live/requirements-$name.txt
        home=.cache/engines/$name
        [ -f "$lock" ] || { say "no engine named $name (there are: $engines)"; exit 2; }
        wanted="$(sha256sum <"$lock") $PWD"
        [ "$(cat "$home/.installed" 2>/dev/null)" = "$wanted" ] && continue
        say "installing $name into $home"
        log=$(mktemp)
        if fill_environment "$name" "$home" "$lock" >"$log" 2>&1 </dev/null; then
            echo "$wanted" >"$home/.installed"
        else
            say "going on without $name: $(grep -i error "$log" | tail -1 | cut -c1-200)"
        fi
        rm -f "$log"
    done
}

fill_environment() { # NAME HOME LOCK; the locks are for CPython 3.11 on x86-64
    "$(command -v python3.11 || echo .venv/bin/python)" -m venv --clear "$2" &&
        "$2/bin/python" -m pip install -q --no-deps --require-hashes -r "$3" || return 1
    if [ "$1" = vllm ]; then # a CPU build, from wherever pip looks or from its makers
        torch="-m pip install -q --no-deps torch==2.13.0+cpu"
        # shellcheck disable=SC2086 # words
        "$2/bin/python" $torch ||
            "$2/bin/python" $torch --index-url https://download.pytorch.org/whl/cpu
    fi
}

install_packages "$@"
install_python
build_objects
fetch_kernels "$@"
install_engines "$@"
