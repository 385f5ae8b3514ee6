"""Every kind of kernel once on a small shape, for compute-sanitizer: ``python -m gpu.small``."""

from __future__ import annotations

import os
import warnings

import numpy as np

import relpos_np as rp
from tests import fibers

from . import device


def main():
    """Forward, gradients, one query, rel_shift: sizes that no tile divides."""
    warnings.simplefilter("ignore")
    fibers.install()
    rng = np.random.default_rng(0)
    long, dim = (9, 4) if device.simulated() else (131, 64)

    def normal(*shape):
        return rng.standard_normal(shape, dtype=np.float32)

    q, k, v = (normal(2, 2, long, dim) for _ in range(3))
    calls = {
        "T5 bias": {"position": rp.T5(normal(32, 2))},
        "Shaw": {"position": rp.Shaw(normal(7, dim), normal(7, dim)), "causal": True},
        "Transformer-XL": {
            "position": rp.TransformerXL(normal(2, dim), normal(2, dim), normal(long, 2, dim)),
            "causal": True,
        },
    }
    for name, options in calls.items():
        out = rp.attention(q, k, v, backend="cuda", **options)
        found = rp.attention_vjp(q, k, v, grad_out=v, backend="cuda", **options)
        print(name, float(np.abs(out).max()), "gradient", float(np.abs(found.q).max()))
    os.environ["RELPOS_CUDA_UNIT"] = "mma"
    for name, options in calls.items():
        for precision in ("medium", "highest"):
            out = rp.attention(q, k, v, backend="cuda", precision=precision, **options)
            print(name, precision, "on matrix units", float(np.abs(out).max()))
    print("one query", float(np.abs(rp.attention(q[:, :, :1], k, v, backend="cuda")).max()))
    for variant in ("conformer", "transformer_xl"):
        print("rel_shift", variant, float(rp.rel_shift(normal(2, 5, 9), variant=variant, backend="cuda").max()))


if __name__ == "__main__":
    main()
