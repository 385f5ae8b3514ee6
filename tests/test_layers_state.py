"""Reading weights: prefixes, missing names, .safetensors files, and what is never read."""

import json
import subprocess
import sys

import numpy as np
import pytest

import relpos_np as rp
from relpos_np import layers
from tests.test_layers import ml_dtypes_bfloat16, t5_state


def test_a_missing_tensor_names_the_nearest(rng):
    state = t5_state(rng, "encoder.block.0.layer.0.SelfAttention")
    with pytest.raises(rp.RelposValueError) as error:
        layers.MultiHeadAttention.from_state_dict(state, prefix="block.0.layer.0.SelfAttention", format="t5")
    assert "block.0.layer.0.SelfAttention.q.weight: no such tensor" in str(error.value)
    assert "encoder.block.0.layer.0.SelfAttention.q.weight" in str(error.value)
    with pytest.raises(rp.RelposValueError, match="x: no such tensor; the source holds none"):
        layers.State({}).take("x")


def test_state_is_a_view_with_a_prefix():
    inner = layers.State(layers.State({"a.b.c": [1.0], "a.d": [2.0], "e": [3.0]}, "a"), "b.")
    assert inner.prefix == "a.b."
    assert inner.names() == ["c"]
    assert inner.has("c")
    assert not inner.has("d")
    assert inner.get("d") is None
    assert inner.take("c").tolist() == [1.0]
    assert inner.find("d").tolist() == [2.0]
    assert inner.find("x", "e").tolist() == [3.0]
    assert inner.find("x") is None
    assert "1 tensors below 'a.b.'" in repr(inner)
    found = layers.tensors(layers.State({"a.b": [1.0], "c": [2.0]}, "a"))
    assert {name: value.tolist() for name, value in found.items()} == {"b": [1.0]}


class Unreadable:
    def __array__(self, *_, **__):
        raise TypeError("can't convert cuda:0 device type tensor to numpy")


def test_values_that_are_no_arrays():
    state = layers.State({"gpu": Unreadable(), "thing": object(), "ragged": [[1.0], [1.0, 2.0]]})
    with pytest.raises(rp.RelposTypeError, match=r"gpu: Unreadable cannot be read as an array: can't convert cuda"):
        state.take("gpu")
    with pytest.raises(rp.RelposTypeError, match="thing: expected an array of numbers, found object"):
        state.take("thing")
    with pytest.raises(rp.RelposTypeError, match="ragged: list cannot be read"):
        state.take("ragged")
    with pytest.raises(rp.RelposTypeError, match="source: expected a mapping or a path, found list"):
        layers.tensors([1])
    with pytest.raises(rp.RelposTypeError, match="prefix: expected a string, found int"):
        layers.State({}, 3)


@pytest.mark.parametrize("name", ["model.bin", "model.pt", "model.pth", "model.ckpt", "model.pkl"])
def test_pickled_checkpoints_are_refused(tmp_path, name):
    """Even one that exists: its code would run."""
    path = tmp_path / name
    path.write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    with pytest.raises(rp.RelposValueError, match="pickled checkpoint, and reading one can run any code"):
        layers.tensors(path)


def test_safetensors_round_trip(tmp_path, backend, rng):
    numpy_files = pytest.importorskip("safetensors.numpy")
    state = {name: value.astype(np.float32) for name, value in t5_state(rng, "attention").items()}
    path = tmp_path / "model.safetensors"
    numpy_files.save_file(state | {"step": np.array(7)}, path)
    read = layers.MultiHeadAttention.from_state_dict
    x = rng.standard_normal((2, 6, 8)).astype(np.float32)
    expected = read(state, prefix="attention", format="t5")(x, backend=backend)
    for source in (path, str(path), layers.tensors(path), layers.State(path)):
        layer = read(source, prefix="attention", format="t5")
        np.testing.assert_array_equal(layer(x, backend=backend), expected)
    found = layers.tensors(path)
    assert sorted(found) == sorted([*state, "step"])
    assert len(found) == 6
    assert "step" in found
    assert found["step"].shape == ()
    with pytest.raises(KeyError):
        found["nothing"]
    assert "6 tensors" in repr(found)


