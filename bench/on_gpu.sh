#!/usr/bin/env bash
# Runs everything that needs a GPU within 25 minutes, in parts of at most 8 that can be run one by one; then makes a page.
#
# It needs no network and no installation: PyTorch, Triton and pytest of the machine, and this checkout. Wheels that the
# machine lacks (for Pong: ale-py, gymnasium, farama-notifications) are taken from a folder and put into a temporary one.
set -uo pipefail

usage() {
    cat <<'END'
usage: bench/on_gpu.sh [PART ...] [option ...]

parts, in the order in which they run (all of them when none is given):
  smoke     2 minutes: imports, every operation once beside the host code, a captured step, Catch is learned
  records   8 minutes: `gpu-replay bench kernels`, `gpu`, `frames` and `peers`, cases with targets first
  pong      4.5 minutes: `gpu-replay train device-pong`, and `pong` if ale-py is there
  tests     7.5 minutes: all tests marked gpu
  memcheck  2.5 minutes: some calls under compute-sanitizer, if it is there
  page      seconds: plots, and the page of all records there are, those of earlier runs too

options:
  --output DIR     where records go (default: bench/results/NAME-OF-THE-GPU)
  --archives DIR   where each part leaves PART.tar.gz, all of the output but checkpoints (default: OUTPUT-archives)
  --page FILE      where the page goes (default: bench/results/NAME-OF-THE-GPU.md, or DIR/page.md with --output)
  --wheels DIR     wheels of packages that the machine lacks
  --python FILE    the Python that has PyTorch (default: python3)
  --workers N      test processes on the one GPU (default: cores - 2 where pytest-xdist is installed, else 1)
  --seconds N      the most that each part may take, instead of the times above
  --dry-run        print the commands instead of running them; needs no GPU
  --rehearsal      run all of it without a GPU, in small; what it records means nothing
  --help           this text

A part writes NAME.log for each of its steps, beside JSON lines and training output, and one line for each step into
PART.steps.jsonl. All is written as soon as it is known, and the archive is renewed every 30 seconds, so a part may be
killed at any moment. A step whose time is over is interrupted. Failing tests stop nothing: they are named in the
records. The exit status is 0 only if every step of every part succeeded.
END
}

fail() {
    echo "on_gpu.sh: $*" >&2
    exit 2
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
parts=()
output="" archives="" page="" wheels="" python=python3 workers="" seconds="" dry="" rehearsal=""
# together 25 minutes
declare -A most=([smoke]=120 [records]=480 [pong]=270 [tests]=450 [memcheck]=150 [page]=30)
while (($#)); do
    case $1 in
        smoke | records | pong | tests | memcheck | page) parts+=("$1") ;;
        --output | --archives | --page | --wheels | --python | --workers | --seconds)
            (($# > 1)) || fail "$1 needs a value; see --help"
            printf -v "${1#--}" %s "$2"
            shift
            ;;
        --dry-run) dry=yes ;;
        --rehearsal) rehearsal=yes ;;
        --help | -h) usage && exit 0 ;;
        *) fail "unknown part or option '$1'; see --help" ;;
    esac
    shift
