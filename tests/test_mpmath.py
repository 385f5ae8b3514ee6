"""Float64 against 50 digits: loops from the papers on mpmath's numbers, with the same inputs.

The other tests compare implementations in float64 with each other, which may share rounding errors. Here the exact
answer is known, and every backend must be within four units of eps sum_j p_j |v_j| (1 + max |logit|).
"""

import numpy as np
import pytest

import relpos_np as rp

mpmath = pytest.importorskip("mpmath")
mpf = mpmath.mpf

EPS = np.finfo(np.float64).eps
PROMISE = 4.0
HEADS, Q, K, D, D_V = 2, 12, 21, 6, 3
SIGMA = None  # the default scale, 1/sqrt(D)


@pytest.fixture(autouse=True)
def fifty_digits():
    with mpmath.workdps(50):
        yield


def exact(x):
    """Nested lists of mpmath's numbers, each the float64 it was."""
    return [exact(row) for row in x] if isinstance(x, list) else mpf(x)


def dot(x, y):
    return sum((a * b for a, b in zip(x, y, strict=True)), mpf(0))


def attention(q, k, v, *, logit, value=None, seen=None, scale=SIGMA, content=True):
    """Output, log-sum-exp, and the sum of p |v|, head by head: Vaswani et al. 2017, eq. 1, with what positions add."""
    sigma = 1 / mpmath.sqrt(len(q[0][0])) if scale is None else mpf(scale)
    out, lse, size, largest = [], [], [], mpf(0)
    for h, queries in enumerate(q):
        for i, query in enumerate(queries):
            scores = {}
            for j, key in enumerate(k[h]):
                if seen is None or seen(i, j):
                    scores[j] = (sigma * dot(query, key) if content else mpf(0)) + logit(h, i, j, sigma)
            largest = max(largest, *(abs(s) for s in scores.values()))
            weights = {j: mpmath.exp(s) for j, s in scores.items()}
            total = sum(weights.values())
            lse.append(mpmath.log(total))
            rows = {
                j: [a + b for a, b in zip(v[h][j], value(h, i, j), strict=True)] if value else v[h][j] for j in scores
            }
            for c in range(len(v[0][0])):
                out.append(sum(w / total * rows[j][c] for j, w in weights.items()))
                # An implementation may sum values and their position vectors apart.
                apart = {j: abs(v[h][j][c]) + (abs(value(h, i, j)[c]) if value else 0) for j in scores}
                size.append(sum(w / total * apart[j] for j, w in weights.items()))
    return out, lse, size, largest


# ---------------------------------------------------------------------------------------------- the schemes

# Each: from a source of numbers and the operands (nested lists) to the scheme, and how `attention` is to be called.


def plain(draw, q, k):
    return None, {"logit": lambda h, i, j, s: mpf(0)}


def shaw(draw, q, k):
    """Shaw et al. 2018, eq. 3 to 5."""
    keys, values = draw(5, D), draw(7, D_V)
    key_rows, value_rows = exact(keys.tolist()), exact(values.tolist())

    def row(rows, i, j):
        reach = len(rows) // 2
        return rows[max(-reach, min(reach, j - i - (K - Q))) + reach]

    return rp.Shaw(keys, values), {
        "logit": lambda h, i, j, s: s * dot(q[h][i], row(key_rows, i, j)),
        "value": lambda h, i, j: row(value_rows, i, j),
    }


def t5(draw, q, k):
    """Raffel et al. 2020: 8 buckets up to distance 7, where no distance lies on a border."""
    table = draw(8, HEADS)
    rows = exact(table.tolist())

    def bucket(d):
        n = abs(d)
        if n >= 2:
            n = min(3, 2 + int(mpmath.floor(mpmath.log(mpf(n) / 2) / mpmath.log(mpf(7) / 2) * 2)))
        return n + (4 if d > 0 else 0)

    return rp.T5(table, max_distance=7), {"logit": lambda h, i, j, s: rows[bucket(j - i - (K - Q))][h]}


def alibi(draw, q, k):
    """Press et al. 2022, with the default slopes 2^(-8 (h + 1) / H)."""
    return rp.ALiBi(), {
        "logit": lambda h, i, j, s: -(mpf(2) ** (mpf(-8) * (h + 1) / HEADS)) * abs(j - i - (K - Q)),
    }


def transformer_xl(draw, q, k):
    """Dai et al. 2019, section 3.3; rows for the distances K-1 ... -(Q-1)."""
    u, v, rows = draw(HEADS, D), draw(HEADS, D), draw(Q + K - 1, HEADS, D)
    a, b, r = (exact(x.tolist()) for x in (u, v, rows))

    def logit(h, i, j, s):
        distance = i + (K - Q) - j
        turned = [x + y for x, y in zip(q[h][i], b[h], strict=True)]
        return s * (dot(a[h], k[h][j]) + dot(turned, r[K - 1 - distance][h]))

    return rp.TransformerXL(u, v, rows, variant="conformer"), {"logit": logit}


