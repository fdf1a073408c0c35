#!/usr/bin/env bash
# Runs everything that needs a GPU within 25 minutes, in parts of at most 9, each leaving its record; then makes a page.
#
# It needs no network and no installation: PyTorch, Triton and pytest of the machine, and this checkout. Wheels that the
# machine lacks (for Pong: ale-py, gymnasium, farama-notifications) are taken from a folder and put into a temporary one.
set -uo pipefail

usage() {
    cat <<'END'
usage: bench/on_gpu.sh [PART ...] [option ...]

parts (all of them when none is given):
  tests              the tests marked gpu, except those of the kernels; 8.5 minutes at most
  kernels-and-bench  the tests of the kernels, then `gpu-replay bench kernels`, with plots, `gpu`, `frames` and
                     `peers`; 9 minutes at most
  train              `gpu-replay train catch`, then Pong if ale-py is there; 7 minutes at most
  page               the page of all records there are, those of earlier runs too; seconds

options:
  --output DIR       where records go (default: bench/results/NAME-OF-THE-GPU)
  --page FILE        where the page goes (default: bench/results/NAME-OF-THE-GPU.md, or DIR/page.md with --output)
  --wheels DIR       wheels of packages that the machine lacks
  --python FILE      the Python that has PyTorch (default: python3)
  --workers N        test processes on the one GPU (default: 4 where pytest-xdist is installed, else 1)
  --seconds N        the most that each part may take, instead of the times above
  --dry-run          print the commands instead of running them; needs no GPU
  --help             this text

A part writes NAME.log for each of its steps, beside JUnit XML, JSON lines and training output, and one line for each
step into PART.steps.jsonl. A step whose time is over is interrupted, and writes what it has. Failing tests stop nothing:
they are named in the records. The exit status is 0 only if every step of every part succeeded.
END
}

fail() {
    echo "on_gpu.sh: $*" >&2
    exit 2
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
parts=()
output="" page="" wheels="" python=python3 workers="" seconds="" dry=""
# together 25 minutes
declare -A most=([tests]=510 [kernels-and-bench]=540 [train]=420 [page]=30)
while (($#)); do
    case $1 in
        tests | kernels-and-bench | train | page) parts+=("$1") ;;
        --output | --page | --wheels | --python | --workers | --seconds)
            (($# > 1)) || fail "$1 needs a value; see --help"
            printf -v "${1#--}" %s "$2"
            shift
            ;;
        --dry-run) dry=yes ;;
        --help | -h) usage && exit 0 ;;
        *) fail "unknown part or option '$1'; see --help" ;;
    esac
    shift
