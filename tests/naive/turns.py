"""Rotary positions as loops: any positions, several coordinates, frequencies per head, and xPos."""

import cmath

import numpy as np

from tests.naive.by_name import Loops, flat, witness
from tests.naive.seeds import floats, rotary


def _turned(vector, waves, layout, magnitude=1.0, sizes=None, first=0, blocks=1):
    """Pair p, from channel `first` on, as a complex number times m s_p e^(i angle_p).

    Of several blocks, each has a first and a second half.
    """
    out = list(vector)
    for p, angle in enumerate(waves):
        a, b = 2 * p, 2 * p + 1
        if layout == "half":
            size = len(waves) // blocks
            block, r = divmod(p, size)
            a, b = 2 * block * size + r, 2 * block * size + size + r
        a, b = first + a, first + b
        z = complex(vector[a], vector[b]) * magnitude * cmath.exp(1j * angle)
        z = z if sizes is None else z * sizes[p]
        out[a], out[b] = z.real, z.imag
    return out


def turns(q, k, at_query, at_key, waves, **options):
    """The angle of pair p is the sum over axes a of t_a w[a][h][p] (Heo 2024, RoPE-Mixed; one axis: Su 2021).

    at_query (B, A, L_q) and at_key (B, A, L_k) are the coordinates; waves (A, H_kv, P), those of a key head for all
    the queries that read it.
    """
    return tuple(_each(x, _row_turned(at, waves, np.shape(x)[1], **options)) for x, at in ((q, at_query), (k, at_key)))


def _row_turned(at, waves, heads, sign=1, layout="half", magnitude=1.0, first=0, blocks=1):
    """Closure of (b, h, t, row): the row of head h, of so many, turned by sign times the angles of place t."""
    at, waves = floats(at), floats(waves)
    axes, kv_heads, pairs = len(waves), len(waves[0]), len(waves[0][0])

    def turned(b, h, t, row):
        g = h // (heads // kv_heads)
        angles = [sign * sum(at[b][a][t] * waves[a][g][p] for a in range(axes)) for p in range(pairs)]
        return _turned(row, angles, layout, magnitude, first=first, blocks=blocks)

    return turned


def _each(x, turned):
    """Every row of (B, H, L, D), turned."""
    out = np.empty(np.shape(x))
    for b, item in enumerate(floats(x)):
        for h, head in enumerate(item):
            for t, row in enumerate(head):
                out[b, h, t] = turned(b, h, t, row)
    return out


@witness("rotary")
def rotary_of(
    q,
    k,
    v,
    dim,
    base,
    layout,
    frequencies,
    magnitude,
    positions,
    key_positions,
    channels,
    blocks,
    values,
    offset,
    batch,
):
    """Positions i + M and j (Su 2021), or those that are given, as numbers or as coordinates (Heo 2024).

    Those of DeepSeek (2024) turn channels of their own, at the end of a head; those of Gemma 4 (2026) halves of halves.
    In DeepSeek V4 (2026) values turn as keys do, and the output turns by minus the angles of its query.
    """
    if positions is None and (channels is not None or blocks > 1 or values):
        positions, key_positions = np.arange(offset, offset + np.shape(q)[2]), np.arange(np.shape(k)[2])
    if positions is None:
        waves = None if frequencies is None else {"frequencies": frequencies}
        q, k = rotary(q, k, layout=layout, magnitude=magnitude, offset=offset, **(waves or {"dim": dim, "base": base}))
        return Loops(q=q, k=k)
    l_q, heads, depth = np.shape(q)[2], np.shape(k)[1], np.shape(q)[3]
    dim = depth if dim is None else dim
    waves = [base ** (-2.0 * p / dim) for p in range(dim // 2)] if frequencies is None else frequencies
    single = np.ndim(waves) == 1
    waves = np.asarray(waves)
    waves = waves[None, None] if single else waves[:, None] if waves.ndim == 2 else waves
    waves = np.broadcast_to(waves, (waves.shape[0], heads, waves.shape[2]))
    here, there = (None if x is None else np.asarray(x, np.float64) for x in (positions, key_positions))
    if there is None:
        here, there = here[..., offset : offset + l_q], here
    here, there = (flat(x[..., None, :] if single else x, batch, 2) for x in (here, there))
    first = 0 if channels is None else channels[0]
    options = {"layout": layout, "magnitude": magnitude, "first": first, "blocks": blocks}
    q_turned, k_turned = turns(q, k, here, there, waves, **options)
    if not values:
        return Loops(q=q_turned, k=k_turned)
    back = _row_turned(here, waves, np.shape(q)[1], sign=-1, **options)
    return Loops(q=q_turned, k=k_turned, v=_each(v, _row_turned(there, waves, heads, **options)), back=back)


@witness("xpos")
def xpos(q, k, dim, base, scale_base, gamma, layout, positions, key_positions, offset, batch):
    """q_n z^(n/B) e^(i n w), k_m z^(-m/B) e^(i m w), z_p = (2p/d + gamma) / (1 + gamma) (Sun 2023, algorithm 1)."""
    (_, _, l_q, depth), l_k = np.shape(q), np.shape(k)[2]
    dim = depth if dim is None else dim
    pairs = range(dim // 2)
    if positions is None:
        positions, key_positions = np.arange(offset, offset + l_q), np.arange(l_k)
    elif key_positions is None:
        positions, key_positions = positions[..., offset : offset + l_q], positions

    def each(x, places, sign):
        places = floats(flat(np.asarray(places, np.float64), batch, 1))
        out = np.empty(np.shape(x))
        for b, item in enumerate(floats(x)):
            for h, head in enumerate(item):
                for t, row in enumerate(head):
                    n = places[b][t]
                    sizes = [((2.0 * p / dim + gamma) / (1.0 + gamma)) ** (sign * n / scale_base) for p in pairs]
                    angles = [n * base ** (-2.0 * p / dim) for p in pairs]
                    out[b, h, t] = _turned(row, angles, layout, sizes=sizes)
        return out

    return Loops(q=each(q, positions, 1), k=each(k, key_positions, -1))


def rotated_inputs(x, heads, *, base=10000.0):
    """Hidden states (B, L, E), each of the H parts of a row turned by its position, before any projection.

    What wav2vec 2.0 Conformers (Gulati 2020; published code of 2022) do in their rotary mode.
    """
    out = np.empty(np.shape(x))
    for b, item in enumerate(floats(x)):
        for t, row in enumerate(item):
            size = len(row) // heads
            angles = [t * base ** (-2.0 * p / size) for p in range(size // 2)]
            parts = [_turned(row[h * size : (h + 1) * size], angles, "half") for h in range(heads)]
            out[b, t] = [value for part in parts for value in part]
    return out
