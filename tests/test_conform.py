"""`conform` and its command: on functions of NumPy, what is told of them, written, returned and refused."""

import json
import subprocess
import sys
import textwrap
from importlib.metadata import entry_points
from xml.etree import ElementTree as ET

import numpy as np
import pytest

import relpos_np as rp
from relpos_np._commands import main as cli
from relpos_np.conform import conform, files
from relpos_np.conform.formats import DTYPES, format_of
from relpos_np.conform.frameworks import framework_of, loaded
from relpos_np.conform.yardstick import distance, truth
from relpos_np.testing.conventions import ABSENT, CONVENTIONS, Call, reach
from relpos_np.testing.families import of_family
from tests.every import ATTENTION
from tests.processes import child

SMALL = ("self", "cross")
SOME = (1, 2, 17, 33)


def attend(q, k, v):
    """Self-attention and nothing else."""
    if q.shape != k.shape or k.shape != v.shape:
        raise NotImplementedError("one shape only")
    s = q @ k.swapaxes(-1, -2) * q.dtype.type(q.shape[-1] ** -0.5)
    p = np.exp(s - s.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True) @ v


def broken(q, k, v):
    raise ZeroDivisionError("of course")


@pytest.mark.parametrize(("name", "variant"), ATTENTION)
def test_our_own_terms_conform(name, variant):
    if name == "path":
        pytest.skip("it has no terms")

    def function(q, k, v, return_lse=False, causal=False, **given):
        position = rp.SCHEMES[name].cls(**given)
        return rp.attention(q, k, v, position=position, return_lse=return_lse, causal=causal, backend="terms")

    wanted = "cross" if (name, variant) in {("window", "rstt"), ("decomposed", "mvit")} else "self"
    report = conform(function, name, variant=variant, families=wanted)
    assert report.ok, report.text()
    assert {"out", "lse"} == set(report.family(wanted).findings[0].errors)


def test_a_function_that_does_little_is_told_what_was_not_run():
    report = conform(attend, "plain")
    assert report.ok
    assert report.exit_code == 0
    assert report.family("self").verdict == "right"
    assert report.family("causal").reason == "takes no argument causal"
    assert "raises NotImplementedError: one shape only" in report.family("cross").reason
    assert report.family("odd_sizes").verdict == "partly"
    text = report.text()
    assert "conforms in" in text
    assert "not run: causal, cross" in text
    # Only what it takes is asked of it, in sizes, families and features.
    assert conform(attend, "plain", excluded=["cross"]).family("cross").reason == "left out: cross"
    # What it is said to support must not be refused, nor what is asked for.
    assert conform(attend, "plain", supports=["cross"]).family("cross").verdict == "wrong"
    assert conform(attend, "plain", families="cross").exit_code == 1


def test_nothing_that_ran_is_not_a_pass():
    def refusing(q, k, v):
        raise NotImplementedError("of course")

    report = conform(refusing, "plain", lengths=SOME)
    assert report.exit_code == 3
    assert not report.ok
    assert "NOTHING RAN" in report.text()
    assert "raises NotImplementedError: of course" in report.text()


def test_a_crash_is_wrong():
    report = conform(broken, "plain", lengths=SOME)
    assert report.exit_code == 1
    assert report.family("self").verdict == "wrong"
    assert "crashes" in report.family("self").cause
    assert "raises ZeroDivisionError: of course" in report.text()

    def tile(q, k, v):
        if q.shape[2] % 16:
            raise RuntimeError("illegal memory access")
        return rp.attention(q, k, v, backend="numpy")

    report = conform(tile, "plain", lengths=(16, 17, 32, 33))
    assert report.exit_code == 1
    assert "crashes, runs only where 16 divides L_q" in report.family("self").cause
    assert "--lengths" in report.family("self").cause
    assert conform(tile, "plain", lengths=(16, 32, 48)).ok


