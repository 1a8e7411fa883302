#!/usr/bin/env bash
# Submit a pretraining run to SLURM, which starts it again until it is done:
#
#   launch/slurm/submit.sh [--dry-run] NAME SCRIPT [FLAGS...]
#   NODES=16 launch/slurm/submit.sh bert_base pretrain_bert.py --config configs/bert/base.yaml
#
# One task per replica. What the run writes goes to runs/NAME: checkpoints, metrics and a log per task. --dry-run shows
# the command and submits nothing. To be set in the environment:
#
#   NODES=16            machines
#   TASKS_PER_NODE=8    replicas on each, with a GPU each
#   GPUS_PER_NODE=8     0 for CPUs; TASKS_PER_NODE when not given
#   CPUS_PER_TASK=8     cores of a replica and its data loader
#   TIME=24:00:00       limit of one start; the run goes on in the next
#   WARNING=300         seconds before it at which the tasks are told to save and end
#   SBATCH_OPTIONS=     anything else, such as "--partition=long --account=me"
#   RUNS=runs           parent of NAME, on a file system that all nodes share
#   PYTHON=...          .venv/bin/python if there is one, else python3
#   MAX_FAULTS=3        faults in a row without a new checkpoint, after which the run is not started again
set -euo pipefail
cd "$(dirname "$0")/../.."

fail() {
    echo "error: $*" >&2
    exit 2
}

dry_run=false
if [ "${1:-}" = --dry-run ]; then
    dry_run=true
    shift
fi
[ $# -ge 2 ] || fail "expected a name and a script: submit.sh [--dry-run] NAME SCRIPT [FLAGS...]"
name=$1 script=$2
shift 2
[[ $name =~ ^[A-Za-z0-9._-]+$ ]] || fail "the name is '$name'; expected letters, digits, '.', '_' and '-'"
[ -f "$script" ] || fail "there is no $PWD/$script; expected pretrain_bert.py or pretrain_gpt.py"

tasks=${TASKS_PER_NODE:-8}
gpus=${GPUS_PER_NODE:-$tasks}
export RUN_FOLDER=${RUNS:-runs}/$name
if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    [ ! -x .venv/bin/python ] || PYTHON=.venv/bin/python
fi
export PYTHON MAX_FAULTS=${MAX_FAULTS:-3}

read -r -a more <<<"${SBATCH_OPTIONS:-}"
command=(
    sbatch
    --job-name "$name"
    --nodes "${NODES:-16}"
    --ntasks-per-node "$tasks"
    --cpus-per-task "${CPUS_PER_TASK:-8}"
    --time "${TIME:-24:00:00}"
    --signal "USR1@${WARNING:-300}" # to the tasks, not to the script
    --requeue                       # also when a node fails
    --open-mode append
    --output "$RUN_FOLDER/slurm-%j.log"
)
[ "$gpus" = 0 ] || command+=(--gpus-per-node "$gpus")
command+=("${more[@]}" launch/slurm/job.sh "$script" "$@")

if $dry_run; then
    printf '%q ' "${command[@]}"
    printf '\nand on each task: %s\n' "$(launch/slurm/job.sh --dry-run "$script" "$@")"
    exit
fi
command -v sbatch >/dev/null || fail "there is no sbatch on this machine; log in to the cluster first"
# a mistake in the settings is found here, not after hours in the queue
"$PYTHON" "$script" "$@" --save "$RUN_FOLDER/checkpoints" --load auto --print-config >/dev/null
mkdir -p "$RUN_FOLDER/logs"
"${command[@]}"
echo "logs: $RUN_FOLDER/slurm-*.log, and of each task in $RUN_FOLDER/logs"
