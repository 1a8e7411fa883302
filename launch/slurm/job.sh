#!/usr/bin/env bash
# What a SLURM job does; submit.sh submits it. One task per replica; pretrain_*.py finds its place in SLURM's variables.
#
#   job.sh [--dry-run] SCRIPT [FLAGS...]
set -euo pipefail

show_only=false
if [ "$1" = --dry-run ]; then
    show_only=true
    shift
fi
command=("$PYTHON" "$@"
    --save "$RUN_FOLDER/checkpoints" --load auto --run-dir "$RUN_FOLDER" --stopped-exit-code 75)
if $show_only; then
    printf '%q ' "${command[@]}"
    exit
fi

# Which interface carries what, where the libraries choose wrongly (a management network, a docker bridge):
#   NCCL_SOCKET_IFNAME=ib0     NCCL without InfiniBand, and how its processes meet
#   NCCL_IB_HCA=mlx5_0,mlx5_1  the InfiniBand or RoCE cards that NCCL uses; NCCL_IB_DISABLE=1 for none
#   GLOO_SOCKET_IFNAME=ib0     control messages, and everything on CPUs
#   NCCL_DEBUG=INFO            what NCCL has chosen
#   MASTER_ADDR, MASTER_PORT   where the tasks meet, if not on the job's first node and a port made of its number
# Exported where submit.sh is called, they reach the tasks.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

echo "start $((${SLURM_RESTART_COUNT:-0} + 1)) of job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, $(date)"
status=0
# Tasks notice by themselves when one is lost, and may take some time to end in order; after --wait they are ended. With
# --kill-on-bad-exit, the first to end with 75 would kill those that are still closing their files.
srun --kill-on-bad-exit=0 --wait 300 --output "$RUN_FOLDER/logs/%j-%t.log" --open-mode append "${command[@]}" || status=$?

newest() { cat "$RUN_FOLDER/checkpoints/latest_checkpointed_iteration.txt" 2>/dev/null || echo none; }
again() {
    echo "$1; starting again from checkpoint $(newest)"
    scontrol requeue "$SLURM_JOB_ID"
}

# 0 done, 2 a mistake in settings or data, 75 told to stop; all else is a fault, and may be over at the next start
faults=$RUN_FOLDER/faults_since_checkpoint
case $status in
0)
    rm -f "$faults"
    echo "done: $(newest) iterations"
    ;;
2)
    echo "ended by a mistake: see $RUN_FOLDER/logs" >&2
    ;;
75)
    again "stopped before its end"
    ;;
*)
    read -r count checkpoint 2>/dev/null <"$faults" || true
    [ "${checkpoint:-}" = "$(newest)" ] || count=0
    count=$((${count:-0} + 1))
    echo "$count $(newest)" >"$faults"
    if [ "$count" -gt "$MAX_FAULTS" ]; then
        echo "$count faults in a row without a new checkpoint (status $status): giving up; see $RUN_FOLDER/logs" >&2
    else
        again "fault $count (status $status, see $RUN_FOLDER/logs)"
    fi
    ;;
esac
exit "$status"
