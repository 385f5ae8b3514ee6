"""The records through which the host tells kernels what to do, declared once for both.

Some are arguments of kernels. Of the others a call has any number: the host writes them into the flat array `meta`,
and a kernel reads the field `head` of an `Add` that begins at `at` as `meta[at + ADD.head]`.

Starts and steps count elements; -1 as a start means that there is nothing. Something begins at its `start`, plus what
the table at `batch` in `meta` holds for the batch item, plus `head` for each head.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Vectors(NamedTuple):
    """Queries, keys or values: where they begin, and the step from row to row."""

    start: int
    batch: int
    head: int
    row: int


class Pairs(NamedTuple):
    """A byte per pair, of the bool mask or of dropout: where they begin, and steps per query and key."""

    start: int
    batch: int
    head: int
    query: int
    key: int


class Add(NamedTuple):
    """A summand of the scores: a number per pair, or for the row that an index map gives; `map` is -1 without a map."""

    start: int
    batch: int
    head: int
    query: int
    key: int
    row: int
    map: int
    map_batch: int
    map_query: int
    map_key: int


class Skew(NamedTuple):
    """Products of vectors with one row per relative position, made tile by tile: the vectors, then the rows."""

    start: int
    batch: int
    head: int
    row: int
    weights: int
    weights_head: int
    depth: int
    # Where the index map has the row of distance 0.
    map: int


class Bins(NamedTuple):
    """A sum for each row of a table, over the pairs for which the index map gives that row: first bin, rows, map.

    For a value term also where the rows' vectors are.
    """

    weights: int
    weights_head: int
    bin: int
    rows: int
    map: int
    map_batch: int
    map_query: int
    map_key: int


def _fields(record: Any) -> Any:
    """A record that holds the position of each of its fields."""
    return record(*range(len(record._fields)))


VECTORS: Vectors = _fields(Vectors)
PAIRS: Pairs = _fields(Pairs)
ADD: Add = _fields(Add)
SKEW: Skew = _fields(Skew)
BINS: Bins = _fields(Bins)
ADD_SIZE, SKEW_SIZE, BINS_SIZE = len(ADD), len(SKEW), len(BINS)


class Call(NamedTuple):
    """The integers of one call of attention."""

    heads: int
    q_len: int
    k_len: int
    # Query heads that share a head of keys, and of values.
    k_group: int
    v_group: int
    # Key j is in the band of query i if -left <= j - (i + offset) <= right.
    offset: int
    left: int
    right: int
    # `Vectors` in `meta`.
    query: int
    key: int
    value: int
    # Keys per batch item, in `meta`.
    lengths: int
    # A bias per relative position, in `data`: where that of distance 0 is, and its step per head.
    strip: int
    strip_head: int
    # `Skew` and `Add` in `meta`.
    skews: int
    n_skews: int
    adds: int
    n_adds: int
    # How many of them, the last ones, are added after a cap; whether the cap is for products alone.
    n_outer: int
    cap_content: int
    # The first key of each query and the one after its last, in `meta`, and the step per batch item. Key j may be
    # attended by query i if j - i + phase, which is never negative, is a multiple of step.
    ranges: int
    ranges_batch: int
    step: int
    phase: int
    # `Pairs` in `meta`.
    mask: int
    keep: int
    # Value terms, `Bins` in `meta`, and all their rows.
    values: int
    n_values: int
    n_bins: int
    v_dim: int
    wants_lse: int
    # How many rows behind a base the logarithm of the row's sum is written; 0: the sum of both is.
    lse_apart: int


class Back(NamedTuple):
    """The further integers of the backward pass: mostly where in `work` sums begin.

    `queries`, `keys` and `tables` are `Bins` in `meta`; `n_query_bins` and the like are the bins of one query or key.
    """

    queries: int
    n_queries: int
    query_bins: int
    n_query_bins: int
    keys: int
    n_keys: int
    key_bins: int
    n_key_bins: int
    # Tables whose maps are by pair; their bins belong to the blocks of one launch, as do `diagonals` and `skew_rows`.
    tables: int
    n_tables: int
    table_bins: int
    n_table_bins: int
    value_bins: int
    # What value terms add to the gradients of probabilities: `Add` in `meta`.
    gathered: int
    n_gathered: int
    # Sums over diagonals, and gradients of the scores themselves.
    diagonals: int
    pairs: int
    # Gradients of what a `Skew` multiplies: of the vectors, one term after the other, and of the rows by relative
    # position; the channels of all these terms, and the queries of all heads and batch items.
    skew_vectors: int
    skew_rows: int
    skew_width: int
    lines: int
    # The number of the launch's first block.
    base: int


class Operands(NamedTuple):
    """Queries, keys and values, flat, each in its own format."""

    q: Any
    k: Any
    v: Any


class Tables(NamedTuple):
    """What terms hold: numbers, index maps, bytes per pair, and the records of this module."""

    data: Any
    maps: Any
    flags: Any
    meta: Any


class Upstream(NamedTuple):
    """What gradients start from: the gradient of the output, and per query log-sum-exp and delta = dO . O - dlse.

    Log-sum-exps are two numbers, `Back.lines` apart: see `Call.lse_apart`.
    """

    grad_out: Any
    lse: Any
    delta: Any


class Results(NamedTuple):
    """What forward kernels write: outputs, log-sum-exps, and numbers of their own.

    These are the weights of each query per row of value terms, or in decoding what several ranges of keys came to.
    """

    out: Any
    lse: Any
    work: Any


class Scales(NamedTuple):
    """Factors: of products of queries and keys, of probabilities that dropout keeps; a cap of scores, or 0."""

    scores: Any
    kept: Any
    cap: Any
