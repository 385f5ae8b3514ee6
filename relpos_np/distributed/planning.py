"""What attention over many workers will cost: tasks, the tree's depth, bytes that travel, and time."""

from __future__ import annotations

from typing import NamedTuple

from relpos_np._contract import check
from relpos_np.errors import RelposValueError


class Plan(NamedTuple):
    """What `plan` expects.

    Attributes
    ----------
    blocks, merges, tasks, depth : int
        P, M, P + M + Q and R.
    task_bytes : int
        What the task of a block holds.
    moved_bytes : int
        N.
    compute_seconds, scheduler_seconds, transfer_seconds, tree_seconds : float
        The parts of T: what workers compute, what the scheduler needs, what is sent, and the rounds of the tree.
    seconds : float
        T.
    """

    blocks: int
    merges: int
    tasks: int
    depth: int
    task_bytes: int
    moved_bytes: int
    compute_seconds: float
    scheduler_seconds: float
    transfer_seconds: float
    tree_seconds: float
    seconds: float


def _rounds(count: int, split_every: int) -> list[int]:
    """Merges in each round of a tree over so many results."""
    rounds = []
    while count > 1:
        left = -(-count // split_every)
        # A single one that is left over is handed on.
        rounds.append(left - (count % split_every == 1))
        count = left
    return rounds


def plan(
    *,
    workers: int,
    batch: int,
    heads: int,
    q_len: int,
    k_len: int,
    head_dim: int,
    query_chunk: int,
    key_chunk: int,
    kv_heads: int | None = None,
    v_dim: int | None = None,
    causal: bool = False,
    split_every: int = 8,
    itemsize: int = 4,
    operations: float = 2e10,
    bandwidth: float = 1e9,
    task_seconds: float = 1e-3,
) -> Plan:
    r"""What `attention` over Dask arrays costs, with one batch item and one key head in each block.

    With W workers, P blocks of pairs that may attend, M merges in a tree of R rounds, Q blocks of the output,
    operations per second :math:`\phi` and bytes per second :math:`\beta` of a worker, seconds :math:`\tau` that the
    scheduler spends on a task, F operations of a block, and bytes of its queries, its keys with values, and its
    result :math:`n_q, n_{kv}, n_o`,

    .. math::

        N = (1 - 1/W)\, P\, \big(\min(n_q, n_{kv}) + n_o\big), \qquad
        T = \max\!\left(\tau (P + M + Q),\; \lceil P / W \rceil \frac{F}{\phi} + \frac{N}{W \beta}\right)
        + R \left(\tau + \frac{s\, n_o}{\beta}\right)

    since a task runs where the larger of its operands is, the smaller one and its result travel, and a round waits
    for the one before. :math:`n_o` counts only if there is more than one block of keys.

    Parameters
    ----------
    workers : int
        Number of workers W.
    batch, heads : int
        Batch items and heads of queries.
    q_len, k_len : int
        Number of queries and of keys.
    head_dim : int
        Dimensions of queries and keys.
    query_chunk, key_chunk : int
        Queries and keys of a block.
    kv_heads : int, optional
        Heads of keys and values; default as many as of queries.
    v_dim : int, optional
        Dimensions of values; default `head_dim`.
    causal : bool
        Whether queries, which are the last positions, attend no later keys; blocks without a pair have no task.
    split_every : int
        Results s that are merged at a time.
    itemsize : int
        Bytes of a number.
    operations : float
        Operations :math:`\phi` of a worker per second; a multiplication and an addition count 2.
    bandwidth : float
        Bytes :math:`\beta` that a worker sends or receives per second.
    task_seconds : float
        Seconds :math:`\tau` of the scheduler, which does one task after the other.

    Returns
    -------
    Plan
        The sizes and seconds above.

    Raises
    ------
    RelposValueError
        If a number is not positive, or heads of keys do not divide those of queries.
    RelposTypeError
        If a size is no integer.

    Notes
    -----
    Left out are starting workers, bringing operands to them, what a scheme adds beside products, and transfers that
    hide behind computation. Where :math:`\tau (P + M + Q)` is the larger term, larger blocks help, and more workers do
    not.
    """
    sizes = {"workers": workers, "batch": batch, "heads": heads, "q_len": q_len, "k_len": k_len}
    sizes |= {"head_dim": head_dim, "query_chunk": query_chunk, "key_chunk": key_chunk, "itemsize": itemsize}
    for name, size in sizes.items():
        check.integer(name, size, 1)
    split_every = check.integer("split_every", split_every, 2)
    kv_heads = heads if kv_heads is None else check.integer("kv_heads", kv_heads, 1)
    v_dim = head_dim if v_dim is None else check.integer("v_dim", v_dim, 0)
    if heads % kv_heads:
        raise RelposValueError(f"kv_heads: {kv_heads} do not divide {heads} heads")
    rates = {"operations": operations, "bandwidth": bandwidth, "task_seconds": task_seconds}
    operations, bandwidth, task_seconds = (check.positive(name, rate) for name, rate in rates.items())
    group, copies = heads // kv_heads, batch * kv_heads
    query_chunk, key_chunk = min(query_chunk, q_len), min(key_chunk, k_len)
    key_blocks = -(-k_len // key_chunk)
    # Blocks of keys that each block of queries needs: one at least, so that there is a result.
    needed = []
    for last in (min(first + query_chunk, q_len) - 1 for first in range(0, q_len, query_chunk)):
        reach = last + k_len - q_len
        needed.append(min(max(reach // key_chunk + 1, 1), key_blocks) if check.flag("causal", causal) else key_blocks)
    rounds = [_rounds(count, split_every) for count in needed]
    blocks, merges, depth = copies * sum(needed), copies * sum(map(sum, rounds)), max(map(len, rounds))
    tasks = blocks + merges + copies * len(needed)
    queries = group * query_chunk * head_dim * itemsize
    keys = key_chunk * (head_dim + v_dim) * itemsize
    result = group * query_chunk * (v_dim + 1) * itemsize
    travels = min(queries, keys) + (result if depth else 0)
    moved = blocks * travels * (workers - 1) // workers
    compute = -(-blocks // workers) * 2.0 * group * query_chunk * key_chunk * (head_dim + v_dim) / operations
    transfer = moved / (workers * bandwidth)
    scheduler = task_seconds * tasks
    tree = depth * (task_seconds + split_every * result / bandwidth)
    return Plan(
        blocks,
        merges,
        tasks,
        depth,
        queries + keys + result,
        moved,
        compute,
        scheduler,
        transfer,
        tree,
        max(scheduler, compute + transfer) + tree,
    )
