#!/usr/bin/env bash
# For a GPU of 80 GB, on which it was not run yet: the tests, then what each memory costs with
# M = T = 512 in bfloat16. From the repository's root, with the packages of requirements.txt:
#
#     bash tools/gpu.sh [SmolLM2-135M] > gpu.txt
#
# The first table is of random weights with the sizes of Llama-2 7B, the second of a folder's.
set -euo pipefail
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
python -m pytest -q || echo "tests: code $?"
bench="timeout 240 python tools/bench.py --device cuda --dtype bfloat16 --mem 512 --segment 512"
rows="--rows full streaming h2o selection --rounds 1 --contexts 32768"
$bench $rows --dim 4096 --layers 32 --heads 32 --ffn 11008 --vocab 32000 --seq 4096 --lora-rank 0 \
    --parts prefill decode compress || echo "7B: code $?"
if [ $# -gt 0 ]; then
    $bench $rows --model "$1" --seq 8192 || echo "$1: code $?"
fi
