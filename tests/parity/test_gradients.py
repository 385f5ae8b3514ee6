"""Gradients against PyTorch's autograd, through attention written once more in torch for every scheme and variant.

Each formula below is a scheme's docstring in torch operations, or a peer's function where it is simple to call. It
reads the settings and the trained arrays of a scheme, and calls nothing of the package. Where a derivative is not
unique (ReLU at 0, a clamp at its bound, CoPE's position at a whole number), the examples' numbers lie beside it, as
real numbers do; FIRE's threshold is none of the positions.
"""

import itertools
import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest

import relpos_np as rp
from relpos_np import testing
from tests.every import ATTENTION
from tests.parity.modules import modeling as peer

torch = pytest.importorskip("torch")
functional = torch.nn.functional

BACKENDS = ("numpy", "terms", "numba")


# ---------------------------------------------------------------------------------------------- attention in torch


@dataclass
class Call:
    """A call as the formulas see it: queries and keys of all heads, trained arrays as leaves of autograd."""

    q: "torch.Tensor"  # (B, H, L_q, D)
    k: "torch.Tensor"  # (B, H, L_k, D): heads of keys repeated
    t: dict  # trained arrays by name
    p: object  # the scheme, for its settings
    scale: float
    offset: int
    groups: int  # query heads per key head
    last: int | None  # how many keys after its position a query sees at most; None for all

    @property
    def i(self):
        """Positions of the queries, as a column."""
        return torch.arange(self.q.shape[-2])[:, None] + self.offset

    @property
    def j(self):
        return torch.arange(self.k.shape[-2])

    @property
    def d(self):
        return self.j - self.i

    @property
    def product(self):
        return self.scale * self.q @ self.k.mT

    def met(self, vectors):
        """Products of queries with a vector per pair (..., L_q, L_k, D)."""
        return (self.q[..., None, :] * vectors).sum(-1)


def seen(c, mask=None, causal=False, window=None, key_lengths=None, batch=1):
    """Which keys a query may attend, and what a mask of floats adds."""
    allowed, added = torch.ones(batch, 1, *c.d.shape, dtype=torch.bool), torch.zeros(())
    if causal:
        allowed = allowed & (c.d <= 0)
    if window is not None:
        left, right = window if isinstance(window, tuple) else (window, window)
        for far, limit in ((-c.d, left), (c.d, right)):
            allowed = allowed if limit is None else allowed & (far <= limit)
    if key_lengths is not None:
        allowed = allowed & (c.j < torch.tensor(key_lengths).reshape(-1, 1, 1, 1))
    if mask is not None and mask.dtype == bool:
        allowed = allowed & torch.tensor(mask)
    elif mask is not None:
        added = torch.tensor(mask)
    return allowed, added


def last_key(causal=False, window=None):
    limits = [0] if causal else []
    right = window[1] if isinstance(window, tuple) else window
    return min([*limits, *([] if right is None else [right])], default=None)


def trained(position):
    """Names of the floating-point arrays that a scheme was made of and that training moves."""
    return [
        name
        for name, x in vars(position).items()
        if isinstance(x, np.ndarray) and x.dtype.kind == "f" and name[0] != "_" and "positions" not in name
    ]


@torch.enable_grad()
def autograd(formula, q, k, v, position, to_out, to_lse, scale=None, offset=None, **options):
    """Gradients of q, k, v and, by name, of the trained arrays."""
    operands = [torch.tensor(x, requires_grad=True) for x in (q, k, v)]
    arrays = {name: torch.tensor(getattr(position, name), requires_grad=True) for name in trained(position)}
    groups = q.shape[-3] // k.shape[-3]
    c = Call(
        q=operands[0],
        k=operands[1].repeat_interleave(groups, dim=-3),
        t=arrays,
        p=position,
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        offset=k.shape[-2] - q.shape[-2] if offset is None else offset,
        groups=groups,
        last=last_key(options.get("causal", False), options.get("window")),
    )
    s = formula(c)
    s, vectors = s if isinstance(s, tuple) else (s, None)
    allowed, added = seen(c, batch=len(q), **options)
    s = (s + added).masked_fill(~allowed, -torch.inf)
    # A query without keys has output 0 and no gradient.
    some = s.detach().isfinite().any(-1, keepdim=True)
    s = torch.where(some, s, 0.0)
    p = s.softmax(-1) * some
    out = p @ operands[2].repeat_interleave(groups, dim=-3)
    if vectors is not None:
        out = out + torch.einsum("bhij,bhijd->bhid", p, vectors.expand(*p.shape, -1))
    lse = torch.where(some[..., 0], s.logsumexp(-1), 0.0)
    ((out * torch.tensor(to_out)).sum() + (lse * torch.tensor(to_lse)).sum()).backward()
    return {name: x.grad.numpy() for name, x in [*zip(("dq", "dk", "dv"), operands, strict=True), *arrays.items()]}


