#!/usr/bin/env bash
# Submit a pretraining run to SLURM, which restarts it until it is done:
#
#   launch/slurm/submit.sh [--dry-run] NAME SCRIPT [FLAGS...]
#   NODES=4 launch/slurm/submit.sh bert_base pretrain_bert.py --config configs/bert/base.yaml
#
# One task per replica. What the run writes goes to runs/NAME: checkpoints, metrics and a log per task. --dry-run shows
# the commands and submits nothing. To be set in the environment:
#
#   NODES=16            machines
#   TASKS_PER_NODE=8    replicas on each, with a GPU each
#   GPUS_PER_NODE=8     0 for CPUs; TASKS_PER_NODE when not given
#   CPUS_PER_TASK=8     cores of a replica and its data loader
#   TIME=24:00:00       time limit of one start; the run resumes in the next
#   WARNING=300         seconds before that limit at which the tasks are told to save and exit; SLURM may be a minute early
#   INTERFACE=          network between the machines, where the libraries choose wrongly: see docs/launching.md
#   DOCTOR=yes          check the machines at every start (megatron01 doctor); no: leave it out
#   AFTER=              number of a job whose end this one waits for
#   VARIANTS=           files of configs/optimizer, separated by blanks: runs/NAME_VARIANT for each, as one job array if
#                       there are several
#   ARRAY_LIMIT=        how many of them run at the same time; all, if not given
#   SBATCH_OPTIONS=     anything else, such as "--account=me --partition=long --exclusive --mem=0"
#   SRUN_OPTIONS=       the same for the srun that starts the tasks, such as "--cpu-bind=cores"
#   PROLOGUE=           a file of shell commands that a job reads first, such as "module load cuda/12.8"
#   CONTAINER=          words in front of the tasks' command, such as "apptainer exec --nv --bind /data image.sif"
#   RUNS=runs           parent of NAME, on a file system that all nodes share
#   PYTHON=...          .venv/bin/python if there is one, else python3
#   MAX_FAULTS=3        restarts in a row after faults without a new checkpoint; the next fault ends the run
#
# In a container of pyxis:
#
#   NODES=4 PYTHON=python3 SRUN_OPTIONS="--container-image=/images/torch.sqsh --container-mounts=$PWD,/data \
#       --container-workdir=$PWD" launch/slurm/submit.sh bert_base pretrain_bert.py --config configs/bert/base.yaml
set -euo pipefail
here=$(realpath "$(dirname "$0")")
source "$here/../common.sh"
# of a job that this shell runs in; sbatch would pass them on
unset SLURM_ARRAY_JOB_ID SLURM_ARRAY_TASK_ID SLURM_RESTART_COUNT SLURM_EXPORT_ENV
if [ -f "$here/../../pretrain_gpt.py" ]; then # in a clone, paths are relative to its root; an installed package has none
    cd "$here/../.."
    here=launch/slurm
