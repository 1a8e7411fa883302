#!/usr/bin/env bash
# Start a pretraining run with torchrun on each of its machines, so that it restarts by itself after a fault:
#
#   launch/torchrun.sh [--dry-run] SCRIPT [FLAGS...]                    one machine
#   NODES=4 RENDEZVOUS=host0:29400 launch/torchrun.sh pretrain_bert.py --config configs/bert/base.yaml --save FOLDER
#
# Start the second on all 4 machines, in any order; host0 is one of them. When a process fails or is killed, all are
# restarted and resume from the last checkpoint (--load auto). --dry-run shows the commands. To be set in the
# environment:
#
#   NODES=1             machines
#   REPLICAS=8          processes on each: its GPUs, or 2 without any
#   RENDEZVOUS=...      with several machines: HOST[:PORT] of one of them, the same everywhere
#   JOB=megatron01      with several jobs that share a rendezvous: a different name for each
#   INTERFACE=          network between the machines, where the libraries choose wrongly: see docs/launching.md
#   DOCTOR=yes          check the machines first (megatron01 doctor); no: leave it out
#   MAX_RESTARTS=3      restarts after faults; the next fault ends the run
#   SHUTDOWN=120        seconds for a checkpoint after a signal, before the processes are killed; older torch gives 30
#   PYTHON=...          checks the settings first; .venv/bin/python if there is one, else python3
set -euo pipefail

source "$(dirname "$0")/common.sh"
[ "${1:-}" != pretrain ] || set -- -m megatron01 "$@" # the program's command in place of a script
[ $# -gt 0 ] || fail "no script; give for instance pretrain_gpt.py --config configs/gpt2/debug.yaml --save FOLDER"
refuse_load "$@"
nodes=${NODES:-1}
replicas=${REPLICAS:-$(replicas_of_this_machine)}
restarts=${MAX_RESTARTS:-3} shutdown=${SHUTDOWN:-120}
require_whole 1 NODES "$nodes" REPLICAS "$replicas"
require_whole 0 MAX_RESTARTS "$restarts" SHUTDOWN "$shutdown"
command=(torchrun --nnodes "$nodes" --nproc-per-node "$replicas")
check=("${command[@]}")
if [ "$nodes" -gt 1 ]; then
    [ -n "${RENDEZVOUS:-}" ] || fail "NODES is $nodes but RENDEZVOUS is not set; give HOST:PORT of one of the machines"
    # a separate store for every start: machines may count restarts differently
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    command+=(--rdzv-backend c10d --rdzv-endpoint "$RENDEZVOUS" --rdzv-id "${JOB:-megatron01}")
    # on a separate port: machines leave the check at slightly different times
    host=$RENDEZVOUS port=29400
    [[ $host != *:* || $host == *\] ]] || host=${RENDEZVOUS%:*} port=${RENDEZVOUS##*:}
    [[ $host != *:* || $host == \[*\] ]] || fail "RENDEZVOUS is $RENDEZVOUS; an IPv6 address is put in brackets: [fd00::7]:29400"
    require_whole 1 "the port of RENDEZVOUS" "$port"
    check+=(--rdzv-backend c10d --rdzv-endpoint "$host:$((port + 1))" --rdzv-id "${JOB:-megatron01}_doctor")
else
    # the machine's own name, which torch would take, may resolve to nothing: it then tries for minutes
    command+=(--standalone --local-addr 127.0.0.1)
    check+=(--standalone --local-addr 127.0.0.1)
fi
check+=(-m megatron01 doctor)
command+=(--max-restarts "$restarts" --monitor-interval 1 "$@" --load auto)
# Forward the signals that request a checkpoint (torchrun omits SIGUSR1 by default), and allow time to write it. Not as
# flags, which torchrun refuses in older versions (both in torch 2.8); there these variables have no effect.
export PET_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 PET_SHUTDOWN_TIMEOUT=$shutdown
if [ ${#dry_run[@]} -gt 0 ]; then
    [ "$doctor" = no ] || show "${check[@]}"
    show "${command[@]}"
    exit
fi
if [ "$nodes" -gt 1 ] && ! getent ahosts "$(tr -d '[]' <<<"$host")" >/dev/null; then # torchrun would retry until its time-out
    fail "RENDEZVOUS names $host, a host that $(hostname) cannot find; give HOST:PORT of one of the machines"
fi
require_script "$1"
require_torchrun
require_settings $((nodes * replicas)) "$@" --load auto
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
if [ "$doctor" = yes ] && ! "${check[@]}"; then
    # torchrun's status is 1, whatever ended its processes
    fail "ended by what the doctor found, or by what ended the doctor: see above; DOCTOR=no starts without it"
fi
exec "${command[@]}"