def rotary(draw, q, k):
    """Su et al. 2021, eq. 15: pairs (2p, 2p + 1) as complex numbers, turned by base^(-2p/D) per position."""

    def turn(x, t):
        out = []
        for p in range(D // 2):
            angle = t * mpf(10000) ** (mpf(-2 * p) / D)
            z = mpmath.mpc(x[2 * p], x[2 * p + 1]) * mpmath.expj(angle)
            out += [z.real, z.imag]
        return out

    def logit(h, i, j, s):
        return s * dot(turn(q[h][i], i + K - Q), turn(k[h][j], j))

    return rp.Rotary(layout="interleaved"), {"logit": logit, "content": False}


def pope(draw, q, k):
    """Gopalakrishnan et al. 2025: all of a score; positions at which a rounded angle has lost 7 bits."""
    bias, base, step = draw(D), 50.0, 37
    delta = exact(bias.tolist())
    omega = [mpf(base) ** (-mpf(c) / D) for c in range(D)]
    places = np.arange(K) * step

    def size(x):
        return mpmath.log(1 + mpmath.exp(x))

    def logit(h, i, j, sigma):
        d = int(places[j] - places[i + K - Q])
        return sigma * sum(size(q[h][i][c]) * size(k[h][j][c]) * mpmath.cos(d * omega[c] + delta[c]) for c in range(D))

    return rp.PoPE(bias, base=base, positions=places), {"logit": logit, "content": False}


def kerple(draw, q, k):
    """Chi et al. 2022: -r1 log(1 + r2 |d|)."""
    r1, r2 = (np.exp(-np.abs(draw(HEADS))) for _ in "ab")
    a, b = exact(r1.tolist()), exact(r2.tolist())
    return rp.KERPLE(r1, r2), {"logit": lambda h, i, j, s: -a[h] * mpmath.log(1 + b[h] * abs(j - i - (K - Q)))}


def window(draw, q, k):
    """Liu et al. 2021, with the table of a window of 7 by 3: queries are its first four rows, keys are all of them."""
    table = draw(13 * 5, HEADS)
    rows = exact(table.tolist())

    def logit(h, i, j, s):
        down, across = i // 3 - j // 3, i % 3 - j % 3
        return rows[(down + 6) * 5 + across + 2][h]

    return rp.WindowBias(table, (4, 3), (7, 3), extent=(7, 3)), {"logit": logit}


CASES = (plain, shaw, t5, alibi, transformer_xl, rotary, pope, kerple, window)


def units(found, wanted, unit):
    """The largest error in units, computed with 50 digits."""
    numbers = exact(np.asarray(found).ravel().tolist())
    return max(float(abs(a - e) / u) for a, e, u in zip(numbers, wanted, unit, strict=True))


@pytest.mark.parametrize("scale", [None, 6.0], ids=["scale", "large"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_every_backend_is_within_its_promise(case, scale, rng):
    draw = rng.standard_normal
    q, k, v = draw((HEADS, Q, D)), draw((HEADS, K, D)), draw((HEADS, K, D_V))
    lists = [exact(x.tolist()) for x in (q, k, v)]
    scheme, call = case(lambda *shape: draw(shape), *lists[:2])
    causal = case is plain
    seen = (lambda i, j: j <= i + K - Q) if causal else None
    out, lse, size, largest = attention(*lists, seen=seen, scale=scale, **call)
    unit = [EPS * s * (1 + largest) for s in size]
    lse_unit = [EPS * (1 + largest + mpmath.log(K))] * len(lse)
    for backend in rp.backend.available()[0]:
        found, found_lse = rp.attention(
            q, k, v, position=scheme, causal=causal, scale=scale, backend=backend, return_lse=True
        )
        worst = units(found, out, unit), units(found_lse, lse, lse_unit)
        print(f"{case.__name__} on {backend}: {worst[0]:.2f} units, log-sum-exp {worst[1]:.2f}")
        assert max(worst) <= PROMISE, (backend, worst)
        # No accident: float64 holds 16 digits, so some of 50 are always missing.
        assert max(worst) > 0


def test_fifty_digits_notice_a_wrong_one(rng):
    """One more eps on a single logit of size 1 is seen: the comparison is not done in float64."""
    q, k, v = (rng.standard_normal(shape) for shape in ((1, 1, D), (1, 2, D), (1, 2, 1)))
    lists = [exact(x.tolist()) for x in (q, k, v)]
    first = attention(*lists, logit=lambda h, i, j, s: mpf(0))
    moved = attention(*lists, logit=lambda h, i, j, s: EPS / 8 * j)
    difference = abs(first[0][0] - moved[0][0]) / EPS
    assert 0 < difference < 1
    assert units([float(first[0][0])], moved[0], [EPS]) > 0
