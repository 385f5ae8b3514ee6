"""Rotary positions as loops: any positions, several coordinates, frequencies per head, and xPos."""

import cmath

import numpy as np

from tests.naive.by_name import Loops, flat, witness
from tests.naive.seeds import floats, rotary


def _turned(vector, waves, layout, magnitude=1.0, sizes=None):
    """Pair p as a complex number times m s_p e^(i angle_p)."""
    out = list(vector)
    for p, angle in enumerate(waves):
        a, b = (p, p + len(waves)) if layout == "half" else (2 * p, 2 * p + 1)
        z = complex(vector[a], vector[b]) * magnitude * cmath.exp(1j * angle)
        z = z if sizes is None else z * sizes[p]
        out[a], out[b] = z.real, z.imag
    return out


def turns(q, k, at_query, at_key, waves, *, layout="half", magnitude=1.0):
    """The angle of pair p is the sum over axes a of t_a w[a][h][p] (Heo 2024, RoPE-Mixed; one axis: Su 2021).

    at_query (B, A, L_q) and at_key (B, A, L_k) are the coordinates; waves (A, H_kv, P), those of a key head for all
    the queries that read it.
    """
    waves = floats(waves)
    axes, kv_heads, pairs = len(waves), len(waves[0]), len(waves[0][0])

    def each(x, at):
        out = np.empty(np.shape(x))
        at = floats(at)
        for b, item in enumerate(floats(x)):
            for h, head in enumerate(item):
                g = h // (len(item) // kv_heads)
                for t, row in enumerate(head):
                    angles = [sum(at[b][a][t] * waves[a][g][p] for a in range(axes)) for p in range(pairs)]
                    out[b, h, t] = _turned(row, angles, layout, magnitude)
        return out

    return each(q, at_query), each(k, at_key)


@witness("rotary")
def rotary_of(q, k, dim, base, layout, frequencies, magnitude, positions, key_positions, offset, batch):
    """Positions i + M and j (Su 2021), or those that are given, as numbers or as coordinates (Heo 2024)."""
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
    return Loops(**dict(zip("qk", turns(q, k, here, there, waves, layout=layout, magnitude=magnitude), strict=True)))


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
