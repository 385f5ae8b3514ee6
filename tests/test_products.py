"""Products of pairs of bfloat16, by the unit of matrices as by pairs, and which of them an Arm processor gets."""

import json

import pytest
from numba.core import config

from relpos_np.kernels._numba.simd import target
from tests.processes import child


@pytest.mark.slow
def test_units_have_the_bits_of_their_emulation():
    """Each product is within what the rounding of its sum allows.

    BFMMLA adds two products of pairs, one after the other; tiles are compared where the processor has them.
    """
    made = {}
    for unit in ("emulated", "emulated mmla", "emulated tiles", *(("tiles",) if target.UNIT == "tiles" else ())):
        status, out, log = child("from tests import products; products.main()", bare=True, RELPOS_MATRIX_UNIT=unit)
        assert status == 0, log
        name, *made[unit], error = json.loads(out)
        assert name == unit
        assert error <= 1.0
    assert made["emulated"] == made["emulated mmla"]
    assert made.get("tiles", made["emulated tiles"]) == made["emulated tiles"]


FOUND = {"avx512bf16": True, "amx-bf16": True}


@pytest.mark.parametrize(
    ("features", "allowed", "unit"),
    [
        (FOUND, True, "tiles"),
        (FOUND, False, "dot"),
        ({"avx512bf16": True}, True, "dot"),
        # Gradients multiply pairs on vectors.
        ({"amx-bf16": True}, True, "none"),
        ({}, True, "none"),
    ],
)
def test_what_is_chosen_on_intel(features, allowed, unit, monkeypatch):
    """Tiles, if the processor has them and the system lets this process use them."""
    monkeypatch.delenv("RELPOS_MATRIX_UNIT", raising=False)
    monkeypatch.setattr(target, "TARGET", target.AVX512)
    monkeypatch.setattr(target, "host_features", lambda: features)
    monkeypatch.setattr(target, "_allows_tiles", lambda: allowed)
    assert target.detect_unit() == unit


@pytest.mark.parametrize(
    ("name", "said", "unit"),
    [
        ("neoverse-v1", 1 << 14, "mmla"),
        ("neoverse-n1", 0, "none"),
        ("neoverse-n1", ~(1 << 14) & 0xFFFFFFFF, "none"),
        # The compiler would not know the instruction.
        ("generic", 1 << 14, "none"),
    ],
)
def test_what_the_system_says_of_an_arm_processor(name, said, unit, monkeypatch):
    """LLVM lists no BF16 among what it finds on Arm."""

    class Library:
        def __init__(self, name):
            self.getauxval = lambda kind: said if kind == 26 else 0

    monkeypatch.delenv("RELPOS_MATRIX_UNIT", raising=False)
    # These may choose another processor than that of the machine.
    for setting in ("CPU_NAME", "CPU_FEATURES"):
        monkeypatch.setattr(config, setting, None)
    monkeypatch.setattr(target, "ARM", True)
    monkeypatch.setattr(target, "TARGET", target.NEON)
    monkeypatch.setattr(target.sys, "platform", "linux")
    monkeypatch.setattr(target.ctypes, "CDLL", Library)
    monkeypatch.setattr(target.llvm, "get_host_cpu_name", lambda: name)
    monkeypatch.setattr(target.llvm, "get_host_cpu_features", lambda: {"neon": True, "fp-armv8": True})
    assert target.detect_unit() == unit
    monkeypatch.setenv("RELPOS_MATRIX_UNIT", "mmla")
    if unit == "mmla":
        assert target.detect_unit() == "mmla"
    else:
        with pytest.raises(ValueError, match="one of auto, emulated tiles, emulated mmla, emulated, none here"):
            target.detect_unit()