def test_safetensors_of_half_precision(tmp_path, rng):
    """Bfloat16 exactly, in its own type; a module widens it."""
    bfloat16 = ml_dtypes_bfloat16()
    numpy_files = pytest.importorskip("safetensors.numpy")
    state = {name: value.astype(np.float32) for name, value in t5_state(rng, "a").items()}
    halves = {name: value.astype(bfloat16) for name, value in state.items()}
    path = tmp_path / "half.safetensors"
    numpy_files.save_file(halves | {"f16": np.array([65504.0, 6e-8], np.float16)}, path)
    # In another process, where nobody has imported ml_dtypes before.
    code = (
        "import sys, numpy as np\n"
        "from relpos_np import layers\n"
        f"state = layers.State({str(path)!r}, 'a')\n"
        "assert not {'safetensors.torch', 'torch', 'numba', 'ml_dtypes'} & set(sys.modules)\n"
        "q = state.take('q.weight')\n"
        "print(q.dtype, float(q.astype(np.float32).sum(dtype=np.float64)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    dtype, total = run.stdout.split()
    assert dtype == "bfloat16"
    assert float(total) == halves["a.q.weight"].astype(np.float64).sum()

    found = layers.tensors(path)
    for name, value in halves.items():
        assert found[name].dtype == bfloat16
        np.testing.assert_array_equal(found[name].view(np.uint16), value.view(np.uint16))
    assert found["f16"].tolist() == [65504.0, float(np.float16(6e-8))]
    layer = layers.MultiHeadAttention.from_state_dict(path, prefix="a", format="t5")
    assert layer.query.weight.dtype == np.float32
    np.testing.assert_array_equal(layer.query.weight, halves["a.q.weight"].astype(np.float32))


def test_safetensors_that_cannot_be_read(tmp_path):
    pytest.importorskip("safetensors")
    with pytest.raises(rp.RelposValueError, match=r"missing\.safetensors: no such file"):
        layers.tensors(tmp_path / "missing.safetensors")
    with pytest.raises(rp.RelposValueError, match=r"ends in \.safetensors or .*, found .*model\.npz"):
        layers.tensors(tmp_path / "model.npz")
    header = b'{"w":{"dtype":"F8_E4M3","shape":[2],"data_offsets":[0,2]}}'
    path = tmp_path / "eight.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\x01\x02")
    with pytest.raises(rp.RelposTypeError, match=r"w: .* holds it as F8_E4M3, expected one of F64"):
        layers.tensors(path)["w"]


def test_half_precision_without_its_package(tmp_path, monkeypatch):
    """The same numbers, in float32: of a file, and of a state dict of PyTorch."""
    bfloat16 = ml_dtypes_bfloat16()
    numbers = np.array([1.0, -2.5, 3e38, 0.0, np.inf], np.float32).astype(bfloat16)
    path = tmp_path / "half.safetensors"
    pytest.importorskip("safetensors.numpy").save_file({"w": numbers}, path)
    states = [layers.tensors(path), layers.tensors({"w": LikeTorch(numbers)})]
    for state in states:
        assert state["w"].dtype == bfloat16
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    for state in states:
        assert state["w"].dtype == np.float32
        np.testing.assert_array_equal(state["w"], numbers.astype(np.float32))


class LikeTorch:
    """A tensor that NumPy has no type for, as PyTorch says it."""

    dtype = "torch.bfloat16"

    def __init__(self, numbers):
        self.numbers = numbers

    def float(self):
        return self.numbers.astype(np.float32)


