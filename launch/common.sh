# Common code of the launchers. They source it first, so that it sees their arguments: --help as the first prints the
# comment at the top of the script; --dry-run is removed and kept in the array dry_run. It reads DOCTOR, PYTHON and
# INTERFACE from the environment.

fail() {
    echo "error: $*" >&2
    exit 2
}

case ${1:-} in -h | --help)
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    exit
    ;;
esac

dry_run=()
if [ "${1:-}" = --dry-run ]; then
    dry_run=("$1")
    shift
fi

doctor=${DOCTOR:-yes}
case $doctor in yes | no) ;; *) fail "DOCTOR is $doctor; expected yes or no" ;; esac

if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    [ ! -x .venv/bin/python ] || PYTHON=$PWD/.venv/bin/python
fi

if [ -n "${INTERFACE:-}" ]; then
    export GLOO_SOCKET_IFNAME=$INTERFACE NCCL_SOCKET_IFNAME=$INTERFACE
fi

# Number of processes on this machine: one per GPU, or 2 without any.
replicas_of_this_machine() {
    local gpus
    gpus=$(nvidia-smi --list-gpus 2>/dev/null | grep -c . || true)
    echo $((gpus > 0 ? gpus : 2))
}

# Print a command on one line, quoted for the shell.
show() {
    printf '%q ' "$@"
    echo
}
