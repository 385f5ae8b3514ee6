"""`conform`: typical errors and named arithmetic, conventions, calls that stand for several, `always` by the case."""

from dataclasses import replace

import numpy as np
import pytest

import relpos_np as rp
from relpos_np import testing
from relpos_np.conform import conform, outputs
from relpos_np.conform.arithmetic import arithmetics, coarse
from relpos_np.conform.conditions import condition
from relpos_np.conform.formats import format_of
from relpos_np.conform.ragged import WAYS
from relpos_np.testing.compare import typical
from relpos_np.testing.grid import RAGGED
from tests.wrong_kernels import kernel, t5

SOME = (33, 65, 129)


def without(key, *, of):
    """A kernel that leaves a key out where there are so many."""

    def masked(at, s):
        s = s.copy()
        if at.k_len >= of:
            s[..., key] = -np.inf
        return s

    return kernel(masked=masked)


def cut(bits):
    return kernel(
        turned=lambda at, x: [coarse(y.astype(float), bits).astype(y.dtype) for y in x],
        values=lambda at, v: coarse(v.astype(float), bits).astype(v.dtype),
    )


# ---------------------------------------------------------------------------------------------- arithmetic


def test_one_key_of_257_left_out_is_wrong():
    pytest.importorskip("ml_dtypes")
    takes = {"dtype": "bfloat16", "families": "self", "heads": (2, 2), "lengths": (33, 257)}
    report = conform(without(100, of=257), "plain", **takes)
    wrong = [one for one in report.family("self").findings if one.verdict == "wrong"]
    # It moves the largest error by less than roundings may, and the typical one by more.
    assert max(one.rough["out"] for one in wrong) > 1
    assert conform(kernel(), "plain", **takes).ok


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_key_of_a_thousand_left_out_is_wrong(dtype):
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    report = conform(without(500, of=1001), "plain", dtype=dtype, families=("self", "long"))
    assert report.family("self").verdict == "right"
    assert report.family("long").verdict == "wrong"
    assert conform(kernel(), "plain", dtype=dtype, families="long").ok


def test_sums_in_bfloat16_are_wrong_though_no_number_is_far_off():
    """128 keys: the largest error is half of what is allowed, and every query's is larger than it may be."""
    pytest.importorskip("ml_dtypes")

    def attend(q, k, v):
        s = (q @ k.swapaxes(-1, -2)).astype(np.float32) * np.float32(q.shape[-1] ** -0.5)
        p = np.exp(s - s.max(-1, keepdims=True)).astype(v.dtype)
        out, total = np.zeros((*p.shape[:-1], v.shape[-1]), v.dtype), np.zeros((*p.shape[:-1], 1), v.dtype)
        for j in range(p.shape[-1]):
            out, total = out + p[..., j : j + 1] * v[..., j : j + 1, :], total + p[..., j : j + 1]
        return out / total

    report = conform(attend, "plain", dtype="bfloat16", families="self", excluded="grouped_heads")
    found = {one.edge: one for one in report.family("self").findings}
    assert found["self_128"].errors["out"] < found["self_128"].allowed["out"]
    assert found["self_128"].rough["out"] > 1
    assert found["self_128"].wrong == ("out",)
    assert report.causes == ("sums over keys in bfloat16: weights and values",)


@pytest.mark.parametrize(("name", "bits", "words"), [("tf32", 10, "TF32"), ("half_products", 7, "bfloat16")])
def test_coarse_products_are_wrong_unless_they_are_meant(name, bits, words):
    report = conform(cut(bits), "plain", families="self")
    assert report.causes == (f"makes products of q, k and v in {words}",)
    assert report.exit_code == 1
    assert f"if that is meant, say --arithmetic {name}" in report.text()
    meant = conform(cut(bits), "plain", families="self", arithmetic=name)
    assert meant.ok, meant.text()
    assert words in meant.arithmetic
    # Coarser still is wrong.
    assert conform(cut(bits - 3), "plain", families="self", arithmetic=name).exit_code == 1


