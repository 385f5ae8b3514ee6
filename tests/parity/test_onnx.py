"""ONNX: the standard's own test cases of Attention (opsets 23 to 25) and RotaryEmbedding, inputs and tolerances too.

ONNX counts query i from the first key unless there is a cache: offset 0, the number of cached keys, or the number of
real keys minus L_q, one per batch item. Here that is always given as ``offset``.
"""

import warnings

import numpy as np
import pytest

import relpos_np as rp

onnx = pytest.importorskip("onnx")
node_cases = pytest.importorskip("onnx.backend.test.case.node")
ml_dtypes = pytest.importorskip("ml_dtypes")

# All cases of onnx 1.23, by name without "test_attention" and "test_rotary_embedding" ("-" for nothing more), so that
# none is left out by accident: a new one must be looked at and added.
ATTENTION = """
_4d _4d_fp16 _4d_gqa _4d_diff_heads_sizes _4d_scaled _4d_gqa_scaled _4d_diff_heads_sizes_scaled _4d_causal
_4d_gqa_causal _4d_diff_heads_sizes_causal _4d_attn_mask _4d_attn_mask_3d _4d_attn_mask_3d_causal _4d_attn_mask_4d
_4d_attn_mask_4d_causal _4d_attn_mask_bool _4d_attn_mask_bool_4d _4d_gqa_attn_mask _4d_diff_heads_sizes_attn_mask
_4d_with_past_and_present _4d_gqa_with_past_and_present _4d_gqa_with_past_and_present_fp16
_4d_diff_heads_with_past_and_present _4d_diff_heads_with_past_and_present_mask3d
_4d_diff_heads_with_past_and_present_mask4d _4d_softcap _4d_gqa_softcap _4d_diff_heads_sizes_softcap
_4d_with_qk_matmul _4d_with_qk_matmul_bias _4d_with_qk_matmul_softcap _4d_with_qk_matmul_softmax
_4d_with_past_and_present_qk_matmul_bias _4d_with_past_and_present_qk_matmul_bias_3d_mask
_4d_with_past_and_present_qk_matmul_bias_4d_mask _4d_with_past_and_present_qk_matmul_bias_3d_mask_causal
_4d_with_past_and_present_qk_matmul_bias_4d_mask_causal _4d_with_past_and_present_qk_matmul _3d _3d_gqa
_3d_diff_heads_sizes _3d_scaled _3d_gqa_scaled _3d_diff_heads_sizes_scaled _3d_causal _3d_gqa_causal
_3d_diff_heads_sizes_causal _3d_attn_mask _3d_gqa_attn_mask _3d_diff_heads_sizes_attn_mask _3d_softcap
_3d_gqa_softcap _3d_diff_heads_sizes_softcap _3d_with_past_and_present _3d_gqa_with_past_and_present
_3d_diff_heads_with_past_and_present _3d_with_past_and_present_qk_matmul _3d_with_past_and_present_qk_matmul_bias
_3d_with_past_and_present_qk_matmul_softcap _3d_with_past_and_present_qk_matmul_softmax _3d_transpose_verification
_4d_diff_heads_mask4d_padded_kv _4d_causal_bf16 _4d_causal_fp16 _4d_padded_kv_bf16 _4d_causal_padded_kv_bf16
_4d_attn_mask_causal_bf16 _3d_causal_bf16 _4d_softcap_neginf_mask _4d_softcap_neginf_mask_poison
_4d_gqa_causal_nonpad_decode _4d_gqa_causal_nonpad_decode_fp16 _4d_causal_nonpad_continued_prefill
_4d_causal_with_past_and_present _causal_boolmask_nan_robustness _23_boolmask_fullymasked_row_nan_robustness
_4d_causal_nonpad_negative_offset_structural_empty _23_fullymasked_qk_matmul_output_mode3_zero
_24_fullymasked_qk_matmul_output_mode3_zero _24_qk_matmul_output_mode3_softmax_precision
_4d_causal_nonpad_attn_mask_composition _4d_causal_nonpad_batch_prefill _local_window _bidirectional_window
_local_window_default _local_window_rank1_boolean_mask _local_window_with_past
_local_window_ext_cache_rank3_head_mask _local_window_ext_cache_rank4_batch_mask _local_window_ext_cache_rank2_mask
_local_window_ext_cache_float16_mask _3d_local_window _local_window_gqa_rank4_mask
"""
ROTARY = """
- _3d_input _interleaved _with_rotary_dim _with_interleaved_rotary_dim _no_position_ids _no_position_ids_interleaved
_no_position_ids_rotary_dim
"""


