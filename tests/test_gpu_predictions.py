"""The interpreter of machine code and the model of an H100, on machine code written by hand."""

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
NOTHING = 0x000FC20000000F00


@pytest.fixture(scope="module", autouse=True)
def path():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "asv_bench"))
        yield
        # Other tests import these names from the same place.
        assert str(ROOT / "asv_bench") in sys.path


@pytest.fixture(scope="module")
def gpu(path):
    return SimpleNamespace(**{name: importlib.import_module(f"gpu.{name}") for name in ("sass", "machine", "page")})


def listing(*lines):
    """What nvdisasm would print: labels as they are, instructions with words that make each stall for one cycle."""
    text, at = [".text.kernel:"], 0
    for line in lines:
        if line.startswith(".L"):
            text.append(line + ":")
            continue
        words, _, word = line.partition(" # ")
        upper = int(word, 16) if word else NOTHING
        text.append(f"        /*{at:04x}*/   {words} ;   /* 0x0000000000000000 */")
        text.append(f"                                /* 0x{upper:016x} */")
        at += 16
    return "\n".join(text)


def run(gpu, lines, parameters=b"", threads=32, memory=None, block=0):
    program = gpu.sass.read(listing(*lines))
    one = gpu.machine.Block(program, parameters, memory or gpu.machine.Memory(), (1, threads), block)
    one.run()
    return one


def test_a_listing_is_read_with_what_the_assembler_scheduled(gpu):
    # Stall 5, write to scoreboard 2, wait for scoreboards 0 and 3.
    word = (0b001001 << 52) | (7 << 49) | (2 << 46) | (5 << 41)
    program = gpu.sass.read(listing(f"@!P0 LDG.E.128 R4, desc[UR4][R2.64+0x10] # {word:x}", ".L_x_1", "BRA `(.L_x_1)"))
    first, second = program.instructions
    assert first.predicate == (False, "P0")
    assert (first.name, first.base) == ("LDG.E.128", "LDG")
    assert first.operands == ["R4", "desc[UR4][R2.64+0x10]"]
    assert (first.stall, first.writes, first.reads, first.waits) == (5, 2, None, (0, 3))
    assert (second.place, program.labels[".L_x_1"]) == (1, 1)
    with pytest.raises(ValueError, match="no instruction"):
        gpu.sass.read("nothing")


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        ("IADD3 R3, R1, -R2, RZ", lambda a, b: a - b),
        ("IMAD R3, R1, R2, 0x7", lambda a, b: a * b + np.uint32(7)),
        ("IMAD.HI.U32 R3, R1, R2, RZ", lambda a, b: ((a.astype("u8") * b) >> np.uint64(32)).astype("u4")),
        ("LEA R3, R1, R2, 0x3", lambda a, b: (a << np.uint32(3)) + b),
        ("LEA.HI R3, R1, R2, RZ, 0x7", lambda a, b: (a >> np.uint32(25)) + b),
        ("SHF.R.S32.HI R3, RZ, 0x1f, R1", lambda a, b: (a.view("i4") >> 31).view("u4")),
        ("SHF.R.U64 R3, R1, 0x6, R2", lambda a, b: (a >> np.uint32(6)) | (b << np.uint32(26))),
        ("SHF.L.U64.HI R3, R1, 0x3, R2", lambda a, b: (a >> np.uint32(29)) | (b << np.uint32(3))),
        ("LOP3.LUT R3, R1, R2, RZ, 0x3c, !PT", lambda a, b: a ^ b),
        ("FADD R3, R1, -R2", lambda a, b: (a.view("f4") - b.view("f4")).view("u4")),
        ("FFMA R3, R1, R2, 1.5", lambda a, b: (a.view("f4").astype("f8") * b.view("f4") + 1.5).astype("f4").view("u4")),
        ("HFMA2.MMA R3, -RZ, RZ, 1.875, 0", lambda a, b: np.full_like(a, 0x3F800000)),
    ],
)
def test_what_instructions_mean(gpu, rng, instruction, expected):
    a, b = rng.integers(0, 1 << 32, (2, 32), dtype=np.uint32)
    if instruction.startswith("F"):
        a, b = (rng.standard_normal(32).astype(np.float32).view(np.uint32) for _ in range(2))
    program = gpu.sass.read(listing(instruction, "EXIT"))
    one = gpu.machine.Block(program, b"", gpu.machine.Memory(), (1, 32), 0)
    one.registers[1], one.registers[2] = a, b
    one.run()
    np.testing.assert_array_equal(one.registers[3], expected(a, b))


