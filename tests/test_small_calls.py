"""How many functions of the package a small call goes through: what it does beside its kernel, in a number that is
the same on every machine. A call that goes through a tenth more takes longer, and the number here is to be raised
only for a reason.
"""

import sys
from pathlib import Path

import numpy as np
import pytest

import relpos_np as rp
from relpos_np._calls import repeated
from relpos_np.kernels._numba.launch import launcher

PACKAGE = str(Path(rp.__file__).parent)


def functions(call):
    """Functions of the package that a call goes through, but for comprehensions, in some versions of Python no
    functions, and with no kernel run.
    """
    found = []

    def count(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and code.co_name[0] != "<":
            found.append(code.co_qualname if hasattr(code, "co_qualname") else code.co_name)

    before = sys.getprofile()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launcher, "run", lambda *_: None)
        sys.setprofile(count)
        try:
            call()
        finally:
            sys.setprofile(before)
    return found


def of(rng, heads, *shape):
    return rng.standard_normal((heads, *shape)).astype(np.float32)


# By name: the position for two heads of 16 channels and a 4x4 grid, options, and functions of a call whose form is
# known, of a prepared one, and of one whose form has not been met.
CALLS = {
    "nothing": (lambda rng: None, {}, (24, 19, 57)),
    "a window of options": (lambda rng: None, {"causal": True, "window": 5, "scale": 1.0}, (27, 19, 60)),
    "T5": (lambda rng: rp.T5(of(rng, 32, 2)), {}, (30, 19, 69)),
    "ALiBi": (lambda rng: rp.ALiBi(), {"causal": True}, (31, 19, 71)),
    "KERPLE": (lambda rng: rp.KERPLE(np.ones(2), np.ones(2)), {}, (29, 19, 71)),
    "two schemes": (lambda rng: (rp.T5(of(rng, 32, 2)), rp.ALiBi()), {}, (38, 19, 79)),
    "Shaw": (lambda rng: rp.Shaw(of(rng, 9, 16), of(rng, 9, 16)), {}, (35, 22, 134)),
    "DeBERTa": (lambda rng: rp.DeBERTa(of(rng, 2, 16, 16), of(rng, 2, 16, 16)), {}, (58, 44, 146)),
    "Swin": (lambda rng: rp.WindowBias(of(rng, 49, 2), (4, 4)), {}, (48, 19, 72)),
    "Rotary": (lambda rng: rp.Rotary(), {}, (38, 19, 81)),
    "Transformer-XL": (
        lambda rng: rp.TransformerXL(of(rng, 2, 16), of(rng, 2, 16), of(rng, 16, 2, 16)),
        {},
        (44, 31, 129),
    ),
}


def ways(name, rng, monkeypatch):
    make, options, _ = CALLS[name]
    position = make(rng)
    q, k, v = rng.standard_normal((3, 1, 2, 16, 16)).astype(np.float32)
    monkeypatch.setattr(repeated, "_known", {})

    def call():
        return rp.attention(q, k, v, position=position, **options)

    for _ in range(4):
        call()
    known = len(functions(call))
    ready = rp.prepare(q, k, v, position=position, **options)
    ready(q, k, v)
    prepared = len(functions(lambda: ready(q, k, v)))
    monkeypatch.setattr(repeated, "form", lambda *_: None)
    call()
    return known, prepared, len(functions(call))


@pytest.mark.parametrize("name", CALLS)
def test_a_small_call_goes_through_few_functions(name, rng, monkeypatch):
    found = ways(name, rng, monkeypatch)
    assert all(n <= 1.1 * most for n, most in zip(found, CALLS[name][2], strict=True)), found
