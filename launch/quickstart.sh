#!/usr/bin/env bash
# Pretrain a small GPT-2 and a small BERT on the shipped corpus with 0/1 Adam, on 2 replicas of this machine.
# Token files, checkpoints and runs go to the current folder; run again, it continues where it stopped:
#
#   launch/quickstart.sh [FLAGS...]             flags of megatron01 pretrain, such as --train-iters 200
#   REPLICAS=4 launch/quickstart.sh --dry-run   show the commands, and start nothing
set -euo pipefail
source "$(dirname "$0")/common.sh"
replicas=${REPLICAS:-2}
require_whole 1 REPLICAS "$replicas"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

sample=("$PYTHON" -m megatron01 data sample)
if [ ${#dry_run[@]} -gt 0 ]; then
    show "${sample[@]}"
else
    require_torchrun
    "${sample[@]}"
fi
for model in gpt2 bert; do # --local-addr: torch would take the machine's own name, which may resolve to nothing
    pretrain=(-m megatron01 pretrain "${model%2}" --config "$model/debug")
    all=("${pretrain[@]}" --save "checkpoints/${model}_debug" --load auto "$@")
    command=(torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node "$replicas" "${all[@]}")
    if [ ${#dry_run[@]} -gt 0 ]; then
        show "${command[@]}"
        continue
    fi
    require_settings "$replicas" "${all[@]}"
    echo
    echo "=== ${pretrain[*]}, $replicas replicas ==="
    "${command[@]}"
done
