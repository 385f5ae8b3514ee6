"""Bad calls: each raises this library's error, of the kind Python callers expect, naming the argument and its fault."""

import inspect
import re

import numpy as np
import pytest

import relpos_np as rp
from relpos_np._contract import formula as edge

F = np.float64


def a(*shape, dtype=F):
    return np.ones(shape, dtype)


Q, K, V = a(2, 4, 5, 8), a(2, 2, 7, 8), a(2, 2, 7, 6)
T5_TABLE = a(32, 4)


def foreign(module, name):
    """An array of another package, as far as its class says so."""
    return type(name, (), {"__module__": module})()


def call(q=Q, k=K, v=V, **options):
    return lambda: rp.attention(q, k, v, **options)


def ragged():
    out = np.empty(2, object)
    out[:] = [[1.0], [1.0, 2.0]]
    return out


def odd(kind):
    class Other:
        pass

    return Other() if kind else np.array([Other()])


# name: (call, kind, what the message holds besides the argument's name). The first word of the name is the argument.
BAD = {
    # q, k, v: what they are
    "q: list": (call(q=Q.tolist()), TypeError, ["list", "np.asarray"]),
    "k: tuple": (call(k=((1.0,),)), TypeError, ["tuple"]),
    "v: None": (call(v="no"), TypeError, ["str"]),
    "q: scalar": (call(q=1.0), TypeError, ["float"]),
    **{
        f"q: {dtype}": (
            call(*(x.astype(dtype) for x in (Q, K, V))),
            TypeError,
            [np.dtype(dtype).str.strip("<>|=") if dtype == "U3" else np.dtype(dtype).name],
        )
        for dtype in ("int64", "int32", "uint8", "bool", "complex64", "complex128", "longdouble", "U3", "datetime64[s]")
    },
    "k: mixed": (call(k=K.astype(np.float32)), TypeError, ["float64", "float32"]),
    "v: mixed": (call(v=V.astype(np.float16)), TypeError, ["float64", "float16"]),
    "q: tensor": (call(q=foreign("torch", "Tensor")), TypeError, ["Tensor", "relpos_np.interop.torch.attention"]),
    "q: JAX": (call(q=foreign("jaxlib._jax", "ArrayImpl")), TypeError, ["ArrayImpl", "interop.jax", "np.asarray"]),
    # q, k, v: shapes
    "q: rank 1": (call(q=a(8)), ValueError, ["(8,)"]),
    "v: rank 0": (call(v=np.array(1.0)), ValueError, ["()"]),
    "k: head_dim": (call(k=a(2, 2, 7, 9)), ValueError, ["9", "8", "(2, 2, 7, 9)", "(2, 4, 5, 8)"]),
    "q: head_dim 0": (call(a(2, 4, 5, 0), a(2, 2, 7, 0)), ValueError, ["(2, 4, 5, 0)"]),
    "v: length": (call(v=a(2, 2, 6, 6)), ValueError, ["7", "(2, 2, 6, 6)"]),
    "v: heads": (call(v=a(2, 4, 7, 6)), ValueError, ["2", "(2, 4, 7, 6)"]),
    "k: heads do not divide": (
        call(k=a(2, 3, 7, 8), v=a(2, 3, 7, 6)),
        ValueError,
        ["3", "(2, 3, 7, 8)", "(2, 4, 5, 8)"],
    ),
    "k: more heads": (call(k=a(2, 8, 7, 8), v=a(2, 8, 7, 6)), ValueError, ["8", "(2, 8, 7, 8)"]),
    "k: no heads": (call(k=a(2, 0, 7, 8), v=a(2, 0, 7, 6)), ValueError, ["0", "(2, 0, 7, 8)"]),
    "k: batch": (call(k=a(3, 2, 7, 8)), ValueError, ["(2,)", "(3,)"]),
    # unknown names
    "casual: unknown": (call(casual=True), TypeError, ["attention has no such argument", "did you mean 'causal'?"]),
    "lse: unknown": (
        call(lse=True),
        TypeError,
        ["expected position, mask, key_lengths", "return_lse, return_bound, out"],
    ),
    "postion: unknown": (lambda: rp.logits(Q, K, postion=None), TypeError, ["logits has", "did you mean 'position'?"]),
    "dropout: logits": (lambda: rp.logits(Q, K, dropout=0.5), TypeError, ["logits has no such argument"]),
    # masks
    "mask: int": (
        call(mask=np.ones((5, 7), int)),
        TypeError,
        ["int64", "bool", "mask.astype(bool)", "(batch, 1, 1, L_k)"],
    ),
    "mask: int, all axes": (call(mask=np.ones((1, 1, 5, 7), int)), TypeError, ["mask.astype(bool)"]),
    "mask: transposed": (call(mask=np.ones((7, 5), bool)), ValueError, ["(7, 5)", "(2, 4, 5, 7)"]),
    "mask: rank": (call(mask=np.ones((1, 2, 4, 5, 7), bool)), ValueError, ["(1, 2, 4, 5, 7)", "(2, 4, 5, 7)"]),
    "mask: too few batch items": (call(mask=np.ones((3, 1, 1, 7), bool)), ValueError, ["(3, 1, 1, 7)"]),
    "mask: two readings": (
        lambda: rp.attention(Q[:, :, :2], K, V, mask=np.ones((2, 7), bool)),
        ValueError,
        ["(2, 7)", "(L_q, L_k)", "(B, L_k)", "mask[None]", "mask[:, None, None]"],
    ),
    "mask: two readings, offsets": (
        lambda: rp.attention(Q[:, :, :2], K, V, mask=np.ones((2, 7)), offset=[1, 2]),
        ValueError,
        ["(2, 7)", "mask[None]"],
    ),
    # numbers
    "causal: 1": (call(causal=1), TypeError, ["1"]),
    "causal: None": (call(causal=None), TypeError, ["None"]),
    "causal: string": (call(causal="yes"), TypeError, ["yes"]),
    "return_lse: 1": (call(return_lse=1), TypeError, ["1"]),
    "return_lse: array": (call(return_lse=np.empty(0)), TypeError, ["return_lse"]),
    "window: negative": (call(window=-1), ValueError, ["-1"]),
    "window: negative side": (call(window=(3, -2)), ValueError, ["-2"]),
    "window: float": (call(window=2.0), TypeError, ["2.0"]),
    "window: bool": (call(window=True), TypeError, ["True"]),
    "window: three": (call(window=(1, 2, 3)), ValueError, ["(1, 2, 3)"]),
    "window: string": (call(window="big"), TypeError, ["big"]),
    "window: list": (call(window=[1, 2]), TypeError, ["[1, 2]"]),
    "key_lengths: float": (call(key_lengths=np.array([3.0, 2.0])), TypeError, ["float64"]),
    "key_lengths: bool": (call(key_lengths=np.array([True, False])), TypeError, ["bool"]),
    "key_lengths: shape": (call(key_lengths=np.array([3, 2, 1])), ValueError, ["(3,)", "(2,)"]),
    "key_lengths: one entry": (call(key_lengths=[3]), ValueError, ["2 items", "(2,)", "pass an integer"]),
    "key_lengths: one entry, offsets": (
        call(key_lengths=np.array([3]), offset=[1, 2]),
        ValueError,
        ["2 items", "pass an integer"],
    ),
    "key_lengths: ragged": (call(key_lengths=[[1], [2, 3]]), TypeError, []),
    "scale: nan": (call(scale=np.nan), ValueError, ["nan"]),
    "scale: inf": (call(scale=np.inf), ValueError, ["inf"]),
    "scale: bool": (call(scale=True), TypeError, ["True"]),
    "scale: string": (call(scale="1"), TypeError, ["'1'"]),
    "scale: complex": (call(scale=1j), TypeError, ["1j"]),
    "scale: array": (call(scale=np.ones(4)), TypeError, ["ndarray"]),
    "offset: float": (call(offset=1.0), TypeError, ["1.0"]),
    "offset: bool": (call(offset=False), TypeError, ["False"]),
    "offset: too large": (call(offset=1 << 61), ValueError, [str(1 << 61)]),
    "offset: too small": (call(offset=-(10**30)), ValueError, [str(-(10**30))]),
    "dropout: 1": (call(dropout=1.0, rng=np.random.default_rng(0)), ValueError, ["1.0"]),
    "dropout: negative": (call(dropout=-0.1, rng=np.random.default_rng(0)), ValueError, ["-0.1"]),
    "dropout: nan": (call(dropout=np.nan, rng=np.random.default_rng(0)), ValueError, ["nan"]),
    "dropout: bool": (call(dropout=True, rng=np.random.default_rng(0)), TypeError, ["True"]),
    "dropout: None": (call(dropout=None), TypeError, ["None"]),
    "rng: missing": (call(dropout=0.5), TypeError, ["default_rng"]),
    "rng: RandomState": (call(dropout=0.5, rng=np.random.RandomState(0)), TypeError, ["Generator"]),
    "backend: unknown": (call(backend="metal"), ValueError, ["'metal'", "'numpy'", "'numba'"]),
    "backend: not a name": (call(backend=3), ValueError, ["3"]),
    "backend: unhashable": (call(backend=["numpy"]), ValueError, ["numpy"]),
    "backend: unknown default": (lambda: rp.set_backend("jax"), ValueError, ["'jax'"]),
    "backend: unknown block": (lambda: rp.use_backend("jax").__enter__(), ValueError, ["'jax'"]),
    # positions
    "position: a table": (call(position=T5_TABLE), TypeError, ["ndarray", "T5"]),
    "position: a class": (call(position=rp.T5), TypeError, ["type"]),
    "position: a name": (call(position="t5"), TypeError, ["str"]),
    "position: absolute": (call(position=rp.Sinusoidal(8)), TypeError, ["Sinusoidal", "inputs"]),
    "position: learned": (call(position=rp.LearnedAbsolute(a(9, 8))), TypeError, ["LearnedAbsolute", "inputs"]),
    "position: list": (call(position=[rp.T5(T5_TABLE)]), TypeError, ["list"]),
    "position: nested": (call(position=((rp.T5(T5_TABLE),),)), TypeError, ["tuple"]),
    # Shaw
    "key_table: neither": (rp.Shaw, ValueError, ["value_table"]),
    "value_table: v_dim": (call(position=rp.Shaw(value_table=a(3, 8))), ValueError, ["(3, 8)", "6"]),
    # T5
    # Transformer-XL
    **{
        f"rows: {variant}": (
            call(position=rp.TransformerXL(a(4, 8), a(4, 8), a(10, 4, 8), variant=variant)),
            ValueError,
            [variant, str(wanted), "(10, 4, 8)"],
        )
        for variant, wanted in (
            ("transformer_xl", 7),
            ("espnet_legacy", 7),
            ("conformer", 11),
            ("xlnet", 12),
            ("wenet", 7),
        )
    },
    "k: shorter than q": (
        call(a(4, 7, 8), a(4, 5, 8), a(4, 5, 8), position=rp.TransformerXL(a(4, 8), a(4, 8), a(5, 4, 8))),
        ValueError,
        ["5", "7"],
    ),
    "offset: moved": (
        call(position=rp.TransformerXL(a(4, 8), a(4, 8), a(7, 4, 8)), offset=0),
        ValueError,
        ["2", "0"],
    ),
    # windows
    "grid: tokens": (
        call(position=rp.WindowBias(a(13, 4), (6,), (7,), extent=(7,))),
        ValueError,
        ["(6,)", "6", "5"],
    ),
    "key_grid: tokens": (
        call(position=rp.WindowBias(a(13, 4), (5,), (6,), extent=(7,))),
        ValueError,
        ["(6,)", "6", "7"],
    ),
    "num_frames_kv: RSTT's rule": (
        lambda: rp.WindowBias.rstt(a(7 * 1 * 1, 1), 4, 3, (1, 1)),
        ValueError,
        ["4", "3"],
    ),
    "num_frames_kv: zero": (lambda: rp.WindowBias.rstt(a(7, 1), 4, 0, (1, 1)), ValueError, ["0"]),
    "num_frames_q: zero": (lambda: rp.WindowBias.rstt(a(7, 1), 0, 1, (1, 1)), ValueError, ["0"]),
    "num_frames_q: float": (lambda: rp.WindowBias.rstt(a(7, 1), 4.0, 1, (1, 1)), TypeError, ["4.0"]),
    "grid: int, of rstt": (lambda: rp.WindowBias.rstt(a(7, 1), 4, 2, 7), TypeError, ["7"]),
    # absolute
    "dim: 0": (lambda: rp.Sinusoidal(0), ValueError, ["0"]),
    "dim: float": (lambda: rp.Sinusoidal(8.0), TypeError, ["8.0"]),
    "base: nan": (lambda: rp.Sinusoidal(8, base=np.nan), ValueError, ["nan"]),
    "base: negative": (lambda: rp.Sinusoidal(8, base=-1.0), ValueError, ["-1"]),
    "base: string": (lambda: rp.Sinusoidal(8, base="e"), TypeError, ["'e'"]),
    "positions: negative length": (lambda: rp.Sinusoidal(8).encode(-1), ValueError, ["-1"]),
    "positions: strings": (lambda: rp.Sinusoidal(8).encode(np.array(["a"])), (TypeError, ValueError), ["U1"]),
    "positions: floats": (lambda: rp.LearnedAbsolute(a(5, 8)).encode(np.array([0.5])), TypeError, ["float64"]),
    "positions: beyond": (lambda: rp.LearnedAbsolute(a(5, 8)).encode(6), IndexError, ["4", "5"]),
    "positions: negative": (lambda: rp.LearnedAbsolute(a(5, 8)).encode(np.array([-1])), IndexError, ["-1"]),
    "x: width": (lambda: rp.Sinusoidal(8)(a(5, 9)), ValueError, ["8", "(5, 9)"]),
    "x: rank": (lambda: rp.Sinusoidal(8)(a(8)), ValueError, ["(8,)"]),
    "x: ints": (lambda: rp.LearnedAbsolute(a(5, 8))(a(5, 8, dtype=int)), TypeError, ["int64"]),
    "x: learned width": (lambda: rp.LearnedAbsolute(a(5, 8))(a(5, 9)), ValueError, ["(5, 9)"]),
    "start: float": (lambda: rp.Sinusoidal(8)(a(5, 8), start=1.0), TypeError, ["1.0"]),
    "start: negative": (lambda: rp.LearnedAbsolute(a(5, 8))(a(5, 8), start=-1), ValueError, ["-1"]),
    # rel_shift
    "x: strings": (lambda: rp.rel_shift(np.array([["a"]])), TypeError, ["U1"]),
    "variant: unhashable": (lambda: rp.rel_shift(a(2, 3), variant=["xlnet"]), ValueError, ["xlnet"]),
    "variant: array": (lambda: rp.rel_shift(a(2, 3), variant=np.arange(2)), (ValueError, TypeError), []),
    "backend: rel_shift": (lambda: rp.rel_shift(a(2, 3), backend="metal"), ValueError, ["'metal'"]),
    # logits
    "q: logits list": (lambda: rp.logits([1.0], K), TypeError, ["list"]),
    "k: logits dtype": (lambda: rp.logits(Q, K.astype(np.float32)), TypeError, ["float32"]),
    "mask: logits": (lambda: rp.logits(Q, K, mask=np.ones((7, 5))), ValueError, ["(7, 5)"]),
    "backend: logits": (lambda: rp.logits(Q, K, backend="metal"), ValueError, ["'metal'"]),
    "scale: logits": (lambda: rp.logits(Q, K, scale=np.inf), ValueError, ["inf"]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_call(name):
    bad, kind, words = BAD[name]
    argument = name.split(":")[0]
    with pytest.raises(rp.RelposError) as caught:
        bad()
    assert isinstance(caught.value, kind)
    message = str(caught.value)
    assert re.search(rf"\b{argument}\b", message), message
    for word in words:
        assert word in message, message
    assert len(message) < 400


@pytest.mark.parametrize("name", [n for n, (bad, *_) in BAD.items() if bad.__name__ == "<lambda>" and bad.__closure__])
@pytest.mark.parametrize("backend", ["numpy", "numba"])
def test_nothing_is_written_before_the_error(name, backend):
    """Calls of attention that fail leave `out` as it was."""
    cells = dict(
        zip(BAD[name][0].__code__.co_freevars, (c.cell_contents for c in BAD[name][0].__closure__), strict=True)
    )
    options = {"backend": backend, **cells["options"]}
    out = np.full((2, 4, 5, 6), 7.0)
    with pytest.raises(rp.RelposError):
        rp.attention(cells["q"], cells["k"], cells["v"], **options, out=out)
    assert (out == 7).all()


def test_every_error_is_also_the_builtin_kind():
    for name, kind in (("Value", ValueError), ("Type", TypeError), ("Index", IndexError), ("Import", ImportError)):
        error = getattr(rp, f"Relpos{name}Error")
        assert issubclass(error, rp.RelposError)
        assert issubclass(error, kind)


@pytest.mark.parametrize(
    ("name", "value"),
    [("scale", 2), ("scale", np.float32(0.5)), ("scale", np.int64(2)), ("window", np.int64(2)), ("offset", np.int32(1)),
     ("causal", np.True_), ("key_lengths", np.uint8(3)), ("key_lengths", [7, 2]), ("dropout", 0)],
)  # fmt: skip
def test_number_like_arguments_are_welcome(name, value):
    assert np.isfinite(rp.attention(Q, K, V, **{name: value})).all()


def test_the_checks_leave_a_tables_owner_free():
    """A scheme reads the caller's table; it neither copies nor freezes it."""
    table = a(32, 4)
    rp.T5(table)
    assert table.flags.writeable


# --------------------------------------------------------------------------------- formulas one by one

# No formula takes one of these for each of its arguments.
WRONG = {
    "text": "x",
    "none": None,
    "object": object(),
    "list": [1.0, 2.0],
    "texts": np.array(["a"]),
    "objects": np.array([None]),
    "dates": np.array(["2017-06-12"], "datetime64[D]"),
    "no axes": np.array(1.0),
    "huge": 10**30,
}


def refusal(formula, *args, **named):
    """What a formula says against arguments, in an error of the library; no other may come."""
    try:
        formula(*args, **named)
    except rp.RelposError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", sorted(rp.reference.__all__))
def test_formulas_refuse_what_is_no_argument_of_theirs(name):
    formula = getattr(rp.reference, name)
    taken = [p for p in inspect.signature(formula).parameters.values() if p.default is p.empty]
    for kind, wrong in WRONG.items():
        args = [wrong for p in taken if p.kind is p.POSITIONAL_OR_KEYWORD]
        named = {p.name: wrong for p in taken if p.kind is p.KEYWORD_ONLY}
        said = refusal(formula, *args, **named)
        assert said is None or any(word in said for word in (*[p.name for p in taken], name)), (kind, said)


# What passes the checks that come before those of words, by annotation.
PASSING = {
    "Array": np.ones((3, 3)),
    "Int64": np.ones(3, int),
    "int": 3,
    "float": 1.0,
    "bool": False,
    "Sequence[int]": (2, 2),
}


@pytest.mark.parametrize("name", sorted(rp.reference.__all__))
def test_formulas_refuse_words_that_they_do_not_know(name):
    """Many would take any other word for the last of those that they know, and compute something."""
    formula = getattr(rp.reference, name)
    parameters = inspect.signature(formula).parameters.values()
    needed = {p.name: PASSING.get(str(p.annotation)) for p in parameters if p.default is p.empty}
    known = edge.words(formula)
    for parameter in parameters:
        if isinstance(parameter.default, str):
            assert parameter.default in known[parameter.name]
            with pytest.raises(rp.RelposValueError, match=f"{parameter.name}: expected one of '"):
                formula(**needed, **{parameter.name: "no such word"})


def test_formulas_name_the_argument_or_the_shapes():
    x = np.ones((2, 3, 4))
    for words, call in {
        r"q_len: expected an integer, found 1.5": lambda: rp.reference.sandwich_bias(2, 1.5, 3),
        r"s: expected a NumPy array, found list": lambda: rp.reference.softmax([1.0, 2.0]),
        r"x: expected numbers, found dtype <U1": lambda: rp.reference.rel_shift(np.array([["a"]])),
        r"grid: expected a sequence of integers, found 4": lambda: rp.reference.grid_positions(4),
        r"self_attention: these arguments do not fit: .*\(2, 3, 4\).*\(5, 5\)": lambda: rp.reference.self_attention(
            x, *[np.ones((5, 5))] * 3
        ),
    }.items():
        with pytest.raises(rp.RelposError, match=words):
            call()