def test_what_proves_nothing_is_no_pass():
    """With one key every output is its value, and self-attention must run in full."""
    assert conform(lambda q, k, v: np.repeat(v, q.shape[1] // v.shape[1], 1), "plain", lengths=1).exit_code == 3

    def one_size(q, k, v):
        if q.shape[3] != 64:
            raise NotImplementedError("head_dim is 64")
        return rp.attention(q, k, v, backend="numpy")

    report = conform(one_size, "plain", families=None, lengths=SOME)
    assert report.exit_code == 3
    assert "self-attention ran in" in report.summary
    assert conform(one_size, "plain", head_dim=64, lengths=SOME).ok


def test_arguments_that_are_passed_on_and_unknown_there_are_refused():
    def inner(q, k, v, causal=False):
        return rp.attention(q, k, v, causal=causal, backend="numpy")

    def outer(q, k, v, **options):
        return inner(q, k, v, **options)

    report = conform(outer, "plain", lengths=SOME)
    assert report.ok
    assert report.family("causal").verdict == "right"
    assert "unexpected keyword argument" in report.family("masks").reason


def test_out_is_filled():
    def filling(q, k, v, out):
        out[:, :, 1:] = rp.attention(q, k, v, backend="numpy")[:, :, 1:]

    report = conform(filling, "plain", families="calls", lengths=33)
    assert report.family("calls").smallest is not None
    assert report.family("calls").cause == "the output is wrong for the first query alone"
    assert "out holds NaN" in report.text()
    report = conform(lambda q, k, v, out=None: rp.attention(q, k, v, out=out, backend="numpy"), "plain", lengths=33)
    assert report.family("calls").verdict == "right"


def top_left(q, k, v, causal=False):
    """Query i attends keys up to i, however many there are."""
    seen = np.arange(k.shape[2]) <= np.arange(q.shape[2])[:, None]
    return rp.attention(q, k, v, mask=seen if causal else None, backend="numpy")


def lengths_first(q, k, v):
    """Axes (B, L, H, D)."""
    return rp.attention(*(x.swapaxes(1, 2) for x in (q, k, v)), backend="numpy").swapaxes(1, 2)


def single(q, k, v, table, max_distance=128):
    position = rp.T5(table, max_distance=max_distance, rounding="float32")
    return rp.attention(q, k, v, position=position, backend="numpy")


def from_key_to_query(q, k, v, key_table):
    q, k, v = (x[:, :, ::-1] for x in (q, k, v))
    return rp.attention(q, k, v, position=rp.Shaw(key_table), offset=0, backend="numpy")[:, :, ::-1]


@pytest.mark.parametrize(
    ("function", "scheme", "family", "words", "flag"),
    [
        (
            lambda q, k, v: rp.attention(q, k, v, scale=1.0, backend="numpy"),
            *("plain", "self", "scale missing", {"always": {"scale": 1.0}}),
        ),
        (single, "t5", "borders", "rounds buckets in float32", {"variant": "float32"}),
        (top_left, "plain", "decoding", "aligns the causal mask top-left", {"conventions": "torch"}),
        (lengths_first, "plain", "self", "takes (batch, length, heads, head_dim)", {"layout": "blhd"}),
        (from_key_to_query, "shaw", "self", "counts distances i - j where j - i is meant", None),
    ],
)
def test_what_newcomers_meet_first_is_named_with_its_flag(function, scheme, family, words, flag):
    """And right once the flag is said."""
    families = ("self", family)
    report = conform(function, scheme, families=families)
    assert report.family(family).cause.startswith(words), report.text()
    if flag is None:
        return
    ((name, value),) = flag.items()
    said = f"--{name} {'scale=1.0' if name == 'always' else value}"
    assert f"if that is meant, say {said}" in report.text()
    meant = conform(function, scheme, families=families, **flag)
    assert meant.exit_code == 0, meant.text()


def only_tiles(q, k, v, causal=False):
    """As kernels of Triton are: one head_dim, and whole tiles."""
    if q.shape[3] != 64:
        raise ValueError("head_dim is 64")
    if q.shape[2] % 16 or k.shape[2] % 16:
        raise RuntimeError("an illegal memory access was encountered")
    return rp.attention(q, k, v, causal=causal, backend="numpy")


def test_a_kernel_of_one_size_is_told_the_flags():
    said = "--head-dim 64 --lengths 16,32,64,128"
    report = conform(only_tiles, "plain")
    assert report.exit_code == 1
    assert {one.cause.rpartition(" say ")[2] for one in report.families if one.verdict == "wrong"} == {said}
    takes = {"head_dim": 64, "lengths": (16, 32, 64, 128)}
    assert conform(only_tiles, "plain", **takes).ok
    # What it crashes at within them is another matter, and so is what it computes there.
    ordinary = conform(lambda q, k, v: only_tiles(q, k + np.zeros_like(q[:, :, :1]), v), "plain", **takes)
    assert "--except grouped_heads" in ordinary.family("grouped_heads").cause
    doubled = conform(lambda q, k, v, causal=False: only_tiles(2 * q, k, v, causal), "plain", **takes)
    assert doubled.family("self").verdict == doubled.family("causal").verdict == "wrong"


def test_a_failure_is_shrunk():
    def wide(q, k, v, causal=False):
        q = np.where(np.arange(q.shape[-1]) < 48, q, 0).astype(q.dtype)
        return rp.attention(q, k, v, causal=causal, backend="numpy")

    smallest = conform(wide, "plain", families="causal").family("causal").smallest
    assert "batch=1, H=1, H_kv=1, L_q=2, L_k=2, D=64" in smallest.where


def test_wrong_answers_are_explained_by_kind():
    def inverted(q, k, v, mask=None):
        return rp.attention(q, k, v, mask=None if mask is None else ~mask, backend="numpy")

    def unguarded(q, k, v, mask=None):
        s = q @ k.swapaxes(-1, -2) * q.dtype.type(q.shape[-1] ** -0.5)
        with np.errstate(all="ignore"):
            p = np.exp(s if mask is None else np.where(mask, s, -np.inf))
            return p / p.sum(-1, keepdims=True) @ v

    def averaging(q, k, v, mask=None):
        s = q @ k.swapaxes(-1, -2) * q.dtype.type(q.shape[-1] ** -0.5)
        s = s if mask is None else np.where(mask, s, np.float32(-1e9))
        p = np.exp(s - s.max(-1, keepdims=True))
        return p / p.sum(-1, keepdims=True) @ v

    report = conform(inverted, "plain", supports=["mask"], lengths=SOME)
    assert report.family("masks").cause == "takes True in a mask for excluded"
    report = conform(unguarded, "plain", supports=["mask"])
    assert "largest score is not subtracted" in report.family("large_scores").cause
    assert "sum of 0" in report.family("excluded_rows").cause
    assert "0 times NaN" in report.family("nan_excluded").cause
    report = conform(averaging, "plain", supports=["mask"], lengths=SOME)
    assert "large negative number" in report.family("excluded_rows").cause
    assert report.family("masks").verdict == "partly"  # without key_lengths
    shape = conform(lambda q, k, v: q[..., :1], "plain", families="self")
    assert shape.causes == ("out has another shape than (batch, heads, queries, D_v)",)
    assert "out has shape (1, 1, 2, 1), expected (1, 1, 2, 2)" in shape.text()


@pytest.mark.parametrize("convention", [one for one in CONVENTIONS if one.mistake], ids=lambda one: one.mistake)
def test_every_convention_that_conform_draws_is_named(convention):
    """An implementation that follows one where another is meant, in the first family that shows it."""
    family, option = SHOWN_BY[convention.option], convention.option

    def follows(q, k, v, causal=False, window=None, softcap=None):
        options = {"causal": causal, "window": window, "softcap": softcap}
        call = Call(q.shape[-1], q.shape[-2], k.shape[-2], **options, heads=q.shape[1], v_dim=v.shape[-1])
        value = convention.value(call)
        if option == "hidden":
            seen = reach(slice(0, call.q_len), call.k_len, hidden=value)
            options |= {"causal": False, "mask": seen if causal else None}
        elif option == "cap":
            options |= {"softcap": value[0], "cap_order": value[1]}
        elif value is not ABSENT:
            options |= {option: value}
        return rp.attention(q, k, v, position=rp.ALiBi(form="symmetric"), backend="numpy", **options)

    always = {"softcap": 1.5} if option == "cap" else {}
    options = {"dtype": "float64", "families": family, "lengths": (33, 65), "always": always}
    report = conform(follows, "alibi", variant="symmetric", **options)
    assert report.causes == (convention.mistake,), report.text()


SHOWN_BY = {"hidden": "decoding", "offset": "cross", "scale": "odd_sizes", "window": "windows", "cap": "self"}


def test_a_cause_is_one_that_gives_the_numbers():
    """Positions as small as these are exact in half precision, which then explains no error of another kind."""

    def nearly(q, k, v, **given):
        out = rp.attention(q, k, v, position=rp.Rotary(**given), backend="numpy")
        return out + np.float32(4e-5) * np.cos(np.arange(out.size, dtype="float32")).reshape(out.shape)

    report = conform(nearly, "rotary", families="self")
    assert report.family("self").verdict == "wrong"
    # Further from the truth than any right answer, and nearer than any mistake.
    assert all(4 < one.ratio < 100 for one in report.family("self").findings)
    assert report.causes == ()


def test_errors_that_nothing_known_leads_to_have_no_cause():
    """Ten roundings are too many, and near every suspect that makes no difference to a case."""

    def noisy(q, k, v):
        out = rp.attention(q, k, v, backend="numpy")
        signs = np.where(np.arange(out.size).reshape(out.shape) % 2, 1, -1)
        return out * (1 + 10 * np.finfo(out.dtype).eps * signs).astype(out.dtype)

    family = conform(noisy, "plain", families="self").family("self")
    assert (family.verdict, family.cause) == ("wrong", "")


@pytest.mark.parametrize("change", [lambda x: x[..., None], lambda x: x.swapaxes(1, 2)], ids=["axis", "order"])
def test_log_sum_exps_of_another_shape_are_told(change):
    """Also where those of two parts of the keys were to be merged."""

    def attend(q, k, v, return_lse=False):
        out, lse = rp.attention(q, k, v, return_lse=True, backend="numpy")
        return (out, change(lse)) if return_lse else out

    report = conform(attend, "plain", lengths=SOME)
    assert report.family("self").cause == "lse has another shape than (batch, heads, queries)"
    assert report.family("ragged").cause.startswith("lse has shape")


def test_an_exit_is_a_crash():
    """Or its exit code would be the verdict."""

    def leaves(q, k, v):
        raise SystemExit(0)

    report = conform(leaves, "plain", families="self", lengths=SOME)
    assert (report.exit_code, report.causes) == (1, ("crashes",))


def test_crashes_with_other_values_are_told_when():
    def square(q, k, v, causal=False):
        if q.shape[-1] != v.shape[-1]:
            raise RuntimeError("no kernel")
        return rp.attention(q, k, v, causal=causal, backend="numpy")

    cause = conform(square, "plain").family("odd_sizes").cause
    assert "only where D_v is not D" in cause
    assert "--except value_dim" in cause


def test_an_output_in_half_precision_is_told():
    def half(q, k, v):
        return rp.attention(q, k, v, backend="numpy").astype("float16")

    assert conform(half, "plain", families="self", lengths=SOME).causes == ("rounds its output to float16",)


def test_angles_in_float32_are_right():
    """A product of position and frequency is rounded otherwise at each position, which a narrow window shows."""

    def attend(q, k, v, base=10000.0, window=None, causal=False):
        def turned(x, start):
            at = (np.arange(x.shape[2], dtype="float32") + np.float32(start))[:, None]
            frequencies = np.float32(1) / np.float32(base) ** (
                np.arange(0, x.shape[3], 2, dtype="float32") / x.shape[3]
            )
            cos, sin = np.cos(at * frequencies), np.sin(at * frequencies)
            a, b = np.split(x, 2, -1)
            return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)

        q, k = turned(q, k.shape[2] - q.shape[2]), turned(k, 0)
        return rp.attention(q, k, v, window=window, causal=causal, backend="numpy")

    report = conform(attend, "rotary", families=("self", "windows"), head_dim=32, lengths=(128, 129))
    assert report.ok, report.text()


def test_units_are_distances_to_the_next_number():
    x = np.array([1.0, 1.5, -3.99, 1000.0, 0.0])
    assert format_of("float16").unit(x).tolist() == [2.0**-10, 2.0**-10, 2.0**-9, 0.5, 0.0]
    assert np.array_equal(format_of("float64").unit(x[:4]), np.spacing(np.abs(x[:4])))


def test_what_it_always_does():
    def unscaled(q, k, v):
        return rp.attention(q, k, v, scale=1.0, causal=True, backend="numpy")

    always = {"scale": 1.0, "causal": True}
    assert conform(unscaled, "plain", always=always, supports=["scale", "causal"]).ok
    assert conform(unscaled, "plain", families="self").exit_code == 1

    def fixed(q, k, v, table):
        return rp.attention(q, k, v, position=rp.T5(table, max_distance=64), backend="numpy")

    assert conform(fixed, "t5", always={"max_distance": 64}, families=SMALL).ok
    assert conform(fixed, "t5", families="self").exit_code == 1


def test_arguments_that_are_not_taken_are_left_at_their_defaults():
    def keys_only(q, k, v, key_table):
        return rp.attention(q, k, v, position=rp.Shaw(key_table), backend="numpy")

    def slopes(q, k, v):
        return rp.attention(q, k, v, position=rp.ALiBi(), backend="numpy")

    assert conform(keys_only, "shaw", families=SMALL).ok
    assert conform(slopes, "alibi", families=SMALL).ok
    report = conform(lambda q, k, v, table: attend(q, k, v), "t5", families=("self", "borders"))
    assert report.family("borders").reason == "takes no argument max_distance"


@pytest.mark.parametrize(
    ("words", "call"),
    [
        ("scheme", {"scheme": "rope"}),
        ("added to inputs", {"scheme": "sinusoidal"}),
        ("variant", {"scheme": "t5", "variant": "wrap"}),
        ("dtype", {"dtype": "int8"}),
        ("families", {"families": "selfish"}),
        ("families", {"families": ()}),
        ("no case of borders", {"families": "borders"}),
        ("supports", {"supports": ["grouped"]}),
        ("framework", {"framework": "tinygrad"}),
        ("layout", {"layout": "lbhd"}),
        ("device", {"device": "cuda"}),
        ("no autograd", {"grad": True}),
        ("always", {"always": {"tables": 1}}),
        ("needs table", {"scheme": "t5"}),
        ("expected a callable", {"function": 3}),
        ("package.module:name", {"function": "attention"}),
        ("has no nothing", {"function": "relpos_np:nothing"}),
        ("cannot import", {"function": "no_such_package:f"}),
        ("expected a function", {"function": "relpos_np:SCHEMES"}),
        ("expected f(q, k, v, ...)", {"function": lambda q, k: q}),
    ],
)
def test_what_is_refused(words, call):
    given = {"function": attend, "scheme": "plain", **call}
    with pytest.raises(rp.RelposError) as found:
        conform(given.pop("function"), given.pop("scheme"), **given)
    assert words in str(found.value)


def test_results_that_are_no_arrays():
    with pytest.raises(rp.RelposTypeError, match="expected an array"):
        conform(lambda q, k, v: "out", "plain")
    with pytest.raises(rp.RelposTypeError, match="found int64"):
        conform(lambda q, k, v: q.astype(np.int64), "plain")
    with pytest.raises(rp.RelposTypeError, match=r"\(out, lse\)"):
        conform(lambda q, k, v, return_lse=False: q, "plain")

    class Foreign:
        """An array of a package that nobody knows."""

        def __init__(self, x):
            self.x = x

        def __dlpack__(self, **options):
            return self.x.__dlpack__(**options)

        def __dlpack_device__(self):
            return self.x.__dlpack_device__()

    assert conform(lambda q, k, v: Foreign(attend(q, k, v)), "plain", families="self").ok


@pytest.mark.parametrize("dtype", DTYPES)
def test_formats_round_as_they_should(dtype):
    one = format_of(dtype)
    if one.name not in ("float16", "float32", "float64"):
        pytest.importorskip("ml_dtypes")
    x = np.array([1.0, 1 + one.eps, 1 + one.eps / 4])
    np.testing.assert_array_equal(one.rounded(x), [1.0, 1 + one.eps, 1.0 if dtype != "float64" else x[2]])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_yardstick_is_of_the_size_of_a_rounding(dtype):
    """Not so small that right ones fail, and not so large that anything passes."""
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    stored = format_of(dtype)
    for name in ("plain", "t5", "shaw", "rotary"):
        for one in of_family("self", name, variant=None, dtype=np.float64, seed=0):
            if one.q.shape[2] > 33:
                continue
            right = truth(one, stored, one.expected, ("q", "k", "v"))
            for result, exact in right.expected.items():
                allowed = right.allowed(result, dtype) / np.abs(exact).max()
                # Angles that are rounded to float32 are wrong in proportion to the position.
                roundings = 60 + (3 * one.q.shape[2] if name == "rotary" else 0)
                assert stored.eps <= allowed <= roundings * stored.eps, (name, one.edge, result)
    assert distance(np.ones(2), np.array([1.0, np.nan])) == np.inf
    assert distance(np.ones(2), np.ones(3)) == np.inf
    assert distance(np.array([-np.inf]), np.array([-np.inf])) == 0


# ---------------------------------------------------------------------------------------------- command and files


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module of a stranger's in the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stranger.py").write_text(
        textwrap.dedent(
            """
            import numpy as np

            def right(q, k, v):
                s = q @ k.swapaxes(-1, -2) * q.dtype.type(q.shape[-1] ** -0.5)
                p = np.exp(s - s.max(-1, keepdims=True))
                return p / p.sum(-1, keepdims=True) @ v

            def unscaled(q, k, v):
                return right(q * q.dtype.type(q.shape[-1] ** 0.5), k, v)

            def broken(q, k, v):
                raise NotImplementedError("no")
            """
        ),
        encoding="utf-8",
    )
    yield "stranger"
    sys.modules.pop("stranger", None)