@pytest.mark.parametrize(("name", "dtype"), [("int8_cache", "int8"), ("float8_cache", "float8_e4m3fn")])
def test_caches_of_eight_bits_are_wrong_unless_they_are_meant(name, dtype):
    def stored(q, k, v):
        return rp.attention(q, rp.quantize(k, dtype), rp.quantize(v, dtype))

    choose = {"families": "self", "lengths": SOME}
    report = conform(stored, "plain", **choose)
    assert any(f"values stored in {dtype}" in cause for cause in report.causes), report.text()
    assert f"if that is meant, say --arithmetic {name}" in report.text()
    meant = conform(stored, "plain", arithmetic=name, **choose)
    assert meant.ok, meant.text()
    # Another format is wrong, if it is coarser; keys by channel are not what was said.
    if dtype == "int8":
        assert conform(stored, "plain", arithmetic="tf32", **choose).exit_code == 1

        def coarser(q, k, v):
            return rp.attention(q, *(rp.quantize(x, "float8_e5m2") for x in (k, v)))

        assert conform(coarser, "plain", arithmetic=name, **choose).exit_code == 1


def test_arithmetic_is_found_out_and_held_to():
    pytest.importorskip("ml_dtypes")

    def stored(q, k, v):
        s = (q @ k.swapaxes(-1, -2) * q.dtype.type(q.shape[-1] ** -0.5)).astype(q.dtype)
        p = np.exp(s.astype(np.float32) - s.astype(np.float32).max(-1, keepdims=True))
        p = (p / p.sum(-1, keepdims=True)).astype(q.dtype)
        return (p.astype(np.float32) @ v.astype(np.float32)).astype(q.dtype)

    def fine(q, k, v):
        return rp.attention(*(x.astype(np.float32) for x in (q, k, v)), backend="numpy").astype(q.dtype)

    choose = {"dtype": "bfloat16", "families": "self", "excluded": "grouped_heads"}
    assert "stored in bfloat16" in conform(stored, "plain", **choose).arithmetic
    assert "one rounding" in conform(fine, "plain", **choose).arithmetic
    assert "computes with float32 on the way" in conform(fine, "plain", **choose).text()
    assert conform(fine, "plain", arithmetic="float32", **choose).ok
    assert conform(stored, "plain", arithmetic="float32", **choose).exit_code == 1
    assert conform(kernel(), "plain", families="self").arithmetic == "float32 throughout"
    with pytest.raises(rp.RelposValueError, match="arithmetic"):
        conform(fine, "plain", dtype="float64", arithmetic="tf32")


def resized(table, rows):
    """Linear interpolation in the table's dtype, coordinates included."""
    kind = table.dtype.type
    places = (np.arange(rows, dtype=kind) + kind(0.5)) * kind(len(table) / rows) - kind(0.5)
    lower = np.clip(np.floor(places).astype(int), 0, len(table) - 1)
    share = np.clip(places - lower.astype(kind), 0, 1)[:, None]
    return (1 - share) * table[lower] + share * table[np.minimum(lower + 1, len(table) - 1)]


def decomposed(q, k, v, height_table, width_table, grid):
    """Segment Anything's attention, step by step in the dtype of its operands."""
    height, width = grid
    d = [np.arange(n)[:, None] - np.arange(n) + n - 1 for n in grid]
    rows = [resized(x, 2 * n - 1)[at] for x, n, at in zip((height_table, width_table), grid, d, strict=True)]
    at = q.reshape(*q.shape[:2], height, width, -1)
    s = q * q.dtype.type(q.shape[-1] ** -0.5) @ k.swapaxes(-1, -2)
    s = s.reshape(*q.shape[:2], height, width, height, width)
    s = s + np.einsum("bhyxc,ykc->bhyxk", at, rows[0])[..., None]
    s = s + np.einsum("bhyxc,xkc->bhyxk", at, rows[1])[..., None, :]
    s = s.reshape(*q.shape[:3], k.shape[2])
    p = np.exp(s - s.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True) @ v


