#!/usr/bin/env bash
# On a machine with a GPU, from the repository root:
#   bench/gpu.sh --check     values and gradients of every kernel against fp64, bf16 included
#   bench/gpu.sh DATA        the same, then training on the raw data sets in DATA; rows land in bench/results/
set -euo pipefail
cd "$(dirname "$0")/.."
python3 -c 'import torch; assert torch.cuda.is_available(), "no CUDA device here"'
python3 -m pytest -q tests/attention tests/kernels
if [ "${1:-}" = --check ]; then exit; fi
for dataset in citeseer computers; do
    python3 -m bench.paper.accuracy --dataset "$dataset" --root "${1:?pass the folder of raw data sets}" --dtype bf16
done
