#!/usr/bin/env bash
# On a machine with one GPU, PyTorch, Triton, pytest with its xdist, timeout and
# benchmark plugins. OUT is a folder for rows, plots and logs.
#   bench/gpu.sh --check OUT    values and gradients of every kernel against fp64, the same bits in 100 runs, and
#                               rings and pipelines of 2 to 4 processes that share the GPU
#   bench/gpu.sh OUT            times beside floors and peers; a short table last
# Each takes at most 9 minutes, of which most is compiling, unless bench.ahead has done it: an H200 takes 65 s for the
# values. Wheels of what is missing may lie in bench/wheels/, and its kernels.tar.xz; where there is no git,
# MEGAGRAPH_COMMIT names the commit.
set -euo pipefail
check=
if [ "${1:-}" = --check ]; then check=1; shift; fi
mkdir -p "${1:?pass a folder for the rows}"
out=$(cd "$1" && pwd)
cd "$(dirname "$0")/.."
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1
if compgen -G 'bench/wheels/*.whl' > /dev/null; then
    site=$(mktemp -d)
    python3 -m pip install -q --no-index --no-deps --target "$site" bench/wheels/*.whl
    PYTHONPATH+=:$site
fi
if [ -f bench/wheels/kernels.tar.xz ]; then
    export TRITON_CACHE_DIR=/tmp/megagraph_kernels
    mkdir -p "$TRITON_CACHE_DIR" && tar -xJf bench/wheels/kernels.tar.xz -C "$TRITON_CACHE_DIR"
fi
python3 -c 'import torch; assert torch.cuda.is_available(), "no CUDA device here"'

if [ "$check" ]; then
    # kernels compile in as many processes; what needs processes of its own is not a matter of kernels; a line a test,
    # which a run that is cut off leaves behind
    # warnings of other versions are no faults; what the kernels compile to is known without a GPU
    export OMP_NUM_THREADS=1  # of as many processes as cores
    timeout -s INT -k 20 520 python3 -m pytest -v --tb short -n "$(nproc)" --benchmark-disable -m "slow or not slow" --junitxml "$out/check.xml" \
        -o filterwarnings=default --ignore tests/kernels/test_compile.py \
        -k "not processes and not mesh and not gathered" bench/test_values.py tests/attention tests/kernels \
        tests/parallel/test_captured.py \
        tests/test_train.py::test_a_pipeline_whose_stages_share_a_gpu \
        tests/parallel/test_pipeline.py::test_a_batch_is_whole_that_was_copied_while_the_one_before_was_used \
        2>&1 | tee "$out/check.log"
    exit
fi
timeout 200 python3 -m bench.warm 2>&1 | tee "$out/warm.log" || true  # what is not compiled yet is compiled later
status=0
left=$((520 - SECONDS))
timeout "$left" python3 -m pytest -q bench/test_pairs.py bench/test_ring.py bench/test_attention.py --rows "$out" \
    --budget $((left - 30)) --benchmark-quiet --benchmark-json "$out/pytest-benchmark.json" \
    > "$out/bench.log" 2>&1 || status=$?
tail -n 3 "$out/bench.log"
python3 -m bench.tables "$out"
exit $status