def forgetting(q, k, v, gates):
    """Sums of gates in the dtype of the operands; always causal."""
    sums = np.add.accumulate(gates, axis=-1)
    s = q @ k.swapaxes(-1, -2) * q.dtype.type(q.shape[-1] ** -0.5) + (sums[..., :, None] - sums[..., None, :])
    s = np.where(np.tri(s.shape[-1], dtype=bool), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True) @ v


def test_tables_that_are_resized_are_rounded_on_the_way():
    def fails(q, k, v, height_table, width_table, grid):
        return decomposed(q, k, v, height_table * np.float32(1 + 1e-3), width_table, grid)

    choose = {"families": "self", "head_dim": 64}
    assert conform(decomposed, "decomposed", lengths=(33, 257), **choose).ok
    assert not conform(fails, "decomposed", lengths=(33,), **choose).ok


def test_running_sums_are_rounded_on_the_way():
    def fails(q, k, v, gates):
        return forgetting(q, k, v, gates * np.float32(1 + 1e-4))

    choose = {"variant": "log", "always": {"causal": True}, "families": "self"}
    assert conform(forgetting, "fox", lengths=(33, 1023), **choose).ok
    assert not conform(fails, "fox", lengths=(33,), **choose).ok


def test_float64_may_have_angles_of_float32_and_says_so():
    def turning(kind):
        def rotary(q, k, v):
            def turned(x):
                angle = np.arange(x.shape[2], dtype=kind)[:, None] * kind(10000) ** -(
                    np.arange(0, x.shape[3], 2, dtype=kind) / kind(x.shape[3])
                )
                a, b = np.split(x, 2, axis=-1)
                cos, sin = np.cos(angle), np.sin(angle)
                return np.concatenate([a * cos - b * sin, a * sin + b * cos], -1)

            s = turned(q) @ turned(k).swapaxes(-1, -2) * q.shape[-1] ** -0.5
            p = np.exp(s - s.max(-1, keepdims=True))
            return p / p.sum(-1, keepdims=True) @ v

        return rotary

    choose = {"dtype": "float64", "families": "self", "lengths": SOME}
    exact, rough, half = (conform(turning(one), "rotary", **choose) for one in (np.float64, np.float32, np.float16))
    assert (exact.ok, exact.arithmetic) == (True, "float64 throughout")
    assert (rough.ok, rough.arithmetic) == (True, "float64 throughout, angles in float32")
    assert not half.ok


def test_float64_that_is_cast_to_float32_is_told_so():
    def cast(q, k, v):
        return rp.attention(*(x.astype(np.float32) for x in (q, k, v)), backend="numpy").astype(q.dtype)

    choose = {"dtype": "float64", "families": "self", "lengths": SOME, "excluded": "grouped_heads"}
    report = conform(cast, "plain", **choose)
    assert report.causes == ("float32 on the way",)
    assert "say --arithmetic float32" in report.text()
    assert conform(cast, "plain", arithmetic="float32", **choose).ok


def test_typical_errors_are_no_matter_of_a_few():
    x = np.ones((100, 3))
    x[0] = 1e9
    assert typical(x) == 1
    assert typical(np.zeros((0, 3))) == 0
    assert list(arithmetics(format_of("float16"))) == ["float32", "half_products", "stored", "half_sums"]


# ---------------------------------------------------------------------------------------------- conventions


def empty_rows(value):
    """Softmax as frameworks have it, for rows without keys."""

    def attend(q, k, v, mask=None):
        s = q @ k.swapaxes(-1, -2) * q.dtype.type(q.shape[-1] ** -0.5)
        s = s if mask is None else np.where(mask, s, q.dtype.type(value))
        with np.errstate(all="ignore"):
            p = np.exp(s - s.max(-1, keepdims=True))
            return p / p.sum(-1, keepdims=True) @ v

    return attend


