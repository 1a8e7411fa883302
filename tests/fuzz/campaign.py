"""Fuzzing of the program's input files: damage is either refused with a one-line error, or harmless.

    python -m tests.fuzz.campaign --rounds 1000 --seed 0

prints a table, and exits with status 1 if a round ended in any other way. Such a round is repeated alone by
``--target NAME --first NUMBER --rounds 1`` and the same seed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.distributed.harness import run_ranks
from tests.fuzz.rounds import TARGETS, Outcome, run_rounds

ROUNDS_OF_A_PROCESS = 250


def main() -> None:
    parser = argparse.ArgumentParser(description="Damage files, and see whether they are refused.")
    parser.add_argument("--rounds", type=int, default=200, help="of each target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first round")
    parser.add_argument("--target", choices=list(TARGETS), action="append", help="all when not given")
    arguments = parser.parse_args()
    failures: list[str] = []
    print("| target | damage | refused | harmless |\n| --- | --- | ---: | ---: |")
    for name in arguments.target or TARGETS:
        outcomes: list[Outcome] = []
        end = arguments.first + arguments.rounds
        with tempfile.TemporaryDirectory(prefix="fuzz-") as prepared:
            TARGETS[name].prepare(Path(prepared))
            for first in range(arguments.first, end, ROUNDS_OF_A_PROCESS):
                rounds = range(first, min(first + ROUNDS_OF_A_PROCESS, end))
                given = name, Path(prepared), arguments.seed, rounds
                (outcome,) = run_ranks(run_rounds, 1, *given, default_group=False, timeout=60.0 * len(rounds))
                outcomes.append(outcome)
        for kind in sorted({kind for outcome in outcomes for kind in (*outcome.refused, *outcome.harmless)}):
            refused = sum(outcome.refused[kind] for outcome in outcomes)
            harmless = sum(outcome.harmless[kind] for outcome in outcomes)
            print(f"| {name} | {kind} | {refused} | {harmless} |")
        failures += [failure for outcome in outcomes for failure in outcome.failures]
        print(f"longest round of {name}: {max(outcome.slowest for outcome in outcomes):.1f} s", file=sys.stderr)
    print(f"\n{len(failures)} failures")
    print("\n".join(failures))
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
