#!/bin/sh
# Exact versions and hashes of each engine's environment, from the lists requirements-NAME.in;
# NAME.overrides says what of their dependencies is left out. Needs a network; run it by hand.
set -eu
cd "$(dirname "$0")"
tool=$(mktemp -d)
trap 'rm -rf "$tool"' EXIT
python3 -m venv "$tool"
"$tool/bin/python" -m pip install -qq uv
for list in requirements-*.in; do
    name=${list%.in}
    options=
    [ ! -f "$name.overrides" ] || options="--override $name.overrides"
    [ "$name" != requirements-sglang ] || options=--no-deps # one class of it is used
    # shellcheck disable=SC2086 # words
    "$tool/bin/uv" pip compile --quiet --python-version 3.11 --generate-hashes --no-annotate \
        --python-platform x86_64-manylinux_2_34 --upgrade $options \
        --custom-compile-command tests/live/lock.sh --output-file "$name.txt" "$list"
done
