"""Rows 42, 44 and 46: compilers that may not assume, packages that are not there, and strict surroundings."""

import ast
import warnings
from pathlib import Path

import numpy as np
import pytest

import relpos_np as rp
from relpos_np.testing import example
from tests.every import ATTENTION
from tests.faults.operands import make
from tests.processes import ROOT, child

HOST = rp.backend.HOST_BACKENDS
PACKAGE = Path(rp.__file__).parent

# Row 42 ----------------------------------------------------------------------------------------------

# A multiplication and an addition may become one, and sums may be reordered: neither assumes anything of the numbers.
HARMLESS = {"contract", "reassoc"}
FLAGS = ("fast", "nnan", "ninf", "nsz", "arcp", "afn")


def test_row_42_no_kernel_asks_for_fast_arithmetic():
    """No flag that lets a compiler assume that there is no NaN or infinity."""
    for path in (PACKAGE / "kernels").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.keyword) and node.arg in ("fastmath", "flags"):
                assert set(ast.literal_eval(node.value)) <= HARMLESS, (path, node.lineno)


@pytest.mark.stress
@pytest.mark.parametrize(
    "name", ["attention float32", "windows float32", "products float32", "backward float32", "decoding float32"]
)
def test_row_42_no_instruction_is_fast(name):
    """In what Numba hands to LLVM, and in what LLVM makes of it."""
    pytest.importorskip("numba")
    from relpos_np.kernels import _numba

    compiled = _numba.KERNELS[name]._compile()
    lines = [x for x in compiled.inspect_llvm().splitlines() if " = f" in x or " = call" in x or " = tail call" in x]
    assert any("fmul" in line or "llvm.fma" in line for line in lines)
    assert not [line for line in lines if set(line.replace("(", " ").split()) & set(FLAGS)]


# Row 44 ----------------------------------------------------------------------------------------------

OPTIONAL = {
    "numba", "llvmlite", "scipy", "matplotlib", "rich", "safetensors", "ml_dtypes", "dask", "distributed", "jax",
    "torch", "transformers", "cuda",
}  # fmt: skip


def without(*names):
    """Code that makes packages unimportable, and operands."""
    return (
        "class Blocked:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.partition('.')[0] in {set(names)!r}:\n"
        "            raise ImportError(f'{name} is blocked')\n"
        "sys.meta_path.insert(0, Blocked())\n"
        "q, k, v = rng.standard_normal((3, 2, 5, 4))\n"
    )


def printed(code, *options, **environment):
    status, out, log = child(code, *options, **environment)
    assert status == 0, log[-2000:]
    return out


@pytest.mark.slow
def test_row_44_everything_in_numpy_works_without_any_other_package():
    """Every scheme, its gradients, formulas, layers and encodings on both dense backends."""
    code = without(*OPTIONAL) + (
        "from relpos_np import layers, testing\n"
        "for name, info in rp.SCHEMES.items():\n"
        "    e = testing.example(name, size='tiny')\n"
        "    for backend in ('numpy', 'terms'):\n"
        "        assert e.error(*e.run(backend)) <= 1, name\n"
        "        rp.logits(e.q, e.k, position=e.position, backend=backend, **e.kwargs)\n"
        "        rp.attention_vjp(e.q, e.k, e.v, grad_out=np.ones((*e.q.shape[:-1], e.v.shape[-1]), 'f4'),\n"
        "                         position=e.position, backend=backend, **e.kwargs)\n"
        "        rp.rel_shift(q, variant='conformer', backend=backend)\n"
        "rp.logits(q, k)\n"
        "rp.show_versions()\n"
        "rp.set_backend('numpy')\n"
        "w = np.eye(4)\n"
        "assert np.isfinite(layers.MultiHeadAttention(w, w, w, heads=2)(q)).all()\n"
        "assert not {'numba', 'scipy', 'torch', 'jax'} & {m.partition('.')[0] for m in sys.modules}\n"
        "print('ok')"
    )
    assert printed(code).endswith("ok\n")
    chosen = without(*OPTIONAL) + "rp.attention(q, k, v); print('ok')"
    assert printed(chosen, RELPOS_BACKEND="numpy") == "ok\n"


