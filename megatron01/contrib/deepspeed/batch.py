"""DeepSpeed's three batch sizes, of which two or one may be given."""

from __future__ import annotations

from megatron01.errors import UserError

TOTAL = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"


def resolve_batch(
    total: int | None, micro: int | None, accumulation: int | None, replicas: int
) -> tuple[int, int, int]:
    """Sequences in a step over all replicas, sequences in a pass of one replica, and passes in a step.

    What is missing follows from the rest by DeepSpeed's rules: with only one batch size, there is one pass in a step.

    Raises:
        UserError: if the sizes contradict each other or are not positive, or if neither batch size is given.
    """
    given = {TOTAL: total, MICRO: micro, ACCUMULATION: accumulation}
    for name, value in given.items():
        if value is not None and value < 1:
            raise UserError(f"{name} is {value}; expected a positive number")
    if total is None and micro is None:
        raise UserError(f"{ACCUMULATION} is given alone; DeepSpeed needs {TOTAL} or {MICRO} beside it")
    if total is None:
        assert micro is not None
        accumulation = accumulation or 1
        return micro * accumulation * replicas, micro, accumulation
    if micro is not None:
        accumulation = accumulation or max(1, total // (micro * replicas))
    else:
        accumulation = accumulation or 1
        micro = max(1, total // (accumulation * replicas))
    if total != micro * accumulation * replicas:
        factors = [f"{name} {value}" for name, value in list(given.items())[1:] if value is not None]
        product = " x ".join([*factors, f"{replicas} replicas"])
        relation = "is not" if len(factors) == 2 else "is not a multiple of"
        raise UserError(f"{TOTAL} {total} {relation} {product}; DeepSpeed refuses this too: change one of them")
    return total, micro, accumulation
