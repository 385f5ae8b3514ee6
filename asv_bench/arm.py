"""Predict the inner loops' speed on Arm cores that nobody here has: ``python asv_bench/arm.py --out FILE``.

The register tiles are compiled for each core, and llvm-mca (of LLVM 17 or later) counts the cycles of their inner
loops as if all operands lay in the first cache. These are predictions of a model of the core, and no measurements.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

HERE = Path(__file__).parent
CORES = {"neoverse-v1": "Neoverse V1", "neoverse-v2": "Neoverse V2", "apple-m1": "Apple M1"}
# Floating-point operations of one instruction of a loop, by its name.
OPERATIONS = {"fmla": 8, "bfdot": 16, "bfmmla": 32}
# Units that multiply pairs of bfloat16, and how a loop by each of them is called.
UNITS = {"dot": "BFDOT", "mmla": "BFMMLA"}
# Intrinsics of tiles.py by what they compute; their arguments but for the pointers are integers, and a factor.
TILES = {
    "scores, float32": ("_score_plain", "pipipiii"),
    "values, float32": ("_accumulate", "pipipipiii"),
    "scores, bfloat16": ("_pairs_plain", "pipipiiif"),
    "values, bfloat16": ("_accumulate_pairs", "pipipipiii"),
}


def assembly(core):
    """Machine code of every tile for a core, in this process, whose environment says that it is one."""
    import llvmlite.binding as llvm
    from llvmlite import ir

    from relpos_np.kernels._numba.simd import tiles

    module = ir.Module()
    module.triple = "aarch64-unknown-linux-gnu"
    kinds = {"p": ir.FloatType().as_pointer(), "i": ir.IntType(64), "f": ir.FloatType()}
    context = SimpleNamespace(get_dummy_value=lambda: None)
    signature = SimpleNamespace(args=[SimpleNamespace(dtype=SimpleNamespace(bitwidth=32))])
    for name, (intrinsic, letters) in TILES.items():
        kind = ir.FunctionType(ir.VoidType(), [kinds[letter] for letter in letters])
        function = ir.Function(module, kind, name.replace(", ", "_"))
        builder = ir.IRBuilder(function.append_basic_block())
        getattr(tiles, intrinsic)(context, builder, signature, list(function.args))
        builder.ret_void()
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    parsed = llvm.parse_assembly(str(module))
    target = llvm.Target.from_triple(module.triple)
    machine = target.create_target_machine(cpu=core, features="+neon,+bf16", opt=3)
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    passes.getModulePassManager().run(parsed, passes)
    return machine.emit_assembly(parsed)


def loops(code):
    """The innermost loop of every tile: the block with the most products that jumps back to itself."""
    found = {}
    for part in re.split(r"\n(?=\w+:)", code):
        name = part.partition(":")[0].strip().replace("_", ", ")
        blocks = re.split(r"\n(?=\.LBB)", part)
        own = [
            block for block in blocks if re.search(rf"\tb\.\w+\t{re.escape(block.partition(':')[0])}\n", block + "\n")
        ]
        if name in TILES and own:
            found[name] = max(own, key=lambda block: sum(block.count(f"\t{word}\t") for word in OPERATIONS))
    return found


def predicted(core, block, mca):
    """What llvm-mca says of a loop: cycles of one turn, and operations of one cycle."""
    lines = [line for line in block.splitlines()[1:] if not line.lstrip().startswith((".", "//"))]
    command = [mca, "--mtriple=aarch64", f"--mcpu={core}", "--mattr=+bf16", "--iterations=200"]
    said = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True, check=True).stdout
    cycles = int(re.search(r"Total Cycles:\s+(\d+)", said)[1]) / 200
    operations = sum(count * block.count(f"\t{word}\t") for word, count in OPERATIONS.items())
    return {"cycles": cycles, "instructions": len(lines), "operations_per_cycle": operations / cycles}


def compiled(core):
    """The loops for a core by name, those of bfloat16 once for each unit that it has."""
    made = {unit: _compiled(core, unit) for unit in UNITS}
    found = {name: block for name, block in made["dot"].items() if "bfloat16" not in name}
    for unit, name in UNITS.items():
        found |= {f"{loop}, {name}": block for loop, block in made[unit].items() if "bfloat16" in loop}
    return found


def _compiled(core, unit):
    """The loops for a core and a unit, from a process that takes this machine for one."""
    environment = os.environ | {"NUMBA_CPU_NAME": core, "NUMBA_CPU_FEATURES": "+neon,+bf16", "RELPOS_MATRIX_UNIT": unit}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, __file__, "--compile", core]
    run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return loops(run.stdout)


def main(argv=None):
    """Predict, print, record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", metavar="CORE", help="print the machine code and end")
    parser.add_argument("--mca", default="llvm-mca", help="the program")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(argv)
    if arguments.compile:
        print(assembly(arguments.compile))
        return None
    if not shutil.which(arguments.mca):
        parser.error(f"{arguments.mca}: not found; it comes with LLVM, as Debian's package llvm")
    version = subprocess.run([arguments.mca, "--version"], capture_output=True, text=True, check=True).stdout
    record = {"tool": " ".join(re.search(r"LLVM version \S+", version)[0].split()), "cores": {}}
    for core in CORES:
        record["cores"][core] = {name: predicted(core, block, arguments.mca) for name, block in compiled(core).items()}
    text = json.dumps(record, indent=1) + "\n"
    print(text, end="")
    if arguments.out:
        arguments.out.write_text(text, encoding="utf-8")
    return record


if __name__ == "__main__":
    main()
