#!/usr/bin/env bash
# Submit the comparison of 0/1 Adam, 1-bit Adam and Adam on a published model to SLURM, as one job array:
#
#   launch/slurm/compare.sh [--dry-run] MODEL [FLAGS...]
#   PHASES=1 launch/slurm/compare.sh bert_base --train-iters 20000
#
# Models, flags and the environment are those of recipe.sh. Set ARRAY_LIMIT=1 to run one after the other: runs that share
# a network distort each other's step times.
set -euo pipefail
source "$(dirname "$0")/../common.sh"
[ $# -gt 0 ] || fail "expected a model: compare.sh [--dry-run] MODEL [FLAGS...]"
model=$1
shift
exec "$(dirname "$0")/recipe.sh" "${dry_run[@]}" "$model" zero_one_adam,one_bit_adam,adam "$@"