# The packages that are missing, and calls with the words of their remedy.
NEEDS = {
    ("numba",): {
        "rp.attention(q, k, v)": ["pip install numba", "backend='numpy'"],
        "rp.attention_vjp(q, k, v, grad_out=v)": ["pip install numba"],
        "rp.rel_shift(q[..., :4, :])": ["pip install numba", "backend='numpy'"],
        "rp.attention(q, k, v, backend='cuda')": ['pip install "relpos-np[cuda]"'],
    },
    ("llvmlite",): {"rp.attention(q, k, v, backend='numba')": ["pip install numba"]},
    ("onnx", "gguf", "safetensors", "matplotlib", "dask", "jax", "torch", "threadpoolctl", "transformers"): {
        "rp.to_onnx(None, q=(1, 2, 3, 4), k=(1, 2, 3, 4), v=(1, 2, 3, 4))": ['pip install "relpos-np[onnx]"'],
        "rp.from_config('a.gguf', layer=0)": ["pip install", "relpos-np[gguf]"],
        "from relpos_np.testing import files; files.safetensors({})": ["pip install", "safetensors"],
        "from relpos_np import plot; plot.new_figure(2, 2)": ['"relpos-np[plot]"'],
        "from relpos_np import distributed; distributed.attention(q, k, v)": ["pip install", "dask"],
        "import relpos_np.interop.jax": ["relpos_np.interop.jax cannot import", "pip install jax"],
        "import relpos_np.interop.torch": ["relpos_np.interop.torch cannot import", "pip install torch"],
        "rp.set_num_threads(1)": ['pip install "relpos-np[threads]"', "blas=False"],
        "import relpos_np.interop.transformers": ["relpos_np.interop.torch cannot import", "pip install torch"],
    },
}


@pytest.mark.parametrize("missing", NEEDS, ids=" ".join)
def test_row_44_what_is_missing_is_named_with_its_remedy(missing):
    """And what needs nothing works on afterwards."""
    code = without(*missing) + "".join(
        f"try:\n    {call}\nexcept rp.RelposImportError as error:\n    print(repr(str(error)))\n"
        "assert np.isfinite(rp.attention(q, k, v, backend='numpy')).all()\n"
        for call in NEEDS[missing]
    )
    for words, said in zip(NEEDS[missing].values(), printed(code).splitlines(), strict=True):
        assert all(word in ast.literal_eval(said) for word in words), said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "value", "remedy"),
    [
        ("NUMBA_DISABLE_JIT", "1", "unset it before Python starts"),
        ("NUMBA_THREADING_LAYER", "no such layer", "unset NUMBA_THREADING_LAYER"),
    ],
)
def test_row_44_settings_of_numba_that_leave_no_kernels(setting, value, remedy):
    code = (
        "q = rng.standard_normal((1, 2, 64, 8))\n"
        "try:\n    rp.attention(q, q, q, backend='numba')\nexcept rp.RelposImportError as error:\n    print(error)\n"
        "assert np.isfinite(rp.attention(q, q, q, backend='numpy')).all()\n"
    )
    status, said, log = child(code, **{setting: value})
    assert status == 0, log
    assert setting in said
    assert remedy in said


def test_row_44_every_extra_is_here():
    """A new one must name its remedy as well; without rich the command line prints plain text (tests/test_cli.py)."""
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    tools = {"cli", "dev", "docs", "fuzz", "parity", "test"}
    packages = {"plot": "matplotlib", "threads": "threadpoolctl", "cuda": "numba"}
    missing = {name for names in NEEDS for name in names}
    named = {extra for extra in extras if packages.get(extra, extra) in missing}
    assert set(extras) - tools <= named, set(extras) - tools - named