done
((${#parts[@]})) || parts=(smoke records pong tests memcheck page)
[[ -z $seconds || $seconds =~ ^[1-9][0-9]*$ ]] || fail "--seconds must be a whole number; found '$seconds'"
[[ -z $workers || $workers =~ ^[1-9][0-9]*$ ]] || fail "--workers must be a whole number; found '$workers'"
[[ -z $wheels || -d $wheels ]] || fail "--wheels $wheels is not a folder"
# paths are the caller's; the commands run at the root of the checkout
[[ -z $wheels ]] || wheels=$(cd "$wheels" && pwd)
[[ $output == /* || -z $output ]] || output=$PWD/$output
[[ $archives == /* || -z $archives ]] || archives=$PWD/$archives
[[ $page == /* || -z $page ]] || page=$PWD/$page
((${workers:=$(($(nproc) > 3 ? $(nproc) - 2 : 1))}))
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

# what runs a module: in a rehearsal as if there were a GPU
run=("$python" -m)
gpu="no GPU" torch="" triton=""
if [[ -n $rehearsal ]]; then
    run=("$python" -m rehearsal)
    gpu="a rehearsal" workers=1
elif [[ -z $dry ]]; then
    found=$(describe) || fail "this needs a GPU, or --dry-run"
    IFS=$'\t' read -r gpu torch triton <<<"$found"
fi
commit=$(git rev-parse --short=12 HEAD 2>/dev/null || echo unknown)
slug=$(tr -cs 'A-Za-z0-9' '-' <<<"$gpu" | tr 'A-Z' 'a-z')
slug=${slug#-}
[[ -n $page || -z $output ]] || page=$output/page.md
output=${output:-$root/bench/results/${slug%-}}
page=${page:-$output.md}
archives=${archives:-$output-archives}

site=$(mktemp -d)
packer="" part=""
trap 'rm -rf "$site"; end_part' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
export PYTHONPATH=$root:$site${rehearsal:+:$root/tests/helpers:$root/tests/contract} PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# other installed pytest plugins must not change the run; xdist is loaded by name below
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
status=0

has() {
    "$python" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$1') is None)" 2>/dev/null
}

# the output as it is now, in one file that is never half written; files may grow meanwhile
pack() {
    tar -czf "$archives/.$part.partial" --exclude=checkpoint -C "$output" . 2>/dev/null
    mv "$archives/.$part.partial" "$archives/$part.tar.gz"
}

begin_part() {
    part=$1 limit=${seconds:-${most[$1]}} reserve=0
    deadline=$((SECONDS + limit))
    [[ -n $dry ]] && return
    mkdir -p "$output" "$archives" || exit 2
    rm -f "$output/$part.steps.jsonl"
    while sleep 30; do pack; done >/dev/null 2>&1 &
    packer=$!
}

end_part() {
    [[ -n $packer ]] || return 0
    kill "$packer" 2>/dev/null
    wait "$packer" 2>/dev/null
    packer=""
    pack
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

# pytest NAME ARGUMENT ...
pytest() {
    local plugins=() name=$1
    shift
    ((workers > 1)) && has xdist && plugins=(-p xdist.plugin -n "$workers" --dist worksteal)
    rm -f "$output/$name.outcomes.jsonl"
    step "$name" "${run[@]}" pytest "${plugins[@]}" -p no:cacheprovider --continue-on-collection-errors -v -m gpu \
        "--outcomes=$output/$name.outcomes.jsonl" "$@"
}

# bench SUITE [OPTION ...]
bench() {
    step "bench-$1" "${run[@]}" gpu_replay bench "$@" ${rehearsal:+--quick} --output "$output/$1.jsonl"
}

# train NAME ENV [OPTION ...]
train() {
    local name=$1
    shift
    # what a checkpoint holds of a buffer takes gigabytes
    step "$name" "${run[@]}" gpu_replay train "$@" --device cuda --seed 0 --no-checkpoint-replay --overwrite \
        --output "$output/$name"
}

# a training run of a rehearsal
tiny=(--steps 120 --num-envs 8 --capacity 400 --warmup 80 --batch-size 8 --updates 1 --eval-episodes 2
    --eval-max-steps 5 --log-every 40)

part_smoke() {
    reserve=$((limit * 3 / 4))
    step info "${run[@]}" gpu_replay info
    reserve=$((limit * 3 / 8))
    pytest smoke-tests tests/kernels/test_gpu_smoke.py ${rehearsal:+-k "everything and transitions"}
    reserve=0
    train catch catch --max-seconds "$((limit / 3))" \
        ${rehearsal:+"${tiny[@]}"}
}

part_records() {
    # the suites at the end must not be left without any time
    reserve=$((limit * 9 / 20))
    bench kernels ${rehearsal:+--only N=1k}
    reserve=$((limit / 6))
    bench gpu ${rehearsal:+--only "*cycle*"}
    reserve=$((limit / 12))
    bench frames
    reserve=0
    bench peers --device cuda
}

part_pong() {
    local left
    # the game on the GPU is over long before
    reserve=$((limit * 3 / 4))
    train device-pong device-pong --max-seconds "$((limit / 6))" ${rehearsal:+"${tiny[@]}" --steps 168}
    reserve=0
    left=$((deadline - SECONDS))
    # what is printed does not depend on the clock
    [[ -z $dry ]] || left=$limit
    if [[ -n $dry ]] || has ale_py; then
        train pong pong --max-seconds "$((left - 60))" ${rehearsal:+"${tiny[@]}" --n-step 3 --warmup 40 --steps 104}
    else
        echo "== pong: ale-py is not installed, so it is left out; give its wheels with --wheels"
    fi
}

part_tests() {
    local where=tests
    [[ -z $rehearsal ]] || where=tests/programs/test_bench_timing.py
    pytest tests "$where"
}

part_memcheck() {
    local tool plain=("${run[@]}")
    local run workers=1
    tool=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null) || true
    if [[ -n $dry || -n $rehearsal || -n $tool ]]; then
        # memory as the driver gives it, so that what lies outside of a tensor is nobody's
        run=(env PYTORCH_NO_CUDA_MEMORY_CACHING=1 ${tool:+"$tool" --tool memcheck --error-exitcode 9} "${plain[@]}")
        pytest memcheck tests/kernels/test_gpu_smoke.py -k "test_every_call_once and ${rehearsal:+transitions-}everything"
    else
        echo "== memcheck: there is no compute-sanitizer, so it is left out"
    fi
}

part_page() {
    if [[ -n $dry || -f $output/kernels.jsonl ]] && has matplotlib; then
        step plot "$python" -m gpu_replay bench plot "$output/kernels.jsonl"
    fi
    step page "$python" -m gpu_replay bench page --results "$output" --output "$page"
}

if [[ -n $wheels ]]; then
    install=("$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$site" "$wheels"/*.whl)
    if [[ -n $dry ]]; then
        printf '%q ' "${install[@]}"
        echo
    else
        "${install[@]}" || fail "the wheels in $wheels could not be installed"
    fi
fi
for name in "${parts[@]}"; do
    begin_part "$name"
    "part_$name"
    end_part
done
[[ -n $dry ]] || echo "== records are in $output, archives of them in $archives"
exit "$status"