def sharded(folder, state, files=2):
    """A checkpoint in several files, with the index beside them."""
    save = pytest.importorskip("safetensors.numpy").save_file
    names = list(state)
    where = {name: f"model-{n % files + 1:05}-of-{files:05}.safetensors" for n, name in enumerate(names)}
    for file in set(where.values()):
        save({name: state[name] for name in names if where[name] == file}, folder / file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": where}))
    return index


def test_a_layer_of_a_folder(tmp_path, rng):
    """The configuration and the files beside it: an index, a folder, and one file are the same weights."""
    config = {"model_type": "qwen3", "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    config |= {"head_dim": 16, "num_hidden_layers": 2}
    sizes = {"q_proj": (32, 32), "k_proj": (16, 32), "v_proj": (16, 32), "o_proj": (32, 32), "q_norm": 16, "k_norm": 16}
    state = {
        f"model.layers.{n}.self_attn.{name}.weight": rng.standard_normal(size).astype(np.float32)
        for n in range(2)
        for name, size in sizes.items()
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    index = sharded(tmp_path, state)
    x = rng.standard_normal((1, 5, 32))
    layer = rp.from_config(tmp_path, layer=1)
    expected = layer.run(x, state)
    for source in (tmp_path, str(index)):
        np.testing.assert_array_equal(layer.run(x, source), expected)
    found = layers.tensors(tmp_path)
    assert (len(found), list(found), "other" in found) == (12, list(state), False)
    single = tmp_path / "single"
    single.mkdir()
    pytest.importorskip("safetensors.numpy").save_file(state, single / "model.safetensors")
    np.testing.assert_array_equal(layer.run(x, single), expected)


def test_folders_and_indices_that_cannot_be_read(tmp_path):
    with pytest.raises(rp.RelposValueError, match=r"expected a folder with one \.safetensors file .* found none"):
        layers.tensors(tmp_path)
    index = sharded(tmp_path, {"a": np.zeros(2), "b": np.ones(2)})
    found = layers.tensors(index)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    assert found["a"].tolist() == [0, 0]
    with pytest.raises(rp.RelposValueError, match=r"model-00002-of-00002\.safetensors: no such file"):
        found["b"]
    for name in ("../model.safetensors", "/model.safetensors", "model.bin", 3):
        index.write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(rp.RelposValueError, match="expected a weight_map, of names of files beside it"):
            layers.tensors(index)
    index.write_text(json.dumps({"weight_map": {"c": "model-00001-of-00002.safetensors"}}))
    with pytest.raises(rp.RelposValueError, match=r"says that it is in model-00001.*, which does not have it"):
        layers.tensors(index)["c"]
    index.write_text("{")
    with pytest.raises(rp.RelposValueError, match="not a readable index"):
        layers.tensors(index)


def test_bad_published_tensors():
    state = {f"{name}_proj_weight": np.ones((8, 8)) for name in "qkv"} | {"out_proj.weight": np.ones((8, 8))}
    read = layers.MultiHeadAttention.from_state_dict
    assert read(state, format="torch", heads=2).query.bias is None
    with pytest.raises(rp.RelposValueError, match="heads: nothing in the source shows their number"):
        read(state, format="torch")
    with pytest.raises(rp.RelposValueError, match=r"bias_k: a learned key and value \(add_bias_kv\)"):
        read(state | {"bias_k": np.ones((1, 1, 8))}, format="torch", heads=2)
    stacked = {"in_proj_weight": np.ones((25, 8)), "out_proj.weight": np.ones((8, 8))}
    with pytest.raises(rp.RelposValueError, match=r"in_proj_weight: expected three stacked parts.*\(25, 8\)"):
        read(stacked, format="torch", heads=2)
    linear = {f"linear_{name}.weight": np.ones((8, 8)) for name in ("q", "k", "v", "out", "pos")}
    with pytest.raises(rp.RelposValueError, match="pos_bias_u: no such tensor, here or above"):
        layers.RelativeMultiHeadAttention.from_state_dict(linear, format="espnet")


def test_tables_that_are_not_symmetric(rng):
    """Wav2Vec2-BERT counts j - i from -left; SpeechT5 counts i - j from -m, with one row less for earlier keys."""
    x, table = rng.standard_normal((7, 8)), rng.standard_normal((6, 4))
    for publisher, names, key in (
        ("wav2vec2_bert", [f"linear_{n}" for n in ("q", "k", "v", "out")], "distance_embedding"),
        ("speecht5", [f"{n}_proj" for n in ("q", "k", "v", "out")], "pe_k"),
    ):
        weights = {f"{name}.weight": rng.standard_normal((8, 8)) / 3 for name in names}
        state = weights | {f"{key}.weight": table}
        layer = layers.MultiHeadAttention.from_state_dict(state, format=publisher, left=3, right=2)
        assert layer.heads == 2
        q, k, v, out = (weights[f"{name}.weight"] for name in names)
        expected = np.empty((7, 8))
        for h in range(2):
            cut = slice(4 * h, 4 * h + 4)
            for i in range(7):
                ask = (x @ q.T)[i, cut]
                s = np.empty(7)
                for j in range(7):
                    row = max(-3, min(2, j - i if publisher == "wav2vec2_bert" else i - j)) + 3
                    s[j] = ask @ ((x @ k.T)[j, cut] + table[row]) / 2
                p = np.exp(s - s.max())
                expected[i, cut] = p / p.sum() @ (x @ v.T)[:, cut]
        np.testing.assert_allclose(layer(x, backend="numpy"), expected @ out.T, rtol=0, atol=1e-12)


# ---------------------------------------------------------------------------------------------- arrays of schemes


def deberta_state(rng, *names, prefix="deberta.encoder.layer.1.attention.self."):
    state = {"deberta.encoder.rel_embeddings.weight": rng.standard_normal((6, 8)).astype(np.float32)}
    for name in names:
        state[f"{prefix}{name}.weight"] = rng.standard_normal((8, 8)).astype(np.float32)
        state[f"{prefix}{name}.bias"] = rng.standard_normal(8).astype(np.float32)
    return state


def test_arrays_that_layers_share_and_their_own(rng):
    state = {"model.encoder.layers.0.attention.rel_attn_embed.weight": np.ones((32, 2))}
    state |= {f"model.encoder.layers.{n}.attention.gru_rel_pos_const": np.full((1, 2, 1, 1), n) for n in (0, 1)}
    for name, shape in (("weight", (8, 3)), ("bias", (8,))):
        state[f"model.encoder.layers.1.attention.gru_rel_pos_linear.{name}"] = rng.standard_normal(shape)
    given = {"source": state, "prefix": "model.encoder.layers.1.attention"}
    assert layers.scheme_arrays(**given, format="wavlm")["table"].shape == (32, 2)
    gate = layers.scheme_arrays(**given, format="wavlm_gate")
    assert gate["const"][0, 0, 0, 0] == 1
    assert set(gate) == {"weight", "bias", "const"}
    with pytest.raises(
        rp.RelposValueError, match=r"layers.0.attention.gru_rel_pos_linear.weight: no such tensor, here"
    ):
        layers.scheme_arrays(state, prefix="model.encoder.layers.0.attention", format="wavlm_gate")


@pytest.mark.parametrize("table", ["relative_position_bias", "shared_position_bias"])
@pytest.mark.parametrize("above", ["", "beit.encoder.", "beit.encoder.layer.3.attention.attention."])
def test_a_table_where_any_version_has_it(table, above):
    state = {f"{above}{table}.relative_position_bias_table": np.ones((12, 2))}
    found = layers.scheme_arrays(state, prefix="beit.encoder.layer.3.attention.attention", format="beit")
    assert rp.BEiT(**found, grid=(2, 2)).table.shape == (12, 2)


@pytest.mark.parametrize("names", [("pos_key_proj", "pos_query_proj"), ("key_proj", "query_proj"), ("pos_key_proj",)])
@pytest.mark.parametrize("norm", [False, True])
def test_deberta_by_hand(rng, names, norm):
    """Embedding, normalisation, projection and heads, in float64 and rounded once."""
    state, prefix = deberta_state(rng, *names), "deberta.encoder.layer.1.attention.self."
    wide = state["deberta.encoder.rel_embeddings.weight"].astype(np.float64)
    if norm:
        state["deberta.encoder.LayerNorm.weight"], state["deberta.encoder.LayerNorm.bias"] = np.full(8, 2.0), np.ones(8)
        wide = 2 * (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 0.25) + 1
    given = {"format": "deberta_v2", "heads": 2, "layer_norm_eps": 0.25}
    found = layers.scheme_arrays(state, prefix=prefix, **given)
    assert list(found) == ["pos_key", "pos_query"][: len(names)]
    for array, name in zip(found.values(), names, strict=True):
        flat = wide @ state[f"{prefix}{name}.weight"].astype(np.float64).T + state[f"{prefix}{name}.bias"]
        assert array.dtype == np.float32
        for head in (0, 1):
            np.testing.assert_allclose(array[head], flat[:, 4 * head : 4 * head + 4], rtol=1e-6, atol=1e-6)


def test_arrays_of_half_precision(rng):
    state = {name: x.astype(ml_dtypes_bfloat16()) for name, x in deberta_state(rng, "pos_proj", "pos_q_proj").items()}
    found = layers.scheme_arrays(state, prefix="deberta.encoder.layer.1.attention.self", format="deberta", heads=4)
    assert rp.DeBERTa(**found).pos_key.shape == (4, 6, 2)
    assert found["pos_query"].dtype == np.float32


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"format": "swin"}, "format: expected one of 'wavlm', .*; found 'swin'"),
        ({"format": "deberta"}, "heads: 'deberta' needs the number of heads"),
        ({"format": "deberta", "heads": 0}, "heads: expected at least 1"),
        ({"format": "deberta", "heads": 3}, r"pos_proj.weight: expected \(3 \* D, 8\), found \(8, 8\)"),
        ({"format": "deberta_v2", "heads": 2}, "key_proj.weight: no such tensor"),
        ({"format": "deberta", "heads": 2, "layer_norm_eps": 0}, "layer_norm_eps: expected a positive"),
        ({"format": "sam", "heads": 2}, "heads: only 'deberta' and 'deberta_v2' take it, found 2 for 'sam'"),
        ({"format": "sam"}, "rel_pos_h: no such tensor, here or above"),
        ({"format": "vits"}, r"emb_rel_k: expected shape \(1, rows, head_dim\), found \(2, 9, 4\)"),
    ],
)
def test_arrays_that_are_not_there(rng, options, words):
    prefix = "deberta.encoder.layer.1.attention.self."
    state = deberta_state(rng, "pos_proj") | {f"{prefix}emb_rel_{x}": np.ones((2, 9, 4)) for x in "kv"}
    with pytest.raises(rp.RelposError, match=words):
        layers.scheme_arrays(state, prefix=prefix, **options)