# Row 46 ----------------------------------------------------------------------------------------------


def answers(one, backend, grad_seed=0):
    """Everything that is computed of an example, as arrays."""
    grad = np.random.default_rng(grad_seed).standard_normal((*one.q.shape[:-1], one.v.shape[-1])).astype(one.q.dtype)
    options = {"position": one.position, "backend": backend, **one.kwargs}
    gradient = rp.attention_vjp(one.q, one.k, one.v, grad_out=grad, **options)
    found = [*rp.attention(one.q, one.k, one.v, **options, return_lse=True), gradient.q, gradient.k, gradient.v]
    return [*found, *gradient.position.values(), rp.logits(one.q, one.k, **options)]


def same_when_strict(call):
    """Every floating point exception raises and every warning is an error: no bit differs from the lenient run."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = call()
    with np.errstate(all="raise"), warnings.catch_warnings():
        warnings.simplefilter("error")
        found = call()
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("backend", HOST)
@pytest.mark.parametrize(("name", "variant"), ATTENTION)
def test_row_46_strict_floating_point_changes_nothing(name, variant, backend):
    """Every scheme and variant, forward and backward, with probabilities and gradients that underflow."""
    one = example(name, variant=variant, dtype="float32", size="tiny")
    same_when_strict(lambda: answers(one, backend))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_row_46_strict_floating_point_in_masked_rows(dtype, backend, rng):
    length = 12 if backend == "cuda" else 70
    q, k, v = make(rng, dtype, q_len=length, k_len=length)
    q *= 30  # probabilities underflow
    options = {"causal": True, "mask": np.where(rng.random((length, length)) < 0.3, dtype(-np.inf), dtype(1))}
    same_when_strict(lambda: list(rp.attention(q, k, v, **options, backend=backend, return_lse=True)))


def test_row_46_strict_floating_point_in_encodings_and_layers(rng):
    from relpos_np import layers

    x, w = rng.standard_normal((2, 16, 8)), rng.standard_normal((8, 8))
    u = rng.standard_normal((2, 4))
    made = [
        *(rp.Sinusoidal(8, layout=layout) for layout in ("interleaved", "concatenated")),
        rp.LearnedAbsolute(rng.standard_normal((16, 8))),
        layers.Linear(w, w[0]),
        layers.PositionalEncoding(rp.Sinusoidal(8)),
        *(layers.MultiHeadAttention(w, w, w, w, heads=2, position=p) for p in (None, rp.ALiBi(heads=2), rp.Rotary())),
    ]
    relative = layers.RelativeMultiHeadAttention(w, w, w, pos=w, content_bias=u, position_bias=u, variant="conformer")
    encoding = layers.RelativePositionalEncoding(8, variant="conformer")
    same_when_strict(lambda: [relative(x, pos_emb=encoding(x)[1])])
    swin = layers.SwinAttention(8, (2, 2), 2, shift_size=(1, 1), rng=np.random.default_rng(0), dtype=np.float64)
    same_when_strict(lambda: [swin(x.reshape(2, 4, 4, 8))])
    for layer in made:
        # Half precision has no room for the smallest of these numbers.
        for given in (x, (1e-4 * x).astype(np.float16)):
            same_when_strict(lambda layer=layer, given=given: [np.asarray(layer(given))])


def test_row_46_strict_floating_point_in_functions(rng):
    """Formulas as plain functions on arrays, with exponentials and products that become 0."""
    from relpos_np import layers, reference

    x, w, tiny = rng.standard_normal((2, 9, 8)), rng.standard_normal((8, 8)), np.full((2, 9, 8), 1e-7, np.float16)
    curves = np.full((2, 4), 1.0), np.full((2, 4), 40.0), np.full((2, 4), 0.0)
    gate = (rng.standard_normal((8, 4)), rng.standard_normal(8), np.ones(2))
    table = np.full((25, 2), 1e-7, np.float16)
    for call in (
        lambda: [reference.self_attention(40 * x, w, w, w)],
        lambda: [reference.self_attention_sums(40 * x[0], w, w, w)],
        lambda: [reference.shaw_attention(40 * x, x, x, w[1:], w[1:])],
        lambda: [reference.tisa_bias(*curves, 5, 90)],
        lambda: [reference.wavlm_gate(1e3 * x, *gate)],
        lambda: list(reference.wavlm_gate_vjp(1e3 * x, *gate, np.ones((2, 2, 9))).values()),
        lambda: [reference.rotate_inputs(tiny, 2)],
        lambda: [reference.resize_table(table, (3, 3), (5, 5))],
        lambda: [layers.truncated_normal(np.random.default_rng(0), (64,), std=1e-7, dtype=np.float16)],
    ):
        same_when_strict(call)


@pytest.mark.parametrize("backend", ["terms", "numba"])
def test_row_46_strict_floating_point_in_parts_and_counts(backend, rng):
    """What schemes are lowered to for a part of a call, where exponentials become 0."""
    from relpos_np.complexity import attention_operations
    from relpos_np.distributed import partial

    q, k, v = make(rng, np.float32, q_len=9, k_len=70)
    narrow = rp.TISA(*(np.full((5, q.shape[-3]), x, np.float32) for x in (1.0, 40.0, 3.0)))
    same_when_strict(lambda: partial(q, k, v, position=narrow, backend=backend, queries=(3, 20), keys=(2, 90)))
    sizes = {"batch": 1, "heads": q.shape[-3], "q_len": 9, "k_len": 70, "head_dim": q.shape[-1], "v_dim": 8}
    same_when_strict(lambda: [attention_operations(**sizes, scheme=narrow)])


DIGEST = """
import hashlib
from relpos_np import testing
from relpos_np.testing import sweep
np.seterr(all="raise")
found = hashlib.sha256()
for name, variant in sweep.parts():
    e = testing.example(name, variant=variant, size="tiny")
    for backend in rp.backend.HOST_BACKENDS if e.encoding is None else ("numpy",):
        for x in e.run(backend):
            found.update(x.tobytes())
        grad = rp.attention_vjp(e.q, e.k, e.v, grad_out=np.ones((*e.q.shape[:-1], e.v.shape[-1]), "f4"),
                                position=e.position, backend=backend, **e.kwargs)
        for x in (grad.q, grad.k, grad.v, *grad.position.values()):
            found.update(x.tobytes())