def attributes(case):
    node = case.model.graph.node[0]
    return {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}


def load_cases():
    """Cases of one node by operator; those where the operator is expanded to others test ONNX itself."""
    with warnings.catch_warnings():  # building the cases of other operators overflows and divides by zero
        warnings.simplefilter("ignore")
        cases = node_cases.collect_testcases(None)
    found = {"Attention": [], "RotaryEmbedding": []}
    for case in cases:
        nodes = case.model.graph.node
        if len(nodes) == 1 and nodes[0].op_type in found:
            found[nodes[0].op_type].append(case)
    return found


CASES = load_cases()


@pytest.mark.parametrize(
    ("operator", "prefix", "known"),
    [("Attention", "test_attention", ATTENTION), ("RotaryEmbedding", "test_rotary_embedding", ROTARY)],
)
def test_every_case_is_known_and_runs(operator, prefix, known):
    found = [case.name for case in CASES[operator]]
    assert len(set(found)) == len(found)
    assert all(name.startswith(prefix) for name in found)
    suffixes = {name.removeprefix(prefix) or "-" for name in found}
    assert suffixes - set(known.split()) == set(), "new cases: see what they ask, and add them"
    # An older release has fewer.
    assert len(suffixes) >= 0.8 * len(known.split())


def named(names, arrays):
    """Inputs or outputs by name; optional ones left out of a node have an empty name and no array."""
    return dict(zip([name for name in names if name], arrays, strict=True))


def split_heads(x, heads):
    """(B, L, H*D) to (B, H, L, D); four axes stay as they are."""
    if x.ndim == 4:
        return x
    batch, length, width = x.shape
    return x.reshape(batch, length, heads, width // heads).transpose(0, 2, 1, 3)


def as_call(case):
    """The arguments of rp.attention."""
    options, node = attributes(case), case.model.graph.node[0]
    given = named(node.input, case.data_sets[0][0])
    q = split_heads(given["Q"], options.get("q_num_heads"))
    k = split_heads(given["K"], options.get("kv_num_heads"))
    v = split_heads(given["V"], options.get("kv_num_heads"))
    offset = 0
    if "past_key" in given:
        offset = given["past_key"].shape[2]
        k = np.concatenate([given["past_key"], k], axis=2)
        v = np.concatenate([given["past_value"], v], axis=2)

    mask = given.get("attn_mask")
    if mask is not None:
        missing = k.shape[2] - mask.shape[-1] if mask.shape[-1] > 1 else 0
        fill = False if mask.dtype == bool else -np.inf  # a mask that is too short hides the keys beyond it
        mask = np.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, missing)], constant_values=fill)
        mask = np.broadcast_to(mask, (*q.shape[:3], k.shape[2]))
    left, right = options.get("left_window_size", -1), options.get("right_window_size", -1)
    window = (left if left >= 0 else None, right if right >= 0 else None)
    lengths = given.get("nonpad_kv_seqlen")
    return {
        "q": q,
        "k": k,
        "v": v,
        "mask": mask,
        "causal": bool(options.get("is_causal", 0)),
        "window": None if window == (None, None) else window,
        "scale": options.get("scale"),
        "softcap": options.get("softcap") or None,
        "offset": offset if lengths is None else lengths - q.shape[2],
        "key_lengths": lengths,
    }


def run(case, backend):
    """Output Y, and qk_matmul_output: raw, after the softcap, with mask, or after the softmax."""
    mode, call = attributes(case).get("qk_matmul_output_mode", 0), as_call(case)
    y = rp.attention(**call, backend=backend)
    k, v = call["k"], call.pop("v")
    if mode == 3:  # the probabilities are what attention makes of unit vectors
        units = np.broadcast_to(np.eye(k.shape[2], dtype=v.dtype), (*v.shape[:3], k.shape[2]))
        matrix = rp.attention(**call, v=units, backend=backend)
    else:
        kept = (("q", "k", "scale"), ("q", "k", "scale", "softcap"), call)[mode]
        matrix = rp.logits(**{name: call[name] for name in kept}, backend=backend)
    if case.data_sets[0][0][0].ndim == 3:
        y = y.transpose(0, 2, 1, 3).reshape(y.shape[0], y.shape[2], -1)
    return {"Y": y, "qk_matmul_output": matrix.astype(y.dtype), "present_key": k, "present_value": v}


