r"""Labels between any two tokens, such as edges or distances in a graph: a bias or vectors per label."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import numpy as np

from relpos_np._contract import check
from relpos_np._contract.terms import Dense, of_batch
from relpos_np.errors import RelposTypeError, RelposValueError
from relpos_np.formulas.softmax import weighted_vectors
from relpos_np.schemes.base import MemoryBound, Part, Sample, Scheme, Site, register
from relpos_np.schemes.checks import vectors_per_pair
from relpos_np.schemes.lookups import Lookup, LookupScheme, per_head
from relpos_np.types import Array, Int32


def label_bias(table: Array, labels: Array) -> Array:
    r"""The bias of every pair, written out.

    .. math::

        b_{hij} = T[r_{ij}, h], \qquad b_{hij} = 0 \text{ for } r_{ij} = -1

    Parameters
    ----------
    table : ndarray, shape (R, H)
        One scalar per label and head.
    labels : ndarray of int, shape (..., L_q, L_k)
        Label r of each query and key, or -1.

    Returns
    -------
    ndarray, shape (..., H, L_q, L_k)
        To be added to the scores.

    References
    ----------
    Ying et al., "Do Transformers Really Perform Bad for Graph Representation?", NeurIPS 2021, eq. 6.
    """
    check.rows("labels", check.integers("labels", labels), len(table), -1)
    bias = np.where((labels >= 0)[..., None], table[np.maximum(labels, 0)], table.dtype.type(0))
    return np.moveaxis(bias, -1, -3)


def label_vectors(table: Array, labels: Array) -> Array:
    r"""The vector of every pair, written out: :math:`a_{ij} = w_{r_{ij}}`, or 0 for a label -1.

    Parameters
    ----------
    table : ndarray, shape (R, D) or (H, R, D)
        One vector per label, shared by all heads or one set per head.
    labels : ndarray of int, shape (..., L_q, L_k)
        Label r of each query and key, or -1.

    Returns
    -------
    ndarray, shape (..., 1, L_q, L_k, D) or (..., H, L_q, L_k, D)
        One vector per pair.

    References
    ----------
    Shaw, Uszkoreit, Vaswani, "Self-Attention with Relative Position Representations", NAACL 2018, section 3.1.
    """
    sets = table if table.ndim == 3 else table[None]
    check.rows("labels", check.integers("labels", labels), sets.shape[1], -1)
    vectors = np.stack([one[np.maximum(labels, 0)] for one in sets], axis=-4)
    return np.where((labels >= 0)[..., None, :, :, None], vectors, table.dtype.type(0))


def alphafold_labels(
    residue: Any,
    chain: Any,
    entity: Any,
    symmetry: Any,
    token: Any,
    *,
    residue_bins: int = 32,
    chain_bins: int = 2,
    offsets: Literal["entity", "chain"] = "entity",
) -> tuple[Int32, Int32, Int32, Int32]:
    r"""Labels of AlphaFold's relative positions: residue, token, same entity and chain.

    .. math::

        r_{ij} = \begin{cases} \mathrm{clip}(a_i - a_j + m,\ 0,\ 2m) & \text{i and j are comparable} \\
        2m + 1 & \text{else} \end{cases}

    with a the index of the residue in its chain (comparable within a chain), of the token (within a residue of a
    chain), or of the copy of an entity that the chain is; m is `residue_bins` for the first two, `chain_bins` for
    the last. The label of the same entity is 0, that of different ones -1.

    Parameters
    ----------
    residue, chain, entity, symmetry, token : ndarray of int, shape (..., L)
        For each token the index of its residue, and the numbers of its chain (`asym_id`), of the chain's sequence
        (`entity_id`), of the chain among those of this sequence (`sym_id`), and of the token.
    residue_bins, chain_bins : int
        Largest differences m that are told apart.
    offsets : {"entity", "chain"}
        Which copies are comparable: "entity" says chains of one sequence (published code of AlphaFold-Multimer and
        AlphaFold 3; Boltz with `fix_sym_check`), "chain" tokens of different chains (ESMFold2, Boltz without).

    Returns
    -------
    tuple of four ndarray of int32, shape (..., L, L)
        Labels of residue, token, entity and chain, for a `GraphLabels` each. The columns of a trained weight are
        those of residues, 2m + 2, of tokens, as many, one for the same entity, and of chains; AlphaFold-Multimer has
        no token labels.

    Raises
    ------
    RelposValueError
        If shapes differ, a number of bins is negative, an index is beyond :math:`2^{61}`, or there are no such offsets.
    RelposTypeError
        If indices are no integers.

    References
    ----------
    Abramson et al., "Accurate structure prediction of biomolecular interactions with AlphaFold 3", Nature 2024,
    algorithm 3; Evans et al., "Protein complex prediction with AlphaFold-Multimer", 2021.
    """
    given = {"residue": residue, "chain": chain, "entity": entity, "symmetry": symmetry, "token": token}
    found = {name: check.integers(name, value).astype(np.int64) for name, value in given.items()}
    for name, index in found.items():
        if not index.ndim or index.shape != found["residue"].shape:
            raise RelposValueError(f"{name}: expected shape (..., L), that of residue, found {index.shape}")
        if index.size and max(-int(index.min()), int(index.max())) > 1 << 61:  # differences would overflow
            raise RelposValueError(f"{name}: expected numbers of at most 2^61, found {index.min()} ... {index.max()}")
    near, far = check.integer("residue_bins", residue_bins, 0), check.integer("chain_bins", chain_bins, 0)
    check.choice("offsets", offsets, ("entity", "chain"))

    def difference(name: str) -> Array:
        between: Array = found[name][..., :, None] - found[name][..., None, :]
        return between

    def label(name: str, bins: int, comparable: Array) -> Int32:
        labels = np.where(comparable, np.clip(difference(name), -bins, bins) + bins, 2 * bins + 1)
        return labels.astype(np.int32)

    same = {name: found[name][..., :, None] == found[name][..., None, :] for name in ("residue", "chain", "entity")}
    return (
        label("residue", near, same["chain"]),
        label("token", near, same["chain"] & same["residue"]),
        np.where(same["entity"], 0, -1).astype(np.int32),
        label("symmetry", far, same["entity"] if offsets == "entity" else ~same["chain"]),
    )


class GraphLabels(LookupScheme):
    r"""A bias or vectors for the label between each query and key: relations in an arbitrary graph.

    .. math::

        s_{ij} = \sigma\, q_i \cdot (k_j + w^K_{r_{ij}}) + T[r_{ij}, h], \qquad
        o_i = \sum_j p_{ij} (v_j + w^V_{r_{ij}})

    with a label r from 0 to R-1 per pair, or -1: nothing is added. Shaw et al. give their relation-aware attention
    for any directed, labelled graph; `Shaw` is the case of a linear order. Graphormer adds a bias for the length of
    the shortest path; the bias is not multiplied by the scale. Several relations are several schemes in a tuple:
    Graphormer's direct edges with F features, for instance, F biases with ``table / F``. Its bias along paths of
    several edges is no table's; pass it as ``mask=``.

    Funnel's attention, whose queries may be pooled and whose class token has no position, is labels, too: with its
    content bias u added to the queries, ``key_table`` holds its projected position rows R and ``table``
    :math:`\sigma (v - u) \cdot R_r`; segments are a second scheme of the same form.

    AlphaFold's relative positions of residues, tokens and chains are four schemes with the labels of
    `alphafold_labels`.

    Labels are stored per batch item as they are: L_q L_k integers of 32 bits.

    Parameters
    ----------
    labels : ndarray of int, shape (L_q, L_k) or (..., L_q, L_k)
        Label of each query and key, for the whole batch or with its axes; the same for all heads.
    table : ndarray, shape (R, H), optional
        Bias T per label and head (Graphormer).
    key_table : ndarray, shape (R, D) or (H, R, D), optional
        Vectors :math:`w^K` per label (Shaw et al.).
    value_table : ndarray, shape (R, D_v) or (H, R, D_v), optional
        Vectors :math:`w^V` per label (Shaw et al.).

    Raises
    ------
    RelposValueError
        If there is no table, tables differ in R, or a label is not in -1 ... R-1.
    RelposTypeError
        If labels are no integers.

    References
    ----------
    Shaw, Uszkoreit, Vaswani, "Self-Attention with Relative Position Representations", NAACL 2018, section 3.1.
    Ying et al., "Do Transformers Really Perform Bad for Graph Representation?", NeurIPS 2021.

    Examples
    --------
    >>> import numpy as np, relpos_np as rp
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 2, 8, 6, 64))  # (batch, heads, nodes, channels)
    >>> steps = abs(np.arange(6)[:, None] - np.arange(6))
    >>> ring = np.minimum(steps, 6 - steps)  # the shortest path between two of six atoms
    >>> position = rp.GraphLabels(ring, table=rng.standard_normal((4, 8)))  # one per length and head
    >>> rp.attention(q, k, v, position=position).shape
    (2, 8, 6, 64)
    """

    def __init__(self, labels: Any, table: Any = None, *, key_table: Any = None, value_table: Any = None) -> None:
        if table is None and key_table is None and value_table is None:
            raise RelposValueError("GraphLabels: expected table, key_table or value_table, found none of them")
        vectors = "labels head_dim | heads labels head_dim"
        self.table = None if table is None else check.table("table", table, "labels heads")
        self.key_table = None if key_table is None else check.table("key_table", key_table, vectors)
        self.value_table = None if value_table is None else check.table("value_table", value_table, vectors)
        rows = {
            name: x.shape[axis]
            for name, x, axis in (
                ("table", self.table, 0),
                ("key_table", self.key_table, -2),
                ("value_table", self.value_table, -2),
            )
            if x is not None
        }
        if len(set(rows.values())) > 1:
            found = ", ".join(f"{name} {count}" for name, count in rows.items())
            raise RelposValueError(f"table, key_table, value_table: expected as many labels in each, found {found}")
        self._rows = next(iter(rows.values()))
        self.labels = _labels(labels, self._rows)

    @classmethod
    def graphormer(cls, distances: Any, table: Any, virtual: Any) -> GraphLabels:
        r"""Graphormer's spatial encoding of graphs with a virtual node before their nodes.

        .. math::

            b_{hij} = T[\phi(i, j), h], \qquad b_{hij} = t_h \text{ where i or j is the virtual node}

        Parameters
        ----------
        distances : ndarray of int, shape (N, N) or (..., N, N)
            Row :math:`\phi` of each two of the N nodes, for instance the length of the shortest path between them, or
            -1. In published code padding has row 0, whose entries are 0, and all distances count one more.
        table : ndarray, shape (R, H)
            T, the weight of `spatial_pos_encoder`.
        virtual : ndarray, shape (H,) or (1, H)
            t, the weight of `graph_token_virtual_distance`.

        Returns
        -------
        GraphLabels
            For calls with N + 1 queries and keys; t is the last row of its table.
        """
        last = check.table("virtual", virtual, "heads | 1 heads").reshape(1, -1)
        rows = check.table("table", table, "labels heads")
        if last.shape[1] != rows.shape[1]:
            raise RelposValueError(f"virtual: expected {rows.shape[1]} heads as in table, found {last.shape[1]}")
        inner = _labels(distances, len(rows), "distances")
        *lead, height, width = inner.shape
        labels = np.full((*lead, height + 1, width + 1), len(rows), dtype=np.int32)
        labels[..., 1:, 1:] = inner
        return cls(labels, np.concatenate([rows, last]))

    def check(self, site: Site) -> None:
        """Labels must be those of the call, and tables match its heads and head dimensions."""
        if self.labels.shape[-2:] != (site.q_len, site.k_len):
            raise RelposValueError(
                f"labels: shape {self.labels.shape} does not end in (L_q, L_k) = {(site.q_len, site.k_len)} of the call"
            )
        check.fits_batch("labels", self.labels.shape[:-2], site.batch)
        check.heads("table", self.table, 1, site)
        vectors_per_pair(self, site)

    def scores(self, q: Array, k: Array, site: Site) -> Array | None:
        """The bias of every pair, and scaled products of queries with the vectors of their keys."""
        added = None
        if self.table is not None:
            added = label_bias(self.table.astype(site.dtype, copy=False), self.labels)
        if self.key_table is not None:
            a = label_vectors(self.key_table.astype(site.dtype, copy=False), self.labels)
            products = np.asarray(np.einsum("...id,...ijd->...ij", q, a) * site.dtype.type(site.scale))
            added = products if added is None else products + added
        return added

    def outputs(self, p: Array, site: Site) -> Array | None:
        """Vectors of the labels weighted by the probabilities."""
        if self.value_table is None:
            return None
        a = label_vectors(self.value_table.astype(site.dtype, copy=False), self.labels)
        return weighted_vectors(p, a)

    def _lookups(self, site: Site) -> Iterable[Lookup]:
        index = Dense(self.labels, self._rows)
        if self.table is not None:
            yield Lookup("table", "tables", self.table.T, index, np.transpose)
        if self.key_table is not None:
            yield Lookup("key_table", "queries", per_head(self.key_table), index, scaled=True)
        if self.value_table is not None:
            yield Lookup("value_table", "values", per_head(self.value_table), index)

    def narrow(self, site: Site, part: Part) -> tuple[Scheme, Site, Part]:
        """Labels of the pairs."""
        labels = np.ascontiguousarray(of_batch(self.labels, 2, part.batch)[..., part.queries, part.keys])
        return (self._with(labels=labels), *part.nearby(site))

    def memory_bound(self, site: Site) -> MemoryBound:
        """The formula gathers a vector for every pair of every graph, and again where pairs have none."""
        sizes = [
            per_head(table).shape[0] * table.shape[-1]
            for table in (self.key_table, self.value_table)
            if table is not None
        ]
        vectors = 2 * self.labels.size * max(sizes, default=0) * site.dtype.itemsize
        return MemoryBound(super().memory_bound(site).formula + vectors)


def _labels(value: Any, rows: int, name: str = "labels") -> Int32:
    """Labels as 32-bit integers that nobody can change: (..., L_q, L_k), each in -1 ... rows - 1."""
    labels = check.array(name, value)
    if labels.dtype.kind not in "iu":
        raise RelposTypeError(f"{name}: expected integers, found dtype {labels.dtype}")
    if labels.ndim < 2:
        raise RelposValueError(f"{name}: expected shape (..., L_q, L_k), found {labels.shape}")
    check.rows(name, labels, rows, -1)
    kept: Int32 = np.array(labels, dtype=np.int32, order="C")
    kept.flags.writeable = False
    return kept


@register(
    "graph",
    GraphLabels,
    adds="a scalar or vectors per label of an edge",
    paper="Shaw et al., NAACL 2018; Ying et al., NeurIPS 2021",
    doi="10.48550/arXiv.2106.05234",
    equation="6",
    variants=("graphormer", "shaw"),
    models="Graphormer, relation-aware self-attention, Funnel, AlphaFold 3, Boltz",
    far=True,
)
def _build(at: Sample) -> dict[str, Any]:
    count = at.pick(9, 40)
    # Most pairs have the first labels, and those beyond the last have none.
    drawn = np.floor(np.abs(at.normal(*at.batch, at.q_len, at.k_len).astype(np.float64)) * 4).astype(np.int64)
    if at.variant == "shaw":
        parts = at.operands(4, 2)
        found, heads = np.where(drawn < count, drawn, -1), parts["q"].shape[-3]
        tables = {"key_table": at.normal(count, at.dim), "value_table": at.normal(heads, count, at.v_dim)}
        kept = at.pick(("key_table", "value_table"), ("table", "key_table"), ("value_table",), ("key_table",))
        if "table" in kept:
            tables["table"] = at.normal(count, heads)
        # One graph for all items, or one for each.
        found = found[(0,) * len(at.batch)] if at.pick(False, True) and 0 not in at.batch else found
        return {**parts, "position": GraphLabels(found, **{name: tables[name] for name in kept})}
    length = at.q_len
    parts = at.operands(4, 4, length, length)
    # Distances are the same both ways, and 0 from a node to itself; the virtual node stands before all others.
    nodes = np.minimum(drawn[..., : length - 1, : length - 1], count - 2) + 1
    nodes = np.resize(nodes, (*at.batch, length - 1, length - 1))
    nodes = np.triu(nodes, 1) + np.swapaxes(np.triu(nodes, 1), -1, -2)
    heads = parts["q"].shape[-3]
    return {**parts, "position": GraphLabels.graphormer(nodes, at.normal(count, heads), at.normal(heads))}