print(found.hexdigest())
"""


@pytest.mark.slow
def test_row_46_hash_seed_locale_and_strictness_change_no_bits():
    """Every scheme and variant on every backend of the host, in processes that differ in all of these."""
    ways = (
        ((), {"PYTHONHASHSEED": "0", "LC_ALL": "C", "PYTHONUTF8": "0"}),
        (("-W", "error"), {"PYTHONHASHSEED": "7", "LC_ALL": "C.UTF-8", "LANG": "de_DE.UTF-8", "TZ": "Asia/Tokyo"}),
    )
    assert len({printed(DIGEST, *options, **environment) for options, environment in ways}) == 1


@pytest.mark.slow
def test_row_46_the_same_bits_with_assertions_removed():
    """python -O: nothing that matters is checked by assert."""
    code = "q = rng.standard_normal((2, 5, 4)); rp.set_backend('numpy'); "
    code += "print(rp.attention(q, q, q, position=rp.Rotary()).tobytes().hex())"
    assert printed(code) == printed(code, "-O")
    for bad in ("rp.attention(q, q, q[:1])", "rp.reference.t5_bucket(np.arange(3), rounding='bogus')"):
        asked = f"\ntry: {bad}\nexcept rp.RelposValueError: print('refused')"
        assert printed(code + asked, "-OO").endswith("refused\n")