fi
[ $# -ge 2 ] || fail "expected a name and a script: submit.sh [--dry-run] NAME SCRIPT [FLAGS...]"
export NAME=$1 RUNS=${RUNS:-runs}
script=$2
shift 2
[ "$script" != pretrain ] || set -- megatron01 pretrain "$@"
[ "$script" != pretrain ] || script=-m
[[ $NAME =~ ^[A-Za-z0-9_][A-Za-z0-9._-]*$ ]] ||
    fail "the name is '$NAME'; expected letters, digits, '.', '_' and '-', and no '.' or '-' as the first"
require_script "$script"

refuse_flags "--save --run-dir" "below $RUNS (RUNS=... for another place)" "$@"
refuse_flags --stopped-exit-code "as 75, by which a job is started again" "$@"
refuse_load "$@"

tasks=${TASKS_PER_NODE:-8}
gpus=${GPUS_PER_NODE:-$tasks}
read -r -a variants <<<"${VARIANTS:-}"
shipped=$here/../../configs/optimizer seen=" "
for variant in "${variants[@]}"; do
    [[ $variant != */* && (-f configs/optimizer/$variant.yaml || -f $shipped/$variant.yaml) ]] ||
        fail "no optimizer $variant; expected one of $(cd "$shipped" && echo *.yaml | sed 's/\.yaml//g')"
    [[ $seen != *" $variant "* ]] || fail "VARIANTS names $variant twice; give each once"
    seen+="$variant "
done
prologue=${PROLOGUE:-}
if [ -n "$prologue" ]; then
    [ -f "$prologue" ] || fail "PROLOGUE is $prologue, which is no file; expected one of shell commands for the start of a job"
    prologue=$(realpath "$prologue")
fi
require_whole 1 NODES "${NODES:-16}" TASKS_PER_NODE "$tasks" CPUS_PER_TASK "${CPUS_PER_TASK:-8}" ARRAY_LIMIT "${ARRAY_LIMIT:-1}"
require_whole 0 WARNING "${WARNING:-300}" MAX_FAULTS "${MAX_FAULTS:-3}"
# minutes[:seconds], hours:minutes:seconds or days-hours[:minutes[:seconds]]; all else, and 0, is no limit or for sbatch to refuse
limit=${TIME:-24:00:00}
case $limit in *-* | *:*:*) ;; *) limit=0:$limit ;; esac
[[ $limit == *-* ]] || limit=0-$limit
if [[ $limit =~ ^([0-9]+)-([0-9]+)(:([0-9]+))?(:([0-9]+))?$ ]]; then
    hours=$((10#${BASH_REMATCH[1]} * 24 + 10#${BASH_REMATCH[2]}))
    seconds=$(((hours * 60 + 10#0${BASH_REMATCH[4]}) * 60 + 10#0${BASH_REMATCH[6]}))
    earliest=$((${WARNING:-300} + 60)) # SLURM may send it a minute too early
    [ "$seconds" = 0 ] || [ "$seconds" -gt "$earliest" ] ||
        fail "TIME is ${TIME:-24:00:00}, but its tasks are told to stop up to $earliest seconds before its end, at every start;" \
            "give a longer TIME, or a smaller WARNING (now ${WARNING:-300})"
fi
export PYTHON MAX_FAULTS=${MAX_FAULTS:-3} DOCTOR=$doctor VARIANTS="${variants[*]}" CPUS_PER_TASK=${CPUS_PER_TASK:-8}
export SRUN_OPTIONS=${SRUN_OPTIONS:-} CONTAINER=${CONTAINER:-} PROLOGUE=$prologue

folders=("$RUNS/$NAME")
if [ ${#variants[@]} -gt 0 ]; then
    folders=("${variants[@]/#/$RUNS/${NAME}_}")
fi
output=${folders[0]}/slurm-%j.log
[ ${#variants[@]} -le 1 ] || output=$RUNS/${NAME}_slurm-%A_%a.log

read -r -a more <<<"${SBATCH_OPTIONS:-}"
[[ " ${more[*]} " != *" --no-requeue "* ]] ||
    fail "SBATCH_OPTIONS has --no-requeue, but a run goes on in the next start of its job; leave it out"
[[ ! " ${more[*]}" =~ \ (--export[=\ ]([^\ ]*)) || ,${BASH_REMATCH[2]}, == *,ALL,* ]] ||
    fail "SBATCH_OPTIONS has ${BASH_REMATCH[1]}, but job.sh reads what is exported here; give --export=ALL,NAME=VALUE"
command=(
    sbatch
    --export ALL # some clusters set SBATCH_EXPORT=NONE, and job.sh needs what is exported here
    --job-name "$NAME"
    --nodes "${NODES:-16}"
    --ntasks-per-node "$tasks"
    --cpus-per-task "$CPUS_PER_TASK"
    --time "${TIME:-24:00:00}"
    --signal "USR1@${WARNING:-300}" # to the tasks, not to the script
    --requeue                       # also when a node fails
    --open-mode append
    --output "$output"
)
[ "$gpus" = 0 ] || command+=(--gpus-per-node "$gpus")
if [ ${#variants[@]} -gt 1 ]; then
    command+=(--array "0-$((${#variants[@]} - 1))${ARRAY_LIMIT:+%$ARRAY_LIMIT}")
fi
if [ -n "${AFTER:-}" ]; then # each job of an array waits for its own of the other array
    kind=afterok
    [ ${#variants[@]} -le 1 ] || kind=aftercorr
    command+=(--dependency "$kind:$AFTER" --kill-on-invalid-dep yes)
fi
command+=("${more[@]}" "$here/job.sh" "$script" "$@")

if [ ${#dry_run[@]} -gt 0 ]; then
    show "${command[@]}"
    for ((variant = 0; variant < ${#folders[@]}; variant++)); do
        SLURM_ARRAY_TASK_ID=$variant "$here/job.sh" --dry-run "$script" "$@"
    done
    exit
fi
command -v sbatch >/dev/null || fail "there is no sbatch on this machine; log in to the cluster first"
# finds errors in the settings here, not after hours in the queue; the container's environment may be missing here
checked=yes
if [[ -n $CONTAINER || $SRUN_OPTIONS == *--container* ]] && ! "$PYTHON" -c 'import megatron01' 2>/dev/null; then
    checked=no
    echo "the settings are checked when the job starts: $PYTHON has no megatron01 outside the container"
fi
for ((variant = 0; variant < ${#folders[@]}; variant++)); do
    if [ "$checked" = yes ]; then
        eval "task=($(SLURM_ARRAY_TASK_ID=$variant "$here/job.sh" --print-task "$script" "$@"))"
        settings_of $((${NODES:-16} * tasks)) "${task[@]}" >&2 # their number has to fit the batch
    fi
    mkdir -p "${folders[variant]}/logs"
done
"${command[@]}"
echo "logs: ${output/\%j/*}, and of each task in ${folders[*]/%//logs}"
