#!/usr/bin/env bash
# Pretrain a small GPT-2 and a small BERT on the shipped corpus with 0/1 Adam, on 2 replicas of this machine.
# Run again after an interruption, it goes on where it stopped:
#
#   launch/quickstart.sh [FLAGS...]             flags of pretrain_gpt.py and pretrain_bert.py, such as --train-iters 50
#   REPLICAS=4 launch/quickstart.sh
set -euo pipefail
source "$(dirname "$0")/common.sh"
cd "$(dirname "$0")/.."
replicas=${REPLICAS:-2}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

python data/prepare.py
for model in gpt2 bert; do
    script=pretrain_${model%2}.py
    echo
    echo "=== $script --config configs/$model/debug.yaml, $replicas replicas ==="
    torchrun --standalone --nproc-per-node "$replicas" "$script" \
        --config "configs/$model/debug.yaml" --save "checkpoints/${model}_debug" --load auto "$@"
done