@pytest.mark.parametrize("backend", ["numpy", "terms", "numba"])
@pytest.mark.parametrize("case", CASES["Attention"], ids=lambda case: case.name)
def test_attention(case, backend):
    if backend == "numba":
        pytest.importorskip("numba")
    expected = named(case.model.graph.node[0].output, case.data_sets[0][1])
    got = run(case, backend)
    assert set(expected) <= set(got)
    for name, output in expected.items():
        assert got[name].dtype == output.dtype
        found, wanted, rtol, atol = got[name], output, case.rtol, case.atol
        if wanted.dtype == ml_dtypes.bfloat16:
            # ONNX's own runner allows bfloat16 2^-6; its reference rounds every intermediate result to it.
            found, wanted, rtol = found.astype(np.float32), wanted.astype(np.float32), 2.0**-6
        np.testing.assert_allclose(found, wanted, rtol=rtol, atol=atol, err_msg=name)
        if output.dtype == np.float32:  # ONNX's tolerance is wide
            np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("case", CASES["RotaryEmbedding"], ids=lambda case: case.name)
def test_rotary_embedding(case):
    """The formula alone: the tables of these cases are random numbers, not cosines and sines."""
    node = case.model.graph.node[0]
    options = attributes(case)
    x, cos, sin, *rest = case.data_sets[0][0]
    (expected,) = case.data_sets[0][1]
    if rest:
        cos, sin = cos[rest[0]], sin[rest[0]]
    assert set(options) <= {"interleaved", "num_heads", "rotary_embedding_dim"}, node.name
    pairs = (options.get("rotary_embedding_dim") or 2 * cos.shape[-1]) // 2
    cos, sin = cos[..., :pairs], sin[..., :pairs]
    matrices = np.stack([np.stack([cos, -sin], -1), np.stack([sin, cos], -1)], -2)[:, None]
    heads = split_heads(x, options.get("num_heads"))
    found = rp.reference.rotate_pairs(heads, matrices, layout="interleaved" if options.get("interleaved") else "half")
    if x.ndim == 3:
        found = found.swapaxes(1, 2).reshape(expected.shape)
    assert found.dtype == expected.dtype
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("dim", [8, 4])
@pytest.mark.parametrize("backend", ["numpy", "terms", "numba"])
def test_rotary_scheme_is_their_operator(layout, dim, backend):
    """Their operator with tables of cosines and sines and position_ids, then their attention, is one call of ours."""
    if backend == "numba":
        pytest.importorskip("numba")
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, heads, 5, 8)).astype(np.float32) for heads in (4, 2, 2))
    ids = rng.integers(0, 50, (2, 5))
    angle = np.multiply.outer(np.arange(50), rp.reference.rotary_frequencies(dim))
    tables = [table.astype(np.float32) for table in (np.cos(angle), np.sin(angle))]
    operator = onnx.helper.make_node(
        "RotaryEmbedding",
        ["x", "cos", "sin", "ids"],
        ["y"],
        interleaved=int(layout == "interleaved"),
        rotary_embedding_dim=dim if dim < 8 else 0,
    )
    kinds = {"x": onnx.TensorProto.FLOAT, "cos": onnx.TensorProto.FLOAT, "sin": onnx.TensorProto.FLOAT}
    inputs = [onnx.helper.make_tensor_value_info(n, kind, None) for n, kind in kinds.items()]
    inputs.append(onnx.helper.make_tensor_value_info("ids", onnx.TensorProto.INT64, None))
    outputs = [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)]
    model = onnx.helper.make_model(
        onnx.helper.make_graph([operator], "rotary", inputs, outputs),
        opset_imports=[onnx.helper.make_opsetid("", 23)],
    )
    session = pytest.importorskip("onnx.reference").ReferenceEvaluator(model)
    turned = [session.run(None, {"x": x, "cos": tables[0], "sin": tables[1], "ids": ids})[0] for x in (q, k)]
    expected = rp.attention(*turned, v, causal=True, backend="numpy")
    scheme = rp.Rotary(dim, layout=layout, positions=ids)
    found = rp.attention(q, k, v, position=scheme, causal=True, backend=backend)
    np.testing.assert_allclose(found, expected, rtol=0, atol=4e-6)
