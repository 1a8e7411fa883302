# Common code of the launchers. They source it first, so that it sees their arguments: --help as the first prints the
# comment at the top of the script; --dry-run is removed and kept in the array dry_run. It reads DOCTOR, PYTHON and
# INTERFACE from the environment.

unset CDPATH # cd would search other folders, and print where it went
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE # left over, they would count for more than srun's and mpirun's own

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

# require_whole LEAST NAME VALUE ...: end if a value is no whole number of at least LEAST.
require_whole() {
    local least=$1 whole='^(0|[1-9][0-9]{0,8})$' # in a variable, as macOS's bash 3.2 wants it
    shift
    while [ $# -gt 0 ]; do
        [[ $2 =~ $whole ]] && [ "$2" -ge "$least" ] ||
            fail "$1 is '$2'; expected a whole number of at least $least"
        shift 2
    done
}

# require_script SCRIPT: end if it is no file, and not an option of Python such as -m.
require_script() {
    case $1 in -*) return ;; esac
    [ -f "$1" ] ||
        fail "there is no file $1 (from $PWD); expected pretrain_gpt.py or pretrain_bert.py (or: pretrain gpt, pretrain bert)"
}

# require_torchrun: end if there is none, as where the environment is not activated.
require_torchrun() {
    command -v torchrun >/dev/null || fail "no torchrun on this machine; activate the environment: source .venv/bin/activate"
}

# settings_of PROCESSES COMMAND...: print what one of so many processes says to its settings; status 2 if they are wrong.
settings_of() {
    RANK=0 WORLD_SIZE=$1 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=localhost \
        "${@:2}" --print-config 2>&1 >/dev/null | sed 's/^\[rank 0\] //'
}

# require_settings PROCESSES SCRIPT FLAGS...: end if these are wrong, before a launcher adds a page of its own to each
# process's line. Scripts of others may not know --print-config, and are not asked.
require_settings() {
    local said
    case "/$2 ${3:-}" in
    "/-m megatron01" | */pretrain_gpt.py\ * | */pretrain_bert.py\ *)
        said=$(settings_of "$1" "$PYTHON" "${@:2}") || [ $? != 2 ] || {
            echo "$said" >&2
            exit 2
        }
        ;;
    esac
}

# refuse_flags "FLAG ..." REASON ARGUMENTS...: end if one of the flags, which the script gives itself, is an argument.
refuse_flags() {
    local flag argument
    for flag in $1; do
        for argument in "${@:3}"; do
            case $argument in "$flag" | "$flag="*) fail "$flag is given by this script itself, $2; leave it out" ;; esac
        done
    done
}

# The scripts add --load auto, which would silently override any other --load among the arguments.
refuse_load() {
    local argument before=
    for argument in "$@"; do
        case $before$argument in
        --load=auto) ;;
        --load=*) fail "$before$argument is overridden by this script, which gives --load auto to go on from the run's own" \
            "checkpoints; for the weights of another run give --pretrained-checkpoint" ;;
        esac
        before=
        [ "$argument" != --load ] || before=--load=
    done
}

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
