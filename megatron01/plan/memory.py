"""What a process takes in memory: weights, the optimizer's state, buffers of the exchange, and the passes of a step."""

from __future__ import annotations

from dataclasses import dataclass

from megatron01.config import OptimizerConfig, Precision
from megatron01.plan.pass_memory import PassBytes
from megatron01.plan.volume import SCALE_BYTES, gradient_bytes
from megatron01.precision import DTYPES

_INSIDE_BYTES = 2  # of an element that nodes sum inside
_SUM_BYTES = 8  # of an element that is summed: the sum and a term of it, in fp32
_LIVE_BITS = 2  # elements that take part in exchanges, and those that may: a bit each


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one process at the worst moment of a step.

    Attributes:
        weights: in the model's type.
        state: of the optimizer, master weights included.
        exchange: buffers of collectives, without those that the collective library keeps for itself.
        passes: gradients, what forward and backward passes hold, and what a CPU's allocator keeps beside.
        saved: of these, what one forward pass leaves for its backward pass.
    """

    weights: int
    state: int
    exchange: int
    passes: int
    saved: int

    @property
    def total(self) -> int:
        return self.weights + self.state + self.exchange + self.passes


def memory(
    config: OptimizerConfig,
    *,
    nodes: int,
    processes_per_node: int,
    parameter_sizes: tuple[int, ...],
    precision: Precision,
    passes: PassBytes,
    replica_is_node: bool = False,
    sharded: bool = False,
    sums_in_fp32: bool = False,
) -> Memory:
    """The memory of one process of a run.

    Args:
        nodes: of the run.
        processes_per_node: processes of a node that hold the same parameters.
        parameter_sizes: elements of each parameter that the process holds.
        passes: of one step.
        replica_is_node: the processes of a node average their gradients at every step.
        sharded: and share the state of their optimizer; not Adam's.
        sums_in_fp32: gradients of several micro-batches are added up in fp32 beside gradients of 16 bit.
    """
    weights = DTYPES[precision].itemsize * sum(parameter_sizes)
    extra = 4 * sum(parameter_sizes) if sums_in_fp32 else 0
    if config.optimizer == "adam":
        # AdamW's two moments, and fp32 copies of 16-bit weights
        state, exchange = (8 if precision == "fp32" else 12) * sum(parameter_sizes), 0
    else:
        blocks = sum(-(-size // config.block_size) for size in parameter_sizes)
        inside = 0
        if replica_is_node and processes_per_node > 1:
            inside = _inside_bytes(config, processes_per_node, blocks * config.block_size, precision, sharded=sharded)
        if sharded:
            blocks, processes_per_node = _owned_blocks(config, blocks, processes_per_node), 1
        elements = blocks * config.block_size
        state = flat_state_bytes(config, nodes, processes_per_node, elements)
        exchange = inside + _exchange_bytes(
            config, nodes, processes_per_node, elements, precision, reduces_inside=not replica_is_node
        )
    # DistributedDataParallel has its buckets, into which gradients are moved, from the first step to the last
    in_buckets = config.optimizer == "adam" and nodes * processes_per_node > 1
    held = (weights + passes.beside_gradients if in_buckets else passes.peak) + passes.unused + extra
    return Memory(weights=weights, state=state, exchange=exchange, passes=held, saved=passes.saved)


def flat_state_bytes(config: OptimizerConfig, nodes: int, processes_per_node: int, elements: int) -> int:
    """Flat buffers: x, m and u, v where there is a second moment, and the two errors of bits; all but x may be bf16.

    Hierarchical, a process has the errors of what it carries between nodes only: 1/m of the elements. It then also has
    the node's mean of these.
    """
    has_v = config.optimizer in ("zero_one_adam", "one_bit_adam", "bin_sgdm", "soft_sign_sgd")
    errors = 0.0
    if _sends_bits(config, nodes * processes_per_node):
        if _is_hierarchical(nodes, processes_per_node):
            errors = (2 + 1 / nodes) / processes_per_node
        else:
            errors = 1 + 1 / (nodes * processes_per_node)
    beside_weights = DTYPES[config.state_dtype].itemsize * (2 + has_v + errors)
    return round(elements * (4 + beside_weights + _LIVE_BITS / 8))


def _owned_blocks(config: OptimizerConfig, blocks: int, processes: int) -> int:
    """Blocks that the first process of a node owns: its row of every bucket (``comm.scatter``)."""
    row = max(1, config.bucket_elements // (config.block_size * processes))
    buckets, rest = divmod(blocks, row * processes)
    return buckets * row + -(-rest // processes)


def _inside_bytes(
    config: OptimizerConfig, processes: int, elements: int, precision: Precision, *, sharded: bool
) -> int:
    """Buffers of the mean of gradients inside a node, and of weights that go back if their type is another."""
    bucket = min(config.bucket_elements, elements)
    slots = min(2, -(-elements // config.bucket_elements))
    gradient, weight = gradient_bytes(config, precision), DTYPES[precision].itemsize
    rows = slots * 2 * bucket * (gradient + (weight if sharded and gradient != weight else 0))
    return round(rows + _SUM_BYTES * bucket / processes)


def _exchange_bytes(
    config: OptimizerConfig,
    nodes: int,
    processes_per_node: int,
    elements: int,
    precision: Precision,
    *,
    reduces_inside: bool,
) -> int:
    if nodes * processes_per_node == 1:
        return 0
    hierarchical = _is_hierarchical(nodes, processes_per_node)
    carried = 1 / processes_per_node if hierarchical else 1.0
    bucket = min(config.bucket_elements, elements)
    num_buckets = -(-elements // config.bucket_elements)
    packed = 0.0
    if _sends_bits(config, nodes * processes_per_node):
        each = 1 / 8 + (SCALE_BYTES / config.block_size if config.optimizer != "bin_sgdm" else 0.0)
        # what is sent and what is received; hierarchical also the node's whole result
        packed = each * elements * (2 * carried + hierarchical)
        if hierarchical and reduces_inside:
            packed += min(2, num_buckets) * 2 * _INSIDE_BYTES * bucket
    dense = 0.0
    if config.optimizer != "bin_sgdm":
        wire = 4 if config.optimizer == "soft_sign_sgd" else gradient_bytes(config, precision)
        slots = min(4 if hierarchical else 2, num_buckets)
        dense = slots * 2 * wire * bucket * (carried + hierarchical)
        dense += _SUM_BYTES * bucket / (nodes * processes_per_node)
    return round(packed + dense)


def _sends_bits(config: OptimizerConfig, processes: int) -> bool:
    exchanges = config.optimizer in ("zero_one_adam", "one_bit_adam", "bin_sgdm")
    return exchanges and config.compressor == "one_bit" and processes > 1


def _is_hierarchical(nodes: int, processes_per_node: int) -> bool:
    return nodes > 1 and processes_per_node > 1