def test_sums_and_comparisons_of_64_bits(gpu, rng):
    a, b = rng.integers(-(1 << 40), 1 << 40, (2, 64))
    a[:8] = b[:8]
    b[8:16] = a[8:16] + 1
    lines = (
        "IADD3 R6, P0, R1, -R3, RZ", "IADD3.X R7, R2, ~R4, RZ, P0, !PT", "ISETP.GE.U32.AND P1, PT, R1, R3, PT",
        "ISETP.GE.AND.EX P1, PT, R2, R4, PT, P1", "SEL R8, RZ, 0x1, !P1", "EXIT",
    )  # fmt: skip
    program = gpu.sass.read(listing(*lines))
    one = gpu.machine.Block(program, b"", gpu.machine.Memory(), (1, 64), 0)
    one.registers[1:3], one.registers[3:5] = (x.view(np.uint64).view(np.uint32).reshape(-1, 2).T for x in (a, b))
    one.run()
    difference = one.registers[6].astype(np.uint64) | (one.registers[7].astype(np.uint64) << np.uint64(32))
    np.testing.assert_array_equal(difference.view(np.int64), a - b)
    np.testing.assert_array_equal(one.registers[8], a >= b)


def test_a_block_with_a_loop_a_barrier_and_threads_that_part(gpu, rng):
    """Each thread adds its neighbour's number, through shared memory, as often as its number modulo 3 says, plus 1."""
    x, out = rng.integers(0, 100, 64, dtype=np.uint32), np.zeros(64, np.uint32)
    memory = gpu.machine.Memory()
    addresses = np.array([memory.add(x), memory.add(out)], np.int64).tobytes()
    lines = (
        "S2R R0, SR_TID.X", "ULDC.64 UR4, c[0x0][0x210]", "IMAD.U32 R2, RZ, RZ, UR4", "IMAD.U32 R3, RZ, RZ, UR5",
        "IMAD.WIDE.U32 R2, R0, 0x4, R2", "LDG.E R4, desc[UR6][R2.64]", "IMAD.SHL.U32 R5, R0, 0x4, RZ",
        "STS [R5+0x400], R4", "BAR.SYNC.DEFER_BLOCKING 0x0", "VIADD R6, R0, 0x1",
        "LOP3.LUT R6, R6, 0x3f, RZ, 0xc0, !PT",
        "IMAD.SHL.U32 R6, R6, 0x4, RZ", "LDS R7, [R6+0x400]", "IMAD R8, R0, 0x55555556, RZ",
        "IMAD.HI.U32 R8, R0, 0x55555556, RZ", "IMAD R8, R8, -0x3, R0", ".L_x_0", "IMAD.IADD R4, R4, 0x1, R7",
        "ISETP.NE.AND P0, PT, R8, RZ, PT", "VIADD R8, R8, 0xffffffff", "@P0 BRA `(.L_x_0)", "LDC.64 R10, c[0x0][0x218]",
        "LEA R12, P1, R0, R10, 0x2", "LEA.HI.X R13, R0, R11, RZ, 0x2, P1", "STG.E desc[UR6][R12.64], R4", "EXIT",
    )  # fmt: skip
    one = run(gpu, lines, addresses, 64, memory)
    np.testing.assert_array_equal(out, x + np.roll(x, -1) * (np.arange(64, dtype=np.uint32) % 3 + 1))
    assert one.trace.barriers == 1
    # 64 numbers of 4 bytes are 8 sectors, read once and written once; neighbours are in different banks.
    assert one.trace.sectors == 16
    assert (one.trace.turns_least, one.trace.turns_most) == (4, 4)
    # Two warps go round the loop three times.
    assert one.trace.issued[17] == 6


def test_an_access_outside_of_every_array_is_refused(gpu):
    memory = gpu.machine.Memory()
    start = memory.add(np.zeros(4, np.uint32))
    lines = ("LDC.64 R2, c[0x0][0x210]", "LDG.E R4, desc[UR4][R2.64+0x10]", "EXIT")
    with pytest.raises(IndexError, match="outside of every array"):
        run(gpu, lines, np.int64(start).tobytes(), memory=memory)


def test_clocks_wait_for_memory_where_the_assembler_says_so(gpu):
    load = (7 << 49) | (0 << 46) | (1 << 41)
    use = (0b000001 << 52) | (7 << 49) | (7 << 46) | (4 << 41)
    lines = (f"LDS R1, [RZ+0x400] # {load:x}", f"VIADD R1, R1, 0x1 # {use:x}", "EXIT")
    one = run(gpu, lines)
    assert one.trace.cycles == gpu.machine.LATENCY["LDS"] + 4 + 1