def test_the_command(module, capsys, tmp_path):
    paths = tmp_path / "conform.xml", tmp_path / "conform.svg"
    files_of = ["--junit", str(paths[0]), "--badge", str(paths[1])]
    takes = ["--scheme", "plain", "--except", "grouped_heads", "--lengths", "1,2,33"]
    assert cli.main(["conform", f"{module}:right", *takes, *files_of]) == 0
    out = capsys.readouterr().out
    assert "stranger:right against plain: output in float32, numpy" in out
    suite = ET.fromstring(paths[0].read_text(encoding="utf-8"))
    assert suite.get("failures") == "0"
    assert int(suite.get("tests")) == len(suite.findall("testcase"))
    assert int(suite.get("skipped")) == len(suite.findall("testcase/skipped")) > 0
    assert "conforms: " in paths[1].read_text(encoding="utf-8")

    assert cli.main(["conform", f"{module}:unscaled", *takes, "--json", *files_of]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["ok"]
    assert found["exit_code"] == 1
    assert {one["cause"] for one in found["families"] if one["verdict"] == "wrong"} == {"scale missing"}
    suite = ET.fromstring(paths[0].read_text(encoding="utf-8"))
    assert int(suite.get("failures")) == len(suite.findall("testcase/failure")) > 0
    assert suite.find("testcase/failure").get("message") == "scale missing"
    assert "wrong: " in paths[1].read_text(encoding="utf-8")
    assert cli.main(["conform", f"{module}:unscaled", *takes, "--always", "scale=1.0"]) == 0

    assert cli.main(["conform", f"{module}:broken", *takes, "--badge", str(paths[1])]) == 3
    assert "nothing ran" in paths[1].read_text(encoding="utf-8")
    capsys.readouterr()
    assert cli.main(["conform", f"{module}:none", "--scheme", "plain"]) == 2
    assert "has no none" in capsys.readouterr().err
    assert cli.main(["conform", f"{module}:right", "--scheme", "plain", "--always", "scale"]) == 2
    for wrong in (
        ["--lengths", "a"],
        ["--heads", "4/2/1"],
        ["--heads", "4/3"],
        ["--head-dim", ""],
        ["--except", "gqa"],
    ):
        assert cli.main(["conform", f"{module}:right", "--scheme", "plain", *wrong]) == 2


def test_json_has_no_infinity():
    report = conform(lambda q, k, v: q * np.float32(np.nan), "plain", families="self")
    assert json.loads(files.as_json(report))["families"][0]["cases"][0]["results"]["out"]["error"] is None


def test_the_fixture_of_pytest(module, tmp_path):
    (tmp_path / "test_stranger.py").write_text(
        textwrap.dedent(
            """
            import stranger

            def test_right(relpos_conform):
                assert relpos_conform(stranger.right, "plain", excluded="grouped_heads", lengths=33).ok

            def test_unscaled(relpos_conform):
                relpos_conform(stranger.unscaled, "plain", lengths=33)
            """
        ),
        encoding="utf-8",
    )
    # An installed package is found by its entry point.
    known = any(point.value == "relpos_np.pytest_plugin" for point in entry_points(group="pytest11"))
    plugin = [] if known else ["-p", "relpos_np.pytest_plugin"]
    command = [sys.executable, "-m", "pytest", "-q", *plugin, "-p", "no:cacheprovider", "."]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 1 passed" in done.stdout
    assert "scale missing" in done.stdout


def test_the_framework_is_that_of_the_file():
    assert framework_of(None, attend, None).name == "numpy"
    assert loaded("relpos_np:attention", None) is rp.attention


def test_the_package_may_be_imported_before_pytest():
    """Where warnings are errors, too: pytest warns of plugins that it can no longer rewrite."""
    code = "import sys, relpos_np, pytest; sys.exit(pytest.main(['-q', '--co', '-n0', 'tests/test_rules.py']))"
    status, out, log = child(code, bare=True)
    assert status == 0, out + log