@pytest.mark.parametrize("value", [-np.inf, -1e9])
def test_rows_without_keys_are_a_convention(value):
    choose = {"families": ("masks", "excluded_rows", "nan_excluded"), "supports": ["mask"]}
    report = conform(empty_rows(value), "plain", **{**choose, "families": None, "lengths": (2, 33)})
    assert {one.name for one in report.families if one.verdict == "convention"} == {"excluded_rows", "nan_excluded"}
    assert report.exit_code == 1
    assert "right but for a difference of convention in excluded_rows, nan_excluded" in report.summary
    meant = conform(empty_rows(value), "plain", supports=["mask"], lengths=(2, 33), conventions="torch")
    assert meant.ok
    assert "by another convention: excluded_rows, nan_excluded" in meant.summary
    # FlashAttention gives 0 to rows without keys.
    flash = conform(empty_rows(value), "plain", supports=["mask"], lengths=(2, 33), conventions="flash")
    assert flash.exit_code == 1
    with pytest.raises(rp.RelposValueError, match="conventions"):
        conform(empty_rows(value), "plain", conventions="jax")


def test_a_mistake_beside_a_convention_is_a_mistake():
    def unscaled(q, k, v, mask=None):
        return empty_rows(-np.inf)(q * q.dtype.type(q.shape[-1] ** 0.5), k, v, mask)

    report = conform(unscaled, "plain", supports=["mask"], lengths=(2, 33), conventions="torch")
    assert report.family("excluded_rows").verdict == "wrong"


def test_alignment_top_left_is_a_convention_of_some():
    def top_left(q, k, v, causal=False):
        mask = np.tril(np.ones((1, 1, q.shape[2], k.shape[2]), bool)) if causal else None
        return rp.attention(q, k, v, mask=mask, backend="numpy")

    choose = {"lengths": (2, 33)}
    report = conform(top_left, "plain", **choose)
    assert report.family("excluded_rows").verdict == "convention"  # more queries than keys
    assert report.family("decoding").verdict == "wrong"
    for name, code in (("torch", 0), ("onnx", 0), ("flash", 1)):
        assert conform(top_left, "plain", conventions=name, **choose).exit_code == code


def test_infinite_log_sum_exps_are_flashs():
    inf = kernel(lse=lambda at, x: np.where(np.isneginf(x), np.inf, x))
    choose = {"families": "excluded_rows", "lengths": (2, 33)}
    report = conform(inf, "plain", **choose)
    assert report.family("excluded_rows").verdict == "convention"
    assert conform(inf, "plain", conventions="flash", **choose).ok


def test_borders_that_a_logarithm_decides():
    """In float32 vector code may decide a border exactly; who decides all of them exactly is another variant."""

    def borders(exact):
        def attend(q, k, v, table, max_distance=128):
            rounding = "exact" if exact(max_distance) else "float32"
            position = rp.T5(table, max_distance=max_distance, rounding=rounding)
            return rp.attention(q, k, v, position=position, backend="numpy")

        return conform(attend, "t5", variant="float32", families=("self", "borders"), lengths=None)

    assert borders(lambda most: most == 49).ok
    report = borders(lambda most: True)
    assert report.exit_code == 1
    assert "variant 'exact'" in report.family("borders").cause


def test_always_by_the_case():
    def fixed(q, k, v):
        return rp.attention(q, k, v, scale=(3 * q.shape[-1]) ** -0.5, backend="numpy")

    def always(case):
        return {"scale": (3 * case.q.shape[-1]) ** -0.5}

    assert conform(fixed, "plain", always=always, families="self").ok
    with pytest.raises(rp.RelposValueError, match="always: factor"):
        conform(fixed, "plain", always=lambda case: {"factor": 1})


# ---------------------------------------------------------------------------------------------- several calls as one


