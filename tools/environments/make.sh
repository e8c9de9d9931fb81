#!/usr/bin/env bash
# Make an environment for a way to run that needs packages of its own: horovod or xla.
#
#     tools/environments/make.sh horovod|xla|xla-small [python3]
#
# What takes long is built once for all checkouts, in the user's cache ($PHASELOOP_CACHE). .venv-horovod
# or .venv-xla stands before it: a thin environment of this checkout, with phaseloop as it is here.
# xla-small does on a CPU what xla does, with a quarter of the download: libraries of CUDA, which a
# CUDA build of torch wants to see, are stood in for.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
name=$1
python=${2:-python3}

horovod=0.28.1
torch=$(sed -n 's/^torch==//p' "$root/constraints.txt") # what horovod is built against
xla=2.9.0                                              # the last one there will be,
xla_torch=2.9.1                                        # and the torch that it is built against

fail() { echo "make.sh: $*" >&2; exit 1; }

version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
case $name in
horovod) built=horovod-$horovod-torch-$torch-py$version ;;
xla | xla-small) built=$name-$xla-torch-$xla_torch-py$version ;;
*) fail "there are: horovod, xla, xla-small; given: $name" ;;
esac
cache=${PHASELOOP_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/phaseloop}
mkdir -p "$cache"

# Everything but what is being installed, in the versions that phaseloop is tested with.
packages() { grep -v '^torch==' "$root/constraints.txt"; }

# What phaseloop and its tests need; not phaseloop itself, since other checkouts use this too.
install_packages() {
    "$env/bin/python" - "$root/pyproject.toml" >"$env/packages.txt" <<'LIST'
import sys
try:
    import tomllib
except ImportError:  # Python 3.10
    from pip._vendor import tomli as tomllib
with open(sys.argv[1], "rb") as file:
    project = tomllib.load(file)["project"]
print(*project["dependencies"], *project["optional-dependencies"]["dev"], sep="\n")
LIST
    "$env/bin/pip" install -q -c "$1" -r "$env/packages.txt"
}

build_horovod() {
    command -v g++ >/dev/null && command -v cmake >/dev/null ||
        fail "building Horovod takes g++ and cmake (3.25 is known to do)"
    install_packages "$root/constraints.txt"
    "$env/bin/pip" install -q -c "$root/constraints.txt" wheel packaging cloudpickle psutil pyyaml cffi
    # Its CMake files ask for C++14, and torch's headers for C++20: the last option counts.
    place=$(mktemp -d)
    trap 'rm -rf "$place"' EXIT
    cat >"$place/cxx" <<'COMPILER'
#!/bin/sh
case " $* " in *".cc "*) set -- "$@" -std=c++20 -O1 -g0 ;; esac
exec g++ "$@"
COMPILER
    chmod +x "$place/cxx"
    # Without isolation, else it sees no torch, and leaves its torch part out without a word; without
    # pip's cache, which knows wheels by version of Horovod, not of torch.
    HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 \
        HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1 HOROVOD_CPU_OPERATIONS=GLOO \
        MAKEFLAGS="-j$(nproc)" CXX=$place/cxx PATH=$env/bin:$PATH \
        "$env/bin/pip" install -q --no-cache-dir --no-build-isolation --no-deps "horovod==$horovod"
    "$env/bin/python" -c 'import horovod.torch as hvd; hvd.init; hvd.gloo_built() or exit(1)' ||
        fail "Horovod was built without its torch part, or without Gloo"
}

build_xla() {
    packages >"$env/constraints.txt"
    echo "torch==$xla_torch" >>"$env/constraints.txt"
    "$env/bin/pip" install -q "torch==$xla_torch" "torch_xla==$xla"
    install_packages "$env/constraints.txt"
}

build_xla-small() {
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        fail "xla-small takes Python 3.11 or newer, for which constraints.txt is whole"
    command -v gcc >/dev/null && command -v readelf >/dev/null || fail "xla-small takes gcc and readelf"
    packages >"$env/constraints.txt"
    "$env/bin/pip" install -q --no-deps "torch==$xla_torch" "torch_xla==$xla" \
        nvidia-cuda-runtime-cu12==12.8.90 nvidia-cuda-cupti-cu12==12.8.90 nvidia-cufile-cu12==1.13.1.3
    "$env/bin/pip" install -q --no-deps -r "$env/constraints.txt"
    "$env/bin/python" "$here/stub_cuda.py" "$env/lib/python$version/site-packages/torch/lib"
}

check_xla() {
    PJRT_DEVICE=CPU "$env/bin/python" -c 'import torch_xla; torch_xla.device()' 2>/dev/null ||
        fail "torch_xla was installed, and does not start on the CPU"
}

# Whatever it is built from is in its name: another one is built beside it, since jobs may use this.
recipe=$({ cat "$root/constraints.txt" "$here/stub_cuda.py"; declare -f "build_$name" install_packages; } |
    sha256sum | cut -c 1-12)
env=$cache/$built-$recipe
exec 9>"$env.lock"
flock 9 # two checkouts may want it at once
if [[ ! -e $env/.complete ]]; then
    echo "building $built once, for all checkouts, in $cache: minutes"
    rm -rf "$env" # of one that was broken off
    "$python" -m venv "$env"
    "build_$name"
    [[ $name == xla* ]] && check_xla
    touch "$env/.complete"
fi

thin=$root/.venv-${name%-small}
site=$thin/lib/python$version/site-packages
lines="import site; site.addsitedir('$env/lib/python$version/site-packages')"
if [[ $(cat "$site/built.pth" 2>/dev/null) != "$lines" ]]; then # else left alone: jobs may use it
    rm -rf "$thin"
    "$python" -m venv --without-pip "$thin"
    ln -s "$root/phaseloop" "$site/phaseloop"
    echo "$lines" >"$site/built.pth"
fi
if [[ $name == horovod ]]; then # with the Python of this one; it starts processes that import it again
    cat >"$thin/bin/horovodrun" <<PROGRAM
#!$thin/bin/python
if __name__ == "__main__":
    from horovod.runner.launch import run_commandline

    run_commandline()
PROGRAM
    chmod +x "$thin/bin/horovodrun"
fi
echo "ready: ${thin#"$root"/}/bin/python tools/run.py config=digits backend=${name%-small}"