done
((${#parts[@]})) || parts=(tests kernels-and-bench train page)
[[ -z $seconds || $seconds =~ ^[1-9][0-9]*$ ]] || fail "--seconds must be a whole number; found '$seconds'"
[[ -z $workers || $workers =~ ^[1-9][0-9]*$ ]] || fail "--workers must be a whole number; found '$workers'"
[[ -z $wheels || -d $wheels ]] || fail "--wheels $wheels is not a folder"
# paths are the caller's; the commands run at the root of the checkout
[[ -z $wheels ]] || wheels=$(cd "$wheels" && pwd)
[[ $output == /* || -z $output ]] || output=$PWD/$output
[[ $page == /* || -z $page ]] || page=$PWD/$page
[[ $python == */* && $python != /* ]] && python=$PWD/$python
command -v "$python" >/dev/null || fail "there is no $python; name one with --python"
cd "$root" || exit 2

# one line: name of the GPU, PyTorch, Triton, commit
describe() {
    "$python" - <<'END'
import sys
try:
    import torch
except ImportError as error:
    sys.exit(f"{sys.executable} has no PyTorch ({error})")
if not torch.cuda.is_available():
    sys.exit("PyTorch finds no GPU")
try:
    import triton
except ImportError as error:
    sys.exit(f"{sys.executable} has no Triton ({error})")
print(torch.cuda.get_device_name(), torch.__version__, triton.__version__, sep="\t")
END
}

gpu="" torch="" triton=""
if [[ -z $dry ]]; then
    found=$(describe) || fail "this needs a GPU, or --dry-run"
    IFS=$'\t' read -r gpu torch triton <<<"$found"
else
    gpu="no GPU"
fi
commit=$(git rev-parse --short=12 HEAD 2>/dev/null || echo unknown)
slug=$(tr -cs 'A-Za-z0-9' '-' <<<"$gpu" | tr 'A-Z' 'a-z')
slug=${slug#-}
[[ -n $page || -z $output ]] || page=$output/page.md
output=${output:-$root/bench/results/${slug%-}}
page=${page:-$output.md}

site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
export PYTHONPATH=$root:$site PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# other installed pytest plugins must not change the run; xdist is loaded by name below
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
status=0

has() {
    "$python" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$1') is None)" 2>/dev/null
}

# a shell in the background ignores SIGINT, and so does what it starts unless the default is restored
interruptible=()
env --default-signal=INT true 2>/dev/null && interruptible=(env --default-signal=INT)

# seconds of the part that a step reserves for those after it
reserve=0

# step NAME COMMAND ...: within what is left of the part's time, logged and recorded
step() {
    local name=$1 left=$((deadline - SECONDS - reserve)) started=$SECONDS code
    shift
    if [[ -n $dry ]]; then
        printf 'timeout -s INT -k 10 %s' "$((limit - reserve))"
        printf ' %q' "$@"
        echo
        return 0
    fi
    echo "== $part: $name"
    if ((left > 0)); then
        timeout -s INT -k 10 "$left" "${interruptible[@]}" "$@" 2>&1 | tee "$output/$name.log"
        code=${PIPESTATUS[0]}
    else
        echo "no time was left for it" | tee "$output/$name.log"
        code=124
    fi
    printf '{"part": "%s", "step": "%s", "status": %d, "seconds": %d, "gpu": "%s", "torch": "%s", "triton": "%s", "commit": "%s", "date": "%s"}\n' \
        "$part" "$name" "$code" "$((SECONDS - started))" "$gpu" "$torch" "$triton" "$commit" "$(date -u +%FT%TZ)" \
        >>"$output/$part.steps.jsonl"
    ((code == 0)) || {
        echo "== $part: $name ended with status $code"
        status=1
    }
    return 0
}

pytest() {
    local plugins=() name=$1
    shift
    if has xdist; then
        ((${workers:-4} > 1)) && plugins+=(-p xdist.plugin -n "${workers:-4}")
    fi
    step "$name" "$python" -m pytest "${plugins[@]}" -p no:cacheprovider --continue-on-collection-errors -m gpu \
        "--junitxml=$output/$name.xml" "$@"
}

part_tests() {
    pytest tests --ignore-glob='*/test_kernel*'
}

part_kernels-and-bench() {
    local files
    shopt -s nullglob
    files=(tests/test_kernel*.py)
    shopt -u nullglob
    # the steps at the end must not be left without any time
    reserve=$((limit / 2))
    ((${#files[@]} == 0)) || pytest kernels "${files[@]}"
    reserve=$((limit / 4))
    if [[ -n $dry ]] || has matplotlib; then
        bench kernels --plot
    else
        bench kernels
    fi
    reserve=$((limit / 6))
    bench gpu
    reserve=$((limit / 9))
    bench frames
    reserve=0
    bench peers --device cuda
}

# bench SUITE [OPTION ...]
bench() {
    step "bench-$1" "$python" -m gpu_replay bench "$@" --output "$output/$1.jsonl"
}

part_train() {
    local long=$((limit > 180 ? limit - 120 : 60))
    step catch "$python" -m gpu_replay train catch --device cuda --seed 0 --max-seconds 60 --output "$output/catch"
    if [[ -n $dry ]] || has ale_py; then
        step pong "$python" -m gpu_replay train pong --device cuda --seed 0 --max-seconds "$long" --output "$output/pong"
    else
        echo "== train: ale-py is not installed, so Pong is left out; give its wheels with --wheels"
    fi
}

part_page() {
    step page "$python" -m gpu_replay bench page --results "$output" --output "$page"
}

[[ -n $dry ]] || mkdir -p "$output" || exit 2
if [[ -n $wheels ]]; then
    install=("$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$site" "$wheels"/*.whl)
    if [[ -n $dry ]]; then
        printf '%q ' "${install[@]}"
        echo
    else
        "${install[@]}" || fail "the wheels in $wheels could not be installed"
    fi
fi
for part in "${parts[@]}"; do
    limit=${seconds:-${most[$part]}}
    deadline=$((SECONDS + limit)) reserve=0
    [[ -n $dry ]] || rm -f "$output/$part.steps.jsonl"
    "part_$part"
done
[[ -n $dry ]] || echo "== records are in $output"
exit "$status"
