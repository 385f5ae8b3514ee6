"""Attention at every shape: time, speed against the machine's limit, memory and error."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import ml_dtypes
import numpy as np

import relpos_np as rp

from .ceiling import fraction_of_fma, fraction_of_read
from .shapes import BACKWARD, SHAPES, TRACKED, Shape, as_mapping, case, lacking, make, small


def skip_without_means(shape):
    """Raise what asv takes for "skip this" where a shape cannot be computed here."""
    if reason := lacking(shape):
        raise NotImplementedError(reason)


class Attention:
    """All shapes on the default backend."""

    params = list(TRACKED)
    param_names = ["shape"]
    timeout = 120

    def setup(self, shape):
        skip_without_means(SHAPES[shape])
        self.case = case(shape)
        small(shape).attention()  # compiles the kernels or loads them

    def time_attention(self, shape):
        self.case.into_kept()

    def peakmem_attention(self, shape):
        self.case.attention()

    def track_fraction_of_fma(self, shape):
        """Operations of the products that are needed, per second, over those of the FMA loop."""
        return fraction_of_fma(self.case.into_kept, self.case.operations)

    track_fraction_of_fma.unit = "of the FMA loop"

    def track_error(self, shape):
        """Largest deviation from float64."""
        return self.case.error(self.case.attention())

    track_error.unit = "absolute"


class Backward:
    """attention_vjp, which includes the forward pass, on the default backend."""

    params = list(BACKWARD)
    param_names = ["shape"]
    timeout = 180

    def setup(self, shape):
        self.case = case(shape)
        small(shape).attention_vjp()

    def time_vjp(self, shape):
        self.case.attention_vjp()

    def peakmem_vjp(self, shape):
        self.case.attention_vjp()

    def track_fraction_of_fma(self, shape):
        """Operations of the products that are needed, per second, over those of the FMA loop."""
        return fraction_of_fma(self.case.attention_vjp, self.case.backward_operations)

    track_fraction_of_fma.unit = "of the FMA loop"

    def track_error(self, shape):
        """Largest deviation of a gradient from float64, in proportion to its largest entry; of at most 16 windows."""
        checked = make(replace(SHAPES[shape], batch=min(SHAPES[shape].batch, 16)))
        return checked.gradient_error(as_mapping(checked.attention_vjp()))

    track_error.unit = "relative"


class Decode:
    """One query, 32 heads of 128, ALiBi: bound by memory, so compared with reading the keys and values once."""

    params = [[512, 2048, 8192], ["float32", "bfloat16", "float16"]]
    param_names = ["keys", "dtype"]

    def setup(self, keys, dtype):
        shape = Shape("alibi", 1, 32, 1, keys, 128, "ALiBi, one query", storage=dtype)
        skip_without_means(shape)
        self.case = make(shape)
        self.case.attention()

    def time_decode(self, keys, dtype):
        self.case.attention()

    def track_fraction_of_read(self, keys, dtype):
        """Time to read the keys and values once over the time of the call."""
        return fraction_of_read(self.case.into_kept, (self.case.k, self.case.v))

    track_fraction_of_read.unit = "of a read"


class Overhead:
    """One query and one key: what a call costs beside its arithmetic."""

    params = ["plain", "t5"]
    param_names = ["scheme"]

    def setup(self, scheme):
        self.case = make(Shape("t5", 1, 1, 1, 1, 16, "T5 bias"))
        self.scheme = self.case.scheme if scheme == "t5" else None
        self.time_call(scheme)

    def time_call(self, scheme):
        rp.attention(self.case.q, self.case.k, self.case.v, position=self.scheme)


class Reference:
    """The NumPy backend, which must stay usable."""

    def setup(self):
        self.case = case("A")

    def time_numpy(self):
        self.case.attention(backend="numpy")


class StoredKeys:
    """One query of 32 heads and 16,384 keys of 128 channels, by how keys and values are stored."""

    params = ("bfloat16", "int8", "float8_e4m3fn")
    param_names = ["dtype"]
    timeout = 120

    def setup(self, dtype):
        rng = np.random.default_rng(0)
        q, k, v = (rng.standard_normal((32, n, 128), np.float32) for n in (1, 16384, 16384))
        if dtype == "bfloat16":
            self.operands = [x.astype(ml_dtypes.bfloat16) for x in (q, k, v)]
        else:
            self.operands = [q, rp.quantize(k, dtype), rp.quantize(v, dtype)]
        self.time_attention(dtype)  # compiles the kernel or loads it

    def time_attention(self, dtype):
        rp.attention(*self.operands, position=rp.ALiBi())


class Caches:
    """One query of 32 heads in each of 8 items, over 2,048 keys of 8 heads, by how heads and tokens lie in memory."""

    params = ("heads of tokens", "tokens of heads", "pages")
    param_names = ["layout"]
    timeout = 120

    def setup(self, layout):
        rng = np.random.default_rng(0)
        q = rng.standard_normal((8, 32, 1, 128), np.float32)
        k, v = rng.standard_normal((2, 8, 2048, 8, 128), np.float32)
        if layout == "pages":
            table = rng.permutation(1024).reshape(8, 128)
            pages = [x.reshape(1024, 16, 8, 128) for x in (k, v)]
            self.call = partial(rp.paged_attention, q, *pages, block_table=table, key_lengths=2048)
        else:
            keys = [x.swapaxes(1, 2) for x in (k, v)]
            lay = np.ascontiguousarray if layout == "heads of tokens" else np.asarray
            self.call = partial(rp.attention, q, *map(lay, keys))
        self.time_attention(layout)  # compiles the kernel or loads it

    def time_attention(self, layout):
        self.call(position=rp.ALiBi())
