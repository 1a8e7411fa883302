#!/usr/bin/env bash
# The script of a SLURM job; submit.sh submits it and sets its environment variables:
#
#   job.sh [--dry-run | --print-task] SCRIPT [FLAGS...]
#
# One task per replica; pretrain_*.py reads its rank from SLURM's variables.
set -euo pipefail

show=
case ${1:-} in
--dry-run | --print-task)
    show=$1
    shift
    ;;
-h | --help)
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    exit
    ;;
esac
run_folder=$RUNS/$NAME
variant=()
if [ -n "$VARIANTS" ]; then
    read -r -a variants <<<"$VARIANTS"
    optimizer=${variants[${SLURM_ARRAY_TASK_ID:-0}]}
    run_folder+=_$optimizer
    variant=(--config "configs/optimizer/$optimizer.yaml")
fi
# the optimizer's file comes after the others, and flags override all files
task=("$PYTHON" "$@" "${variant[@]}"
    --save "$run_folder/checkpoints" --load auto --run-dir "$run_folder" --stopped-exit-code 75)
check=("$PYTHON" -m megatron01 doctor --shared-folder "$run_folder")
read -r -a container <<<"${CONTAINER:-}"
read -r -a more <<<"${SRUN_OPTIONS:-}"
# Tasks detect a lost rank by themselves, and may take some time to shut down; after --wait they are killed. With
# --kill-on-bad-exit, the first to exit with 75 would kill those that are still closing their files. Since 22.05, srun
# does not take --cpus-per-task from the job, and would bind each task to one core.
srun=(srun --kill-on-bad-exit=0 --cpus-per-task "${SLURM_CPUS_PER_TASK:-$CPUS_PER_TASK}" "${more[@]}")
start=("${srun[@]}" --wait 300 --output "$run_folder/logs/%j-%t.log" --open-mode append "${container[@]}")
check=("${srun[@]}" "${container[@]}" "${check[@]}")
if [ -n "$show" ]; then
    if [ "$show" = --dry-run ]; then
        [ "$DOCTOR" = no ] || { printf 'first, at every start: ' && printf '%q ' "${check[@]}" && echo; }
        printf '%q ' "${start[@]}"
    fi
    printf '%q ' "${task[@]}"
    echo
    exit
fi
# what it loads and exports is passed to the tasks; some clusters' modules fail under set -u
if [ -n "${PROLOGUE:-}" ]; then
    set +u
    source "$PROLOGUE"
    set -u
fi

# For network interfaces see docs/launching.md. Variables exported where submit.sh is called are passed to the tasks.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

trap : USR1 # for the tasks; scancel --full sends it here too, where it would end the job without a requeue

newest() { cat "$run_folder/checkpoints/latest_checkpointed_iteration.txt" 2>/dev/null || echo none; }

echo "start $((${SLURM_RESTART_COUNT:-0} + 1)) of job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, $(date)"
mkdir -p "$run_folder/logs"
status=0
if [ "$DOCTOR" = yes ]; then
    "${check[@]}" || status=$?
fi
fault="the doctor ended with status $status, which is no finding" # it was killed, or a node was lost
if [ "$status" = 2 ]; then
    if [ "$(newest)" = none ]; then
        echo "ended by what the doctor found; DOCTOR=no starts without it" >&2
        exit 2
    fi
    echo "the doctor found something; going on, as the run has gone on before"
    status=0
fi
if [ "$status" = 0 ]; then
    "${start[@]}" "${task[@]}" || status=$?
    fault="status $status, see $run_folder/logs"
fi

again() {
    echo "$1; starting again from checkpoint $(newest)"
    # the id of an array's last job is that of the whole array, which must not be requeued
    local wait job=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_JOB_ID:+_$SLURM_ARRAY_TASK_ID}
    for wait in 5 10 20 40 80; do # SLURM's controller may be restarting, or overloaded
        ! scontrol requeue "$job" || return 0
        sleep "$wait"
    done
    scontrol requeue "$job"
}

# 0 done, 2 an error in settings or data, 75 told to stop, as are 138 and 143 (128 + SIGUSR1, SIGTERM: the doctor, and
# tasks that still import, do not catch them); all else is a fault, which a restart may cure
faults=$run_folder/faults_since_checkpoint
case $status in
0)
    rm -f "$faults"
    echo "done: $(newest) iterations"
    ;;
2)
    echo "ended by a mistake: see $run_folder/logs" >&2
    ;;
75 | 138 | 143)
    again "stopped before its end"
    ;;
*)
    read -r count checkpoint 2>/dev/null <"$faults" || true
    [ "${checkpoint:-}" = "$(newest)" ] || count=0
    count=$((${count:-0} + 1))
    if ! { echo "$count $(newest)" >"$faults"; } 2>/dev/null; then # a full disk: uncounted, it would start again for ever
        echo "a fault ($fault) that cannot be counted in $faults: giving up; see that its disk has space" >&2
    elif [ "$count" -gt "$MAX_FAULTS" ]; then
        echo "$count faults in a row without a new checkpoint ($fault): giving up" >&2
    else
        again "fault $count ($fault)"
    fi
    ;;
esac
exit "$status"