def worst_error(formula, q, k, v, position, backend, **kwargs):
    """The largest error of any gradient, each in units of its largest element."""
    rng = np.random.default_rng(3)
    to_out, to_lse = rng.standard_normal((*q.shape[:-1], v.shape[-1])), rng.standard_normal(q.shape[:-1])
    expected = autograd(formula, q, k, v, position, to_out, to_lse, **kwargs)
    found = rp.attention_vjp(q, k, v, position=position, grad_out=to_out, grad_lse=to_lse, backend=backend, **kwargs)
    assert set(found.position) == set(trained(position))
    grads = {"dq": found.q, "dk": found.k, "dv": found.v, **found.position}
    errors = {}
    for name, wanted in expected.items():
        assert grads[name].shape == wanted.shape
        assert grads[name].dtype == np.float64
        # Arrays that have no share (a learned scale beyond its bound) have a gradient of exactly 0.
        errors[name] = np.abs(grads[name] - wanted).max() / (np.abs(wanted).max() or 1e-300)
    return max(errors.values()), errors


# ---------------------------------------------------------------------------------------------- vectors and products


def plain(c):
    return c.product


def shaw(c):
    """Vectors of clipped distances, looked up for every pair; nothing beyond the table for "zero"."""
    found = {}
    lefts = c.p.left if isinstance(c.p.left, tuple) else 2 * (c.p.left,)
    for name, left in zip(("key_table", "value_table"), lefts, strict=True):
        if name in c.t:
            table = c.t[name]
            at = c.d + (table.shape[-2] // 2 if left is None else left)
            inside = at.clamp(0, table.shape[-2] - 1)
            found[name] = table[..., inside, :]
            if c.p.outside == "zero":
                found[name] = torch.where((at == inside)[..., None], found[name], 0.0)
    s = c.product
    return s + c.scale * c.met(found["key_table"]) if "key_table" in found else s, found.get("value_table")


def xl_parts(c):
    content = c.scale * (c.q + c.t["content_bias"][:, None]) @ c.k.mT
    return content, c.scale * torch.einsum("bhid,rhd->bhir", c.q + c.t["position_bias"][:, None], c.t["rows"])


def xl_future(c, bd):
    return torch.where(c.d > 0, 0.0, bd) if c.p.zero_triu else bd


def xl_padded(c):
    """Transformer-XL's own steps: a zero before each row, and the rows read on with one number less."""
    ac, bd = xl_parts(c)
    *lead, rows, _ = bd.shape
    padded = torch.cat([torch.zeros(*lead, rows, 1, dtype=bd.dtype), bd], dim=-1)
    return ac + xl_future(c, padded.flatten(-2)[..., rows:].reshape(bd.shape))


def xl_conformer(c):
    """The row of distance i + M - j, of rows that begin with L_k - 1."""
    ac, bd = xl_parts(c)
    at = c.k.shape[-2] - 1 + c.d
    return ac + xl_future(c, bd.gather(-1, at.expand(*bd.shape[:-1], -1)))


def xl_xlnet(c):
    """The shift of transformers, on the columns of either kind of attention."""
    ac, bd = xl_parts(c)
    return ac + xl_future(c, peer("xlnet").XLNetRelativeAttention.rel_shift_bnij(bd, klen=c.k.shape[-2]))


def xl_wenet(c):
    ac, bd = xl_parts(c)
    return ac + bd


def deberta(c):
    """Rows of distances from key to query, clipped; buckets beyond half of the span are transformers'."""
    s = c.product
    for name in c.t:
        delta = -c.d if name == "pos_key" or c.p.p2c == "code" else c.d
        span = c.t[name].shape[1] // 2
        if c.p.max_position is not None:
            delta = peer("deberta_v2").make_log_bucket_position(delta, span, c.p.max_position).long()
        vectors = c.t[name][:, (delta + span).clamp(0, 2 * span - 1)]
        met = c.met(vectors) if name == "pos_key" else (c.k[..., None, :, :] * vectors).sum(-1)
        s = s + c.scale * met
    return s


def graph(c):
    """Each pair has a label or, at -1, none."""
    labels = torch.tensor(c.p.labels).long()
    there = (labels >= 0)[..., None, :, :]

    def looked_up(name):
        table = c.t[name] if c.t[name].ndim == 3 else c.t[name][None]
        x = table[:, labels.clamp(min=0)]  # (H, ..., L_q, L_k, D)
        return torch.where(there[..., None], x.movedim(0, -4), 0.0)

    s = c.product
    if "table" in c.t:
        s = s + torch.where(there, c.t["table"][labels.clamp(min=0)].movedim(-1, -3), 0.0)
    if "key_table" in c.t:
        s = s + c.scale * c.met(looked_up("key_table"))
    return s, looked_up("value_table") if "value_table" in c.t else None


def cope(c):
    """Gates, counted from the last key on that is seen; the product with a vector between two whole ones."""
    keys = c.t["gate_key"].repeat_interleave(c.groups, dim=-3) if "gate_key" in c.t else c.k
    gates = torch.sigmoid(c.scale * c.q @ keys.mT)
    if c.last is not None:
        gates = gates * (c.d <= c.last)
    if c.p.counted is not None:
        gates = gates * torch.tensor(c.p.counted)
    position = gates.flip(-1).cumsum(-1).flip(-1).clamp(max=c.t["table"].shape[-2] - 1)
    whole = c.q @ c.t["table"].mT
    low, high = (whole.gather(-1, edge.detach().long()) for edge in (position.floor(), position.ceil()))
    w = position - position.detach().floor()
    added = w * high + (1 - w) * low
    return c.product + (added if c.p.variant == "paper" else c.scale * added)


# ---------------------------------------------------------------------------------------------- rotations


def turn(x, angle, size, layout):
    """Pairs of channels as complex numbers, times that size and e to the i times the angle."""
    pairs = angle.shape[-1]
    turning, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    z = turning.unflatten(-1, (2, pairs)).mT if layout == "half" else turning.unflatten(-1, (pairs, 2))
    z = torch.view_as_real(torch.view_as_complex(z.contiguous()) * size * torch.exp(1j * angle))
    return torch.cat([(z.mT if layout == "half" else z).flatten(-2), rest], dim=-1)


def places(c):
    """Positions of queries and of keys, in float64."""
    if c.p.positions is None:
        return c.i[:, 0].double(), c.j.double()
    at = torch.tensor(c.p.positions)
    if c.p.key_positions is None:
        return at[..., c.offset : c.offset + c.q.shape[-2]], at
    return at, torch.tensor(c.p.key_positions)


def frequencies(c):
    d = c.q.shape[-1] if c.p.dim is None else c.p.dim
    return c.t.get("frequencies", c.p.base ** (-torch.arange(0, d, 2, dtype=torch.float64) / d))


def rotary(c):
    omega = frequencies(c)
    if omega.ndim == 3:  # of each head of keys, for all queries that read it
        omega = omega.repeat_interleave(c.groups, dim=1)
    form = {1: "...l,p->...lp", 2: "...al,ap->...lp", 3: "...al,ahp->...hlp"}[omega.ndim]
    operands = []
    for x, at in zip((c.q, c.k), places(c), strict=True):
        angle = torch.einsum(form, at, omega)
        angle = angle if omega.ndim == 3 else angle[..., None, :, :]
        operands.append(turn(x, angle, c.p.magnitude, c.p.layout))
    return c.scale * operands[0] @ operands[1].mT


def xpos(c):
    """Queries grow by what keys shrink; positions count from 0, as in the paper."""
    omega = frequencies(c)
    zeta = (torch.arange(len(omega), dtype=torch.float64) / len(omega) + c.p.gamma) / (1 + c.p.gamma)
    operands = []
    for x, at, sign in zip((c.q, c.k), places(c), (1, -1), strict=True):
        size = zeta ** (sign * at[..., None] / c.p.scale_base)
        operands.append(turn(x, (at[..., None] * omega)[..., None, :, :], size[..., None, :, :], c.p.layout))
    return c.scale * operands[0] @ operands[1].mT


# ---------------------------------------------------------------------------------------------- numbers of distances


def looked_up(c, table, d, furthest, both=True):
    """T5's buckets as transformers finds them, and a number of each for every head."""
    bucket = peer("t5").T5Attention._relative_position_bucket(d, both, len(table), furthest)
    return table[bucket].movedim(-1, -3)


def t5(c):
    return c.product + looked_up(c, c.t["table"], c.d, c.p.max_distance, c.p.bidirectional)


def wavlm(c):
    return c.product + c.t["gate"][..., None] * looked_up(c, c.t["table"], c.d, c.p.max_distance)


def inkling(c):
    """A profile over the distance per query, gathered."""
    profiles, n = c.t["relative_states"] @ c.t["proj"], -c.d
    column = n.clamp(0, profiles.shape[-1] - 1).expand(*profiles.shape[:-1], -1)
    return c.product + profiles.gather(-1, column) * ((n >= 0) & (n < profiles.shape[-1]))


def fox(c):
    """Differences of sums of logarithms."""
    g = c.t["gates"]
    logs = {"fox": functional.logsigmoid(g), "cable": -functional.softplus(g), "log": g}[c.p.variant].cumsum(-1)
    return c.product + logs[..., c.i[:, 0], None] - logs[..., None, :]


def path(c):
    """From the query's position to the first key, a factor at a time."""
    w, beta = (
        x.repeat_interleave(c.q.shape[-3] // x.shape[at], dim=at) for x, at in ((c.t["w"], -3), (c.t["beta"], -2))
    )
    x, columns = c.q, []
    for j in reversed(range(c.k.shape[-2])):
        columns.append((torch.where(c.i >= j, x, c.q) * c.k[..., j, None, :]).sum(-1))
        axis = w[..., j, None, :]
        x = torch.where(c.i >= j, x - beta[..., j, None, None] * (x * axis).sum(-1, keepdim=True) * axis, x)
    return c.scale * torch.stack(columns[::-1], dim=-1)


def selective(c):
    """Sums of what earlier queries say against a key."""
    hidden = (c.d == 0) | (c.j == 0 if c.p.variant == "paper" else c.j <= c.offset)
    if c.last is not None:
        hidden = hidden | (c.d > c.last)
    said = c.product[..., c.p.head : c.p.head + 1, :, :].relu().masked_fill(hidden, 0)
    return c.product - (said.cumsum(-2) - said)


def dape(c):
    """Layers of a network on the pairs of ALiBi's bias and the scores."""
    slopes = torch.tensor([2.0 ** (-8 * (h + 1) / c.q.shape[-3]) for h in range(c.q.shape[-3])])
    bias = -slopes.double()[:, None, None] * c.d.abs()
    pair = torch.cat([c.product, bias.expand_as(c.product)], dim=-3).movedim(-3, -1)
    hidden = functional.leaky_relu(functional.linear(pair, c.t["w1"], c.t["b1"]), c.p.slope)
    return c.product + bias + functional.linear(hidden, c.t["w2"], c.t["b2"]).movedim(-1, -3)


def layout(c):
    """Distances in the text, across and down the page."""
    boxes = torch.tensor(c.p.boxes)
    if c.p.variant == "udop":
        factor = 100 if c.p.factor is None else c.p.factor
        middle = (boxes[..., :2] + boxes[..., 2:]) / 2
        apart = ((middle[..., None, :, :] - middle[..., :, None, :]) * factor).trunc().long()
    else:
        corner = boxes[..., [0, 3]]
        apart = corner[..., None, :, :] - corner[..., :, None, :]
    furthest = c.p.max_box_distance
    bias = looked_up(c, c.t["x_table"], apart[..., 0], furthest) + looked_up(c, c.t["y_table"], apart[..., 1], furthest)
    if "table" in c.t:
        at = c.j if c.p.positions is None else torch.tensor(c.p.positions)
        bias = bias + looked_up(c, c.t["table"], at[..., None, :] - at[..., :, None], c.p.max_distance)
    bias = bias[..., c.offset : c.offset + c.q.shape[-2], :]
    return c.product + (c.scale * bias if c.p.variant == "layoutlmv3" else bias)


def slopes(c):
    """Given ones, or the paper's: of the power of two below H, then every other one of the power above."""
    heads = c.q.shape[1]
    whole = 2 ** int(math.log2(heads))
    fixed = [2 ** (-8 * h / whole) for h in range(1, whole + 1)]
    fixed += [2 ** (-4 * h / whole) for h in range(1, 2 * whole, 2)]
    return c.t.get("slopes", torch.tensor(fixed[:heads], dtype=torch.float64))[:, None, None]


def alibi_symmetric(c):
    return c.product - slopes(c) * c.d.abs()


def alibi_causal(c):
    return c.product + slopes(c) * c.d


def alibi_key(c):
    return c.product + slopes(c) * c.j


def kerple_log(c):
    a, b = c.t["a"][:, None, None], c.t["b"][:, None, None]
    return c.product - a * torch.log(1 + b * c.d.abs())


def kerple_power(c):
    a, b = c.t["a"][:, None, None], c.t["b"][:, None, None]
    return c.product - a * c.d.abs().double() ** b


def fire(c):
    """A layer, ReLU, a layer; the input is a logarithm of the distance by that of the query's position."""

    def psi(n):
        return torch.log(c.t["c"] * n + 1)

    x = psi(c.d.abs()) / (psi(torch.maximum(c.t["threshold"], c.i.double())) + c.p.eps)
    hidden = torch.relu(functional.linear(x[..., None], c.t["w1"].reshape(-1, 1), c.t["b1"]))
    return c.product + functional.linear(hidden, c.t["w2"], c.t["b2"]).movedim(-1, 0)


def sandwich(c):
    half, heads = c.p.dim // 2, c.q.shape[1]
    first = 0 if c.p.variant == "paper" else 1
    omega = c.p.base ** (-2 * torch.arange(first, half + first, dtype=torch.float64) / c.p.dim)
    waves = torch.cos(c.d[..., None] * omega).sum(-1) - (0 if c.p.variant == "paper" else half)
    return c.product + waves * heads / (8 * torch.arange(1, heads + 1, dtype=torch.float64))[:, None, None]


def tisa(c):
    d = c.d if c.p.variant == "paper" else -c.d - 1
    a, b, top = (c.t[name][..., None, None] for name in ("amplitudes", "sharpness", "offsets"))
    return c.product + (a * torch.exp(-b.abs() * (d - top) ** 2)).sum(0)


# ---------------------------------------------------------------------------------------------- grids


def cells(grid):
    """Coordinates of all tokens, row by row."""
    return list(itertools.product(*map(range, grid)))


def per_pair(queries, keys, rule):
    return torch.tensor([[rule(a, b) for b in keys] for a in queries])


def row_of(difference, extent):
    """Number of a difference of coordinates among all, row by row."""
    row = 0
    for d, e in zip(difference, extent, strict=True):
        row = row * (2 * e - 1) + d + e - 1
    return row


def window(c):
    coordinates = c.p.key_coords or [None] * len(c.p.key_grid)
    axes = [range(n) if at is None else at.tolist() for n, at in zip(c.p.key_grid, coordinates, strict=True)]
    rows = per_pair(
        cells(c.p.grid),
        list(itertools.product(*axes)),
        lambda a, b: row_of([x - y for x, y in zip(a, b, strict=True)], c.p.extent),
    )
    return c.product + c.t["table"][rows].movedim(-1, 0)


def swin_v2(c):
    """Cosines with a learned factor; a network of coordinates on a logarithmic scale."""
    tokens = cells(c.p.grid)
    apart = torch.tensor([[[y - u, x - w] for u, w in tokens] for y, x in tokens], dtype=torch.float64)
    if c.p.variant == "paper":
        z = apart.sign() * torch.log(1 + apart.abs())
    else:
        spans = [max(n - 1, 1) for n in c.p.pretrained_grid or c.p.grid]
        if c.p.variant == "transformers" and c.p.pretrained_grid is None and c.p.grid[0] == 1:
            spans = [1, 1]
        z = 8 * apart / torch.tensor(spans, dtype=torch.float64)
        z = z.sign() * torch.log2(1 + z.abs()) / math.log2(8)
    hidden = torch.relu(functional.linear(z, c.t["hidden_weight"], c.t["hidden_bias"]))
    bias = functional.linear(hidden, c.t["output_weight"], c.t.get("output_bias")).movedim(-1, 0)
    bias = bias if c.p.variant == "paper" else 16 * torch.sigmoid(bias)
    factor = c.t["logit_scale"].reshape(-1, 1, 1).clamp(max=math.log(100)).exp() * c.scale * c.q.shape[-1] ** 0.5
    return factor * (functional.normalize(c.q, dim=-1) @ functional.normalize(c.k, dim=-1).mT) + bias


def beit(c):
    height, width = c.p.grid
    last = (2 * height - 1) * (2 * width - 1)

    def rule(a, b):
        if a is None or b is None:
            return last + (2 if a is b else 0 if a is None else 1)
        return row_of((a[0] - b[0], a[1] - b[1]), c.p.grid)

    tokens = [None, *cells(c.p.grid)]
    return c.product + c.t["table"][per_pair(tokens, tokens, rule)].movedim(-1, 0)


def decomposed(c):
    """Every axis has its rows, at fractions where one grid is coarser; other tables are interpolated by PyTorch."""
    start, s = int(c.p.class_token), c.product
    q = c.q[:, :, start:]
    for axis, name in enumerate(("height_table", "width_table")):
        big, small = c.p.grid[axis], c.p.key_grid[axis]
        rows, table = 2 * max(big, small) - 1, c.t[name]
        table = functional.interpolate(table.T[None], size=rows, mode="linear")[0].T
        up, down = max(Fraction(small, big), 1), max(Fraction(big, small), 1)

        def rule(a, b, axis=axis, up=up, down=down, small=small):
            return math.floor(a[axis] * up + (small - 1 - b[axis]) * down)

        vectors = table[per_pair(cells(c.p.grid), cells(c.p.key_grid), rule)]
        s = s + functional.pad((q[..., None, :] * vectors).sum(-1), (start, 0, start, 0))
    return s


def neighborhood(c):
    """The K nearest of the tokens with the same remainder, or the first or last K of them."""

    def neighbours(at, n, kernel, gap):
        family = list(range(at % gap, n, gap))
        first = min(max(family.index(at) - kernel // 2, 0), len(family) - kernel)
        return family[first : first + kernel]

    axes = list(zip(c.p.grid, c.p.kernel, c.p.dilation, strict=True))

    def rule(a, b):
        if any(y not in neighbours(x, *axis) for x, y, axis in zip(a, b, axes, strict=True)):
            return -1
        return row_of([(y - x) // gap for x, y, (_, _, gap) in zip(a, b, axes, strict=True)], c.p.kernel)

    rows = per_pair(cells(c.p.grid), cells(c.p.grid), rule)
    s = c.product
    if "table" in c.t:
        s = s + c.t["table"].flatten(1)[:, rows.clamp(min=0)]
    return s.masked_fill(rows < 0, -torch.inf)


def irpe(c):
    """Vectors or numbers per bucket of the offset; those of queries have the offset the other way."""
    b, (alpha, beta, gamma) = math.floor(c.p.beta), (c.p.alpha, c.p.beta, c.p.gamma)

    def g(x):
        if abs(x) <= alpha:
            return x + b
        bent = alpha + math.log(abs(x) / alpha) / math.log(gamma / alpha) * (beta - alpha)
        return int(math.copysign(min(round(bent), b), x)) + b

    side = 2 * b + 1
    rules = {
        "euclidean": [lambda y, x: g(round(math.hypot(y, x)))],
        "quantization": [lambda y, x: g(y * y + x * x)],
        "product": [lambda y, x: g(y) * side + g(x)],
        "cross": [lambda y, x: g(y), lambda y, x: g(x)],
    }[c.p.method]
    own = side**2 if c.p.method == "product" else side
    tokens = [None] * c.p.class_tokens + cells(c.p.grid)
    s, values = c.product, None
    for n, rule in enumerate(rules):
        rows = per_pair(tokens, tokens, lambda p, q, f=rule: own if None in (p, q) else f(p[0] - q[0], p[1] - q[1]))
        tables = {name: x[n] if c.p.method == "cross" else x for name, x in c.t.items()}
        if "key_table" in tables:
            r = tables["key_table"][:, rows]
            s = s + (r if c.p.mode == "bias" else c.scale * c.met(r))
        if "query_table" in tables:
            r = tables["query_table"][:, rows.T]
            s = s + (r if c.p.mode == "bias" else c.scale * (c.k[..., None, :, :] * r).sum(-1))
        if "value_table" in tables:
            r = tables["value_table"][:, rows]
            values = r if values is None else values + r
    return s, values


# ---------------------------------------------------------------------------------------------- every scheme

FORMULAS = {
    "plain": {None: plain},
    "shaw": {"clip": shaw, "zero": shaw},
    "t5": {"exact": t5, "float32": t5},
    "transformer_xl": {
        "transformer_xl": xl_padded,
        "espnet_legacy": xl_padded,
        "conformer": xl_conformer,
        "xlnet": xl_xlnet,
        "wenet": xl_wenet,
        "xlnet_uni": xl_xlnet,
    },
    "rotary": {"half": rotary, "interleaved": rotary},
    "xpos": {"interleaved": xpos, "half": xpos},
    "window": {"swin": window, "video": window, "rstt": window},
    "swin_v2": {"microsoft": swin_v2, "transformers": swin_v2, "paper": swin_v2},
    "beit": {None: beit},
    "decomposed": {"sam": decomposed, "mvit": decomposed},
    "neighborhood": {"nat": neighborhood, "dinat": neighborhood},
    "irpe": {"product": irpe, "euclidean": irpe, "quantization": irpe, "cross": irpe, "bias": irpe},
    "alibi": {"symmetric": alibi_symmetric, "causal": alibi_causal, "key": alibi_key},
    "kerple": {"log": kerple_log, "power": kerple_power},
    "layout": {"layoutlmv2": layout, "layoutlmv3": layout, "udop": layout},
    "deberta": {"code": deberta, "paper": deberta},
    "graph": {"graphormer": graph, "shaw": graph},
    "cope": {"paper": cope, "ram": cope},
    "wavlm": {None: wavlm},
    "inkling": {None: inkling},
    "dape": {None: dape},
    "fox": {"fox": fox, "cable": fox, "log": fox},
    "path": {None: path},
    "selective": {"paper": selective, "x_transformers": selective},
    "fire": {None: fire},
    "sandwich": {"paper": sandwich, "nemo": sandwich},
    "tisa": {"paper": tisa, "published": tisa},
}


PAIRS = [(name, variant) for name, variants in FORMULAS.items() for variant in variants]


def test_formulas_are_those_of_registered_variants():
    assert set(PAIRS) <= set(ATTENTION)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", ["tiny", "small"])
@pytest.mark.parametrize(("name", "variant"), PAIRS)
def test_gradients_equal_autograd(name, variant, size, backend):
    """Examples have grouped heads, masks and partly other lengths of queries than of keys."""
    e = testing.example(name, variant=variant, dtype="float64", size=size)
    formula = FORMULAS[name][variant]
    worst, errors = worst_error(formula, e.q, e.k, e.v, e.position, backend, **e.kwargs)
    assert worst <= 1e-12, errors
