#!/usr/bin/env bash
# Submit the pretraining of a published model to SLURM, on 16 machines with 8 GPUs each (NODES, TASKS_PER_NODE: others):
#
#   launch/slurm/recipe.sh [--dry-run] MODEL OPTIMIZER[,OPTIMIZER...] [FLAGS...]
#   launch/slurm/recipe.sh bert_large zero_one_adam --data-path /data/wiki_text_sentence
#
#   MODEL       bert_base, bert_large, gpt2_117m, gpt2_345m
#   OPTIMIZER   a file of configs/optimizer: zero_one_adam, one_bit_adam, adam ...; several make one job array, whose jobs
#               differ only in the optimizer
#   FLAGS       of pretrain_bert.py or pretrain_gpt.py, such as --lr 2e-4; they override the recipe
#
# BERT is trained in two phases, sequences of 128 and then of 512 tokens: two jobs, of which the second waits for the
# end of the first and continues it; PHASES=1 omits the second, PHASES=2 submits it alone. What a run writes goes to
# runs/MODEL_OPTIMIZER. Everything that can be set for submit.sh in the environment can be set here too.
set -euo pipefail
here=$(realpath "$(dirname "$0")")
source "$here/../common.sh"
if [ -f "$here/../../pretrain_gpt.py" ]; then # in a clone, paths are relative to its root
    cd "$here/../.."
    here=launch/slurm gpt=(pretrain_gpt.py) bert=(pretrain_bert.py)
else # in an installed package, configurations are next to the scripts and found by name
    gpt=(pretrain gpt) bert=(pretrain bert)
fi
configs=$here/../../configs
[ $# -ge 2 ] || fail "expected a model and an optimizer: recipe.sh [--dry-run] MODEL OPTIMIZER [FLAGS...]"
model=$1 optimizers=${2//,/ }
shift 2
phases=${PHASES:-1,2}
case $phases in 1 | 2 | 1,2) ;; *) fail "PHASES is $phases; expected 1, 2 or 1,2" ;; esac
case $model in
bert_base | bert_large) script=("${bert[@]}") config=configs/bert/${model#bert_}.yaml second=configs/phases/${model}_512.yaml ;;
gpt2_117m | gpt2_345m) script=("${gpt[@]}") config=configs/gpt2/${model#gpt2_}.yaml second= ;;
*) fail "no recipe $model; expected bert_base, bert_large, gpt2_117m or gpt2_345m" ;;
esac
[ -n "${optimizers// /}" ] || fail "no optimizer; expected a file of configs/optimizer, such as zero_one_adam"

# The recipes' micro-batches fit 8 GPUs; on more, each takes its share of the same batch, in one piece if that is smaller.
require_whole 1 NODES "${NODES:-16}" TASKS_PER_NODE "${TASKS_PER_NODE:-8}"
replicas=$((${NODES:-16} * ${TASKS_PER_NODE:-8}))
setting() { sed -n "s/^  $1: *\([0-9]*\).*/\1/p" "$configs/../$2"; }
share=$(($(setting global_batch_size "$config") / replicas))
micro_batch() {
    local largest
    largest=$(setting micro_batch_size "$1")
    echo $((share > 0 && share < largest ? share : largest))
}

export VARIANTS=$optimizers
first=("$model" "${script[@]}" --config "$config" --micro-batch-size "$(micro_batch "$config")" "$@")
if [ -z "$second" ]; then
    exec "$here/submit.sh" "${dry_run[@]}" "${first[@]}"
fi
if [ "$phases" != 2 ]; then
    submitted=$("$here/submit.sh" "${dry_run[@]}" "${first[@]}")
    echo "$submitted"
    if [ ${#dry_run[@]} -gt 0 ]; then
        AFTER=FIRST_JOB
    else
        AFTER=$(sed -n 's/^Submitted batch job \([0-9]*\).*/\1/p' <<<"$submitted")
    fi
    export AFTER
fi
if [ "$phases" != 1 ]; then
    "$here/submit.sh" "${dry_run[@]}" "$model" "${script[@]}" --config "$config" --config "$second" \
        --micro-batch-size "$(micro_batch "$second")" "$@"
fi