@pytest.mark.parametrize(
    ("addresses", "size", "expected"),
    [
        (np.arange(32) * 4, 4, (1, 1)), (np.zeros(32, int), 4, (1, 1)), (np.arange(32) * 128, 4, (32, 32)),
        (np.arange(32) * 8, 8, (2, 2)), (np.arange(32) * 16, 16, (4, 4)), (np.arange(32) // 8 * 16, 16, (1, 4)),
    ],
)  # fmt: skip
def test_turns_of_shared_memory(gpu, addresses, size, expected):
    assert gpu.machine.conflicts(addresses, size, np.zeros(32, int)) == expected


def test_limits_of_blocks_together(gpu):
    predict = importlib.import_module("gpu.predict")
    block = dict.fromkeys(predict.FIELDS, 0.0) | {"issue": 100.0, "fma": 80.0, "alone": 300.0}
    block |= {"shared least": 50.0, "shared most": 200.0}
    values = [block[name] for name in predict.FIELDS]
    assert predict.together(values, 1) == (300.0, 300.0, "issue")
    assert predict.together(values, 4) == (400.0, 900.0, "issue")
    launch, code = SimpleNamespace(threads=64), SimpleNamespace(registers=223, shared=45448)
    assert predict.resident(launch, code) == (4, "registers")
    # 132 multiprocessors with four blocks each: half of a round takes as long as two blocks on each.
    low, high, bound, used, limit = predict.seconds(launch, code, [np.array(values)], [132 * 2])
    assert (used, limit, bound) == (2, "few blocks", "latency")
    assert low == pytest.approx(300 / 1.98e9)
    assert high == pytest.approx(500 / 1.98e9)


def test_tiles_under_a_causal_mask():
    predict, shapes = (importlib.import_module(name) for name in ("gpu.predict", "benchmarks.shapes"))
    assert predict.tiles_of(shapes.SHAPES["F"]) == [9, 10, 11, 12, 13, 14, 15, 16]
    assert predict.tiles_of(shapes.SHAPES["A"]) == [8] * 8


def record(kernels):
    """A record of predictions with round numbers."""
    launch = {
        "kernel": "attend", "blocks": 8, "threads": 64, "registers": 223, "shared": 45448, "resident": 4,
        "limit": "registers", "bound": "issue", "per": "tile", "ms": [1.0, 2.0],
        "cycles": dict.fromkeys(importlib.import_module("gpu.predict").FIELDS, 7.0),
    }  # fmt: skip
    rows = {
        "t5-2048": {
            "task": "attention", "words": "T5 bias", "shape": [4, 16, 2048, 2048, 64], "dtype": "float32",
            "launches": [launch, launch | {"kernel": "merge", "ms": [0.05, 0.05]}], "ms": [1.0, 2.0],
            "tflops": [25.0, 50.0], "memory_ms": 0.1, "error": 3e-7,
        },
        "rel_shift-conformer": {
            "task": "rel_shift", "words": "general form", "shape": [16, 2048, 4095], "dtype": "float32",
            "launches": [launch], "ms": [1.5, 2.0], "gbs": [2000.0, 3000.0], "memory_ms": 1.5, "error": 0.0,
        },
    }  # fmt: skip
    device = importlib.import_module("gpu.predict").H100
    return {"device": device, "kernels": kernels, "rows": rows}


def test_the_page_says_what_is_predicted_and_what_goals_ask_for(gpu, tmp_path):
    forecast = importlib.import_module("gpu.forecast")
    path = tmp_path / "h100.json"
    path.write_text(json.dumps(record("now")), encoding="utf-8")
    text = forecast.section("now", path)
    assert "1 to 2 | 25 to 50 TFLOP/s | issue" in text
    # As fast as torch's, three times as fast as flex_attention, 30 TFLOP/s.
    assert "torch sdpa ≥ 1 to 2 ms; torch flex ≥ 3 to 6 ms; ≥ 30 TFLOP/s: possible" in text
    assert "1.5 to 2 | 2000 to 3000 GB/s | memory | copy ≥ 1.27 to 1.7 ms" in text
    # A kernel that takes less than a tenth is left out.
    assert text.count("| attend") == 2
    assert "merge" not in text
    assert "by 3e-07 in float32 at most" in text
    assert "Stale" not in text
    assert forecast.section("later", path).startswith("**Stale")
    assert "predict.py" in forecast.section("now", tmp_path / "none.json")
