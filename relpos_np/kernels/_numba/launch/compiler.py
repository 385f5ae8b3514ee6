"""Numba's compiler for kernels and for the functions that only kernels call.

Numba makes of each function machine code that Python can call, optimised with all that it calls, although a function
that only kernels call is never called so. Here such a part stays as it was lowered. A kernel links each of its parts
once, however many others call it, and is optimised as a whole, but for what takes long and gains nothing: kernels say
themselves which numbers are vectors, and what to do at once.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase
from numba.core.compiler_machinery import PassManager, register_pass
from numba.core.runtime import rtsys
from numba.core.typed_passes import (
    IRLegalization,
    NativeLowering,
    NoPythonBackend,
    NopythonTypeInference,
    PreLowerStripPhis,
)
from numba.core.untyped_passes import (
    DeadBranchPrune,
    FixupArgs,
    GenericRewrites,
    IRProcessing,
    ReconstructSSA,
    RewriteSemanticConstants,
    TranslateByteCode,
)

# Numba's passes up to lowering, without those for what no kernel has: closures, `with`, generators, parallel loops.
PASSES = (
    TranslateByteCode,
    FixupArgs,
    IRProcessing,
    RewriteSemanticConstants,
    DeadBranchPrune,
    GenericRewrites,
    ReconstructSSA,
    NopythonTypeInference,
    PreLowerStripPhis,
    IRLegalization,
)


# What LLVM takes for a function grows faster than its size: parts of more instructions are called, not made a part of
# what calls them. These do the work of whole tiles.
LARGEST_INLINED = 1000


class _NoEnvironment:
    """Takes the environment of a function that Python never calls."""

    def set_env(self, name: str, environment: Any) -> None:
        """Nothing would read it."""


class _Part(JITCodeLibrary):
    """What a part was lowered to, which is neither optimised nor made machine code."""

    def add_ir_module(self, ir_module: Any) -> None:
        """Take what a function was lowered to."""
        for function in ir_module.functions:
            if sum(len(block.instructions) for block in function.blocks) > LARGEST_INLINED:
                function.attributes.add("noinline")
        super().add_ir_module(ir_module)

    def _optimize_functions(self, ll_module: Any) -> None:
        """Leave this to the kernel, too."""

    def finalize(self) -> None:
        """Leave everything to the kernels that link it."""
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        """There is no machine code."""
        return 0

    @property
    def codegen(self) -> _NoEnvironment:
        """Where Numba puts the environment for Python."""
        return _NoEnvironment()


class _Kernel(JITCodeLibrary):
    """A kernel with all of its parts, and with theirs."""

    def finalize(self) -> None:
        """Link every part once, and optimise the whole."""
        linked: list[Any] = self._linking_libraries
        reached = dict.fromkeys(linked)
        waiting = list(reached)
        while waiting:
            part = waiting.pop()
            if isinstance(part, _Part):
                new = [own for own in part._linking_libraries if own not in reached]
                reached |= dict.fromkeys(new)
                waiting += new
        # Of Numba's runtime only what was called by then is linked: before the others, what they call would be missing,
        # and an entry of the cache that calls it cannot be loaded.
        reached.pop(rtsys.library, None)
        linked[:] = [*reached, rtsys.library]
        super().finalize()

    def _optimize_final_module(self) -> None:
        """Optimise in the knowledge that nobody else calls the parts: what is called once is then made a part of it."""
        for function in self._final_module.functions:
            if function.linkage == llvm.Linkage.linkonce_odr and not function.is_declaration:
                function.linkage = llvm.Linkage.internal
        builder = llvm.create_pass_builder(self._codegen._tm, _tuning())
        passes = builder.getModulePassManager()
        # Counts of references to what Python owns, which cancel out.
        passes.add_refprune_pass()
        # What is declared still is looked for when the machine code is loaded.
        passes.add_global_dead_code_eliminate_pass()
        passes.add_strip_dead_prototype_pass()
        passes.run(self._final_module, builder)


def _tuning() -> Any:
    """All optimisations but those that look for vectors, or do several rounds of a loop at once."""
    options = llvm.create_pipeline_tuning_options(3)
    options.loop_vectorization = options.loop_interleaving = options.slp_vectorization = options.loop_unrolling = False
    return options


@register_pass(mutates_CFG=True, analysis_only=False)
class _PartLowering(NativeLowering):
    _name = "relpos_np_part_lowering"

    def run_pass(self, state: Any) -> bool:
        state.library = _Part(state.targetctx.codegen(), state.func_id.func_qualname)
        return bool(super().run_pass(state))


@register_pass(mutates_CFG=True, analysis_only=False)
class _KernelLowering(NativeLowering):
    _name = "relpos_np_kernel_lowering"

    def run_pass(self, state: Any) -> bool:
        state.library = _Kernel(state.targetctx.codegen(), state.func_id.func_qualname)
        # For the cache on disk.
        state.library.enable_object_caching()
        return bool(super().run_pass(state))


def _compiler(lowering: type[NativeLowering]) -> type[CompilerBase]:
    """A compiler of these passes that ends with a way of lowering."""

    class Compiler(CompilerBase):
        def define_pipelines(self) -> list[PassManager]:
            passes = PassManager("kernels")
            for one in (*PASSES, lowering, NoPythonBackend):
                passes.add_pass(one, one.__name__)
            passes.finalize()
            return [passes]

    return Compiler


PartCompiler, KernelCompiler = _compiler(_PartLowering), _compiler(_KernelLowering)