def every(q, k, v, *, causal=False, key_lengths=None, offset=None, segments=None, mask=None, block_table=None,
          dropout_mask=None, dropout=0.0, return_lse=False):  # fmt: skip
    """All ways."""
    given = {"causal": causal, "return_lse": return_lse, "backend": "numpy"}
    if block_table is not None:
        return rp.paged_attention(q, k, v, block_table=block_table, key_lengths=key_lengths, **given)
    if dropout_mask is not None:
        p = np.exp(rp.logits(q, k) - rp.attention(q, k, v, return_lse=True)[1][..., None])
        v = np.repeat(v, q.shape[1] // v.shape[1], 1)
        out = (p * dropout_mask / (1 - dropout) @ v).astype(q.dtype)
        return (out, np.zeros(out.shape[:3], out.dtype)) if return_lse else out
    return rp.attention(q, k, v, key_lengths=key_lengths, offset=offset, segments=segments, mask=mask, **given)


def test_every_way_runs_and_is_right():
    report = conform(every, "plain", families="ragged")
    assert report.ok, report.text()
    assert report.family("ragged").ran == 2 * len(RAGGED)
    assert tuple(WAYS) == RAGGED
    # What takes a number is asked for arrays on request alone.
    family = conform(every, "plain", lengths=(1, 5, 33, 65, 129), excluded="long").family("ragged")
    assert {one.edge.rpartition("_")[0] for one in family.findings if one.verdict == "not run"} == {
        "offsets",
        "static_cache",
    }


def broken(way):
    """`every` that does one of the ways wrongly."""

    def attend(q, k, v, **given):
        if way == "segments":
            given.pop("segments", None)
        if way == "offsets" and isinstance(given.get("offset"), np.ndarray):
            given["offset"] = np.full_like(given["offset"], given["offset"][0])
        if way == "static_cache" and isinstance(given.get("offset"), str):
            given |= {"offset": k.shape[2] - q.shape[2]}
        if way == "paged" and given.get("block_table") is not None:
            given["block_table"] = np.sort(given["block_table"], axis=-1)
        if way == "dropped" and given.get("dropout_mask") is not None:
            given["dropout_mask"] = given["dropout_mask"] * (1 - given["dropout"])
        found = every(q, k, v, **given)
        if way == "merged" and given.get("return_lse"):
            return found[0], found[1] / 2
        return found

    attend.__signature__ = __import__("inspect").signature(every)
    return attend


@pytest.mark.parametrize("way", RAGGED)
def test_every_way_done_wrongly_fails(way):
    report = conform(broken(way), "plain", families="ragged")
    wrong = {one.edge.rpartition("_")[0] for one in report.family("ragged").findings if one.verdict == "wrong"}
    assert wrong == {way}
    if way == "segments":
        assert report.causes == ("ignores segments",)


def test_schemes_with_tables_have_them_too():
    def attend(q, k, v, table, causal=False, segments=None, block_table=None, key_lengths=None):
        position = rp.T5(table)
        if block_table is not None:
            given = {"block_table": block_table, "key_lengths": key_lengths}
            return rp.paged_attention(q, k, v, position=position, causal=causal, **given)
        return rp.attention(q, k, v, position=position, causal=causal, segments=segments)

    supports = ["causal", "segments", "paged", "cross", "key_lengths"]
    family = conform(attend, "t5", families="ragged", supports=supports).family("ragged")
    assert {one.edge.rpartition("_")[0] for one in family.findings if one.verdict == "right"} == {"segments", "paged"}


# ---------------------------------------------------------------------------------------------- causes


def test_a_cause_that_ordinary_cases_contradict_is_none():
    """Where scores are large, one more score of 0 looks like the padding of a tile."""
    one_more = kernel(
        masked=lambda at, s: np.concatenate([s, np.zeros((*s.shape[:-1], 1), s.dtype)], -1),
        values=lambda at, v: np.pad(v, [(0, 0), (0, 0), (0, 1), (0, 0)]),
    )
    report = conform(one_more, "plain", families=("self", "large_scores"), lengths=(2, 33, 65))
    assert report.exit_code == 1
    assert set(report.causes) <= {"adds 1 to the sum of exponentials, as a sink of score 0 would"}


def test_the_kernel_of_t5_computes_in_float32():
    assert conform(t5(), "t5", families="self").arithmetic == "float32 throughout"


def test_the_tile_is_the_largest_that_fits():
    places = [np.arange(count) >= count // 64 * 64 for count in (66, 131)]
    assert outputs._words(places, "query") == "for what follows the last whole tile of 64, by query,"
    assert outputs._words([*places, np.arange(70) >= 32], "query") == ""


def test_a_cause_holds_in_every_case():
    """Powers of 2 at 33 tokens alone are no log-sum-exp in powers of 2."""

    def attend(q, k, v, causal=False, return_lse=False):
        out, lse = rp.attention(q, k, v, causal=causal, return_lse=True, backend="numpy")
        return (out, lse / np.float32(np.log(2)) if q.shape[2] == 33 else lse + 1) if return_lse else out

    words = "log-sum-exp in powers of 2 in place of e"
    for lengths, named in (((33,), True), ((33, 65), False)):
        report = conform(attend, "plain", families="self", lengths=lengths)
        assert report.exit_code == 1
        assert any(words in cause for cause in report.causes) == named


def test_an_option_that_is_off_is_no_condition():
    """Cases that pass ``causal=False`` have nothing that others lack."""
    one = testing.example("plain", size="tiny")
    off, on = (replace(one, kwargs={"causal": causal}) for causal in (False, True))
    assert condition([off], [replace(one, kwargs={})]) is None
    assert condition([on], [off]) == ", only with causal"


def test_a_result_that_a_later_call_overwrites_is_wrong():
    """Its numbers are right until the next call of the same shape."""
    kept = {}

    def attend(q, k, v):
        out = rp.attention(q, k, v, backend="numpy")
        shared = kept.setdefault((out.shape, out.dtype), out)
        shared[...] = out
        return shared

    report = conform(attend, "plain", families=("self", "calls"), lengths=33)
    assert report.family("self").verdict == "right"
    assert report.family("calls").verdict == "wrong"
    assert "an array that a later call overwrites" in report.family("calls").cause


def test_results_that_differ_from_call_to_call_are_told():
    draws = np.random.default_rng(0)

    def noisy(q, k, v):
        out = rp.attention(q, k, v, backend="numpy")
        return out + (1e-3 * draws.standard_normal(out.shape)).astype(out.dtype)

    (cause,) = conform(noisy, "plain", families="self", lengths=33).causes
    assert cause.startswith("two calls with the same numbers give different results")


@pytest.mark.parametrize(("factor", "words"), [(0.5, "half of"), (2, "twice")])
def test_another_max_distance_is_told(factor, words):
    def attend(q, k, v, table, max_distance=128, bidirectional=True):
        position = rp.T5(table, max_distance=int(factor * max_distance), bidirectional=bidirectional)
        return rp.attention(q, k, v, position=position, backend="numpy")

    report = conform(attend, "t5", families="self", lengths=(33, 129, 300))
    assert report.causes == (f"max_distance is {words} what is meant",)


def test_rows_of_a_window_with_the_other_stride_are_told():
    def attend(q, k, v, table, grid):
        height, width = grid
        y, x = np.divmod(np.arange(height * width), width)
        rows = (y[:, None] - y + height - 1) * (2 * height - 1) + x[:, None] - x + width - 1
        bias = np.moveaxis(table[np.minimum(rows, len(table) - 1)], -1, 0)
        return rp.attention(q, k, v, mask=bias.astype(q.dtype), backend="numpy")

    report = conform(attend, "window", families="self")
    assert report.causes == ("counts 2 h - 1 columns where the table has 2 w - 1",)
