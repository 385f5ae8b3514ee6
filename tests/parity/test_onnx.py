"""ONNX: the standard's own test cases of its Attention operator, opsets 23 to 25, with their inputs and tolerances.

ONNX counts query i from the first key unless there is a cache: offset 0, the number of cached keys, or the number of
real keys minus L_q, one per batch item. Here that is always given as ``offset``.
"""

import warnings

import numpy as np
import pytest

import relpos_np as rp

pytestmark = pytest.mark.parity
onnx = pytest.importorskip("onnx")
node_cases = pytest.importorskip("onnx.backend.test.case.node")
ml_dtypes = pytest.importorskip("ml_dtypes")

# How many cases of onnx 1.23 run here, so that a skip cannot hide. Of its 93, 11 ask for a softcap, which the API does
# not have, and 5 are in bfloat16 with every intermediate rounded to it, which NumPy does not have.
RUN = 77


def attributes(case):
    node = case.model.graph.node[0]
    return {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}


def is_attention(case):
    nodes = case.model.graph.node
    return len(nodes) == 1 and nodes[0].op_type == "Attention"


def in_bfloat16(case):
    return case.data_sets[0][0][0].dtype == ml_dtypes.bfloat16


def load_cases():
    with warnings.catch_warnings():  # building the cases of other operators overflows and divides by zero
        warnings.simplefilter("ignore")
        cases = node_cases.collect_testcases(None)
    return [case for case in cases if is_attention(case)]


CASES = load_cases()
RUNNABLE = [case for case in CASES if not attributes(case).get("softcap") and not in_bfloat16(case)]


def test_enough_cases_run():
    assert len(RUNNABLE) >= RUN


def named(names, arrays):
    """Inputs or outputs by name; optional ones left out of a node have an empty name and no array."""
    return dict(zip([name for name in names if name], arrays, strict=True))


def split_heads(x, heads):
    """(B, L, H*D) to (B, H, L, D); four axes stay as they are."""
    if x.ndim == 4:
        return x
    batch, length, width = x.shape
    return x.reshape(batch, length, heads, width // heads).transpose(0, 2, 1, 3)


def as_calls(case):
    """The arguments of rp.attention: one set, or one per batch item where each item has its own offset."""
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
    shared = {
        "causal": bool(options.get("is_causal", 0)),
        "window": None if window == (None, None) else window,
        "scale": options.get("scale"),
    }
    lengths = given.get("nonpad_kv_seqlen")
    if lengths is None:
        return [(slice(None), {"q": q, "k": k, "v": v, "mask": mask, "offset": offset, **shared})]
    calls = []
    for b, length in enumerate(lengths.tolist()):
        item = slice(b, b + 1)
        own = {
            "mask": None if mask is None else mask[item],
            "offset": length - q.shape[2],
            "key_lengths": np.array([length]),
        }
        calls.append((item, {"q": q[item], "k": k[item], "v": v[item], **own, **shared}))
    return calls


def run(case, backend):
    """Output Y and, for the modes that the API can state, qk_matmul_output: raw, with bias, or after the softmax."""
    options = attributes(case)
    mode = options.get("qk_matmul_output_mode", 0)
    outputs, matrices = [], []
    for _, call in as_calls(case):
        outputs.append(rp.attention(**call, backend=backend))
        value = call.pop("v")
        length = call["k"].shape[2]
        if mode == 0:
            matrices.append(rp.logits(call["q"], call["k"], scale=call["scale"], backend=backend))
        elif mode == 2:
            matrices.append(rp.logits(**call, backend=backend))
        elif mode == 3:  # the probabilities are what attention makes of unit vectors
            units = np.broadcast_to(np.eye(length, dtype=value.dtype), (*value.shape[:3], length))
            matrices.append(rp.attention(**call, v=units, backend=backend))
    y = np.concatenate(outputs)
    if case.data_sets[0][0][0].ndim == 3:
        y = y.transpose(0, 2, 1, 3).reshape(y.shape[0], y.shape[2], -1)
    return {"Y": y, "qk_matmul_output": np.concatenate(matrices)}


@pytest.mark.parametrize("backend", ["numpy", "terms", "numba"])
@pytest.mark.parametrize("case", RUNNABLE, ids=lambda case: case.name)
def test_case(case, backend):
    if backend == "numba":
        pytest.importorskip("numba")
    expected = named(case.model.graph.node[0].output, case.data_sets[0][1])
    got = run(case, backend)
    for name in {"Y", "qk_matmul_output"} & set(expected):
        assert got[name].dtype == expected[name].dtype
        np.testing.assert_allclose(got[name], expected[name], rtol=case.rtol, atol=case.atol, err_msg=name)
