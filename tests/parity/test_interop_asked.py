"""What models ask of their attention: each argument is computed, irrelevant for a reason, or an error that names it."""

import ast
from pathlib import Path

import numpy as np
import pytest

import relpos_np as rp

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.24")
pytest.importorskip("numba")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

from relpos_np.interop.transformers import asked, interface, register, used  # noqa: E402
from relpos_np.interop.transformers.masks import Mask, mask_of  # noqa: E402
from tests.parity.small import IDS, TEXT, small  # noqa: E402

OPERANDS = {"module", "query", "key", "value", "attention_mask"}
SOURCES = sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py"))


def asked_in(path):
    """Keyword arguments of calls of the interface in a file, and the attributes that its eager functions read."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found, attributes = set(), set()
    interfaces = {
        ast.unparse(target)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and "ALL_ATTENTION_FUNCTIONS.get" in ast.unparse(node)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in interfaces:
            found |= {x.arg for x in node.keywords if x.arg}
        if isinstance(node, ast.FunctionDef) and "eager_attention_forward" in node.name:
            module = node.args.args[0].arg
            attributes |= {
                x.attr for x in ast.walk(node) if isinstance(x, ast.Attribute) and ast.unparse(x.value) == module
            }
    return found, attributes


def test_every_argument_that_a_model_names_is_decided():
    decided = OPERANDS | asked.COMPUTED | {"output_attentions"}
    decided |= asked.IRRELEVANT.keys() | asked.OPTIONS.keys() | asked.REFUSED.keys()
    callers, names, attributes = 0, set(), set()
    for path in SOURCES:
        if "ALL_ATTENTION_FUNCTIONS" in (text := path.read_text(encoding="utf-8")):
            arguments, read = asked_in(path)
            callers += bool(arguments)
            names |= arguments
            attributes |= read
            assert "ALL_ATTENTION_FUNCTIONS.get_interface(" in text, path
    assert callers > 300
    assert names >= {"softcap", "s_aux", "sinks", "indices", "is_causal", "position_bias"}
    assert names - decided == set()
    assert attributes - asked.ATTRIBUTES.keys() == set()
    assert "sinks" in attributes


def test_tables_do_not_overlap():
    tables = [set(asked.COMPUTED), set(asked.IRRELEVANT), set(asked.OPTIONS), set(asked.REFUSED)]
    assert sum(map(len, tables)) == len(set().union(*tables))


@pytest.mark.parametrize("name", ["block_indices", "block_table", "seq_idx", "zeta"])
def test_an_argument_is_refused_by_name(name):
    model = small("Llama")
    register(model)
    with pytest.raises(rp.RelposValueError, match=rf"^{name}: LlamaAttention asks for it"):
        model(IDS, **{name: torch.ones(1)})
    expected = model(IDS).last_hidden_state
    assert torch.equal(model(IDS, **{name: None}).last_hidden_state, expected)


def test_options_are_handed_over_in_their_shape(monkeypatch):
    given = {}
    monkeypatch.setattr(interface, "attention", lambda *args, **options: given.update(options) or args[0])
    module, q = torch.nn.Module(), torch.randn(1, 4, 5, 8)
    module.is_causal = False
    interface.forward(module, q, q, q, None, sinks=torch.ones(1, 4, 5, 1), softcap=3.0)
    assert given["sinks"].shape == (1, 4, 5)
    assert given["softcap"] == 3.0
    given.clear()
    interface.forward(module, q, q, q, None, sinks=None)
    assert not {"sinks", "softcap"} & given.keys()


def test_a_model_that_appends_to_its_mask_is_refused_unless_it_is_known():
    """DeepSeek V4 appends 0 and -inf, and would turn -inf to True if its mask were of bools."""
    config = transformers.LlamaConfig()
    mask = mask_of(2, 5, 5, attention_mask=None, config=config)
    # Of two that were made here one is made.
    assert torch.equal(torch.cat([mask, mask], -1), mask.write().repeat(1, 1, 1, 2))
    for longer in (lambda x: torch.cat([x, mask.write()], -1), lambda x: torch.nn.functional.pad(x, (0, 2))):
        with pytest.raises(rp.RelposValueError, match=r"^mask: this model appends to its mask"):
            longer(mask)
    numbers = mask_of(2, 5, 5, attention_mask=None, config=transformers.DeepseekV4Config())
    assert numbers.dtype == torch.float32
    assert torch.equal(numbers == 0, mask.write())


def test_attributes_are_compared():
    q = torch.randn(1, 4, 5, 8)
    module = torch.nn.Module()
    module.is_causal = False
    module.num_key_value_groups = 2
    with pytest.raises(rp.RelposValueError, match="num_key_value_groups: Module has 2, with 4 heads of queries and 4"):
        interface.forward(module, q, q, q, None)
    module.num_key_value_groups, module.head_dim = 1, 16
    with pytest.raises(rp.RelposValueError, match="head_dim: Module has 16, and queries 8"):
        interface.forward(module, q, q, q, None)
    assert interface.forward(module, q, q, q, None, scaling=0.5)[0].shape == (1, 5, 4, 8)
    with pytest.raises(rp.RelposValueError, match=r"query: expected \(B, H, L, D\)"):
        interface.forward(module, q[0], q[0], q[0], None)


def test_an_attribute_that_only_a_new_model_s_eager_attention_reads(tmp_path, monkeypatch):
    """A file beside the class says what its attention reads: here a temperature, given by no argument."""
    (tmp_path / "modeling_new.py").write_text(
        "import torch\n"
        "class NewAttention(torch.nn.Module):\n"
        "    is_causal = False\n"
        "def eager_attention_forward(module, query, key, value, attention_mask, scaling=None, **kwargs):\n"
        "    return query * module.temperature, None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import modeling_new

    module, q = modeling_new.NewAttention(), torch.randn(1, 4, 5, 8)
    module.temperature = None
    interface.forward(module, q, q, q, None)
    module.temperature = 2.0
    with pytest.raises(
        rp.RelposValueError, match=r"^module.temperature: NewAttention \(eager_attention_forward\) reads"
    ):
        interface.forward(module, q, q, q, None)


@pytest.mark.parametrize(
    ("causal", "argument", "message"),
    [
        (None, None, "is_causal: Module gives no mask, no argument"),
        (True, None, "is_causal: Module is causal and gives no mask"),
        (False, True, "is_causal: Module is causal and gives no mask"),
        (False, None, None),
        (True, False, None),
    ],
)
def test_without_a_mask_a_module_says_that_it_sees_every_key(causal, argument, message):
    module, q = torch.nn.Module(), torch.randn(1, 2, 5, 8)
    if causal is not None:
        module.is_causal = causal
    run = interface.forward
    if message:
        with pytest.raises(rp.RelposValueError, match=message):
            run(module, q, q, q, None, is_causal=argument)
    else:
        expected = torch.nn.functional.scaled_dot_product_attention(q, q, q).transpose(1, 2)
        torch.testing.assert_close(run(module, q, q, q, None, is_causal=argument)[0], expected, rtol=0, atol=1e-5)
    # A mask says it all, and so does a single query.
    run(module, q, q, q, torch.ones(5, 5, dtype=torch.bool), is_causal=argument)
    run(module, q[:, :, :1], q, q, None, is_causal=argument)


@pytest.mark.parametrize("how", ["argument", "configuration"])
@pytest.mark.parametrize("name", ["Llama", "Bert", "ViT", "CLIPText"])
def test_probabilities_are_refused(name, how):
    model = small(name)
    inputs = {"pixel_values": torch.randn(1, 3, 32, 32)} if name == "ViT" else {"input_ids": IDS}
    if how == "configuration":
        model.config.output_attentions = True
    else:
        inputs["output_attentions"] = True
    assert model(**inputs).attentions[0] is not None
    register(model)
    with pytest.raises(rp.RelposValueError, match=r"^output_attentions: attention implementation 'relpos_np' never"):
        model(**inputs)


def test_a_rule_is_a_mask_that_nobody_has_written():
    mask = mask_of(2, 5, 7, attention_mask=None)
    assert isinstance(mask, Mask)
    assert mask.rule
    assert mask.offset == 0
    assert mask.shape == (2, 1, 5, 7)
    assert mask.dtype == torch.bool
    assert "offset=0" in repr(mask)
    expected = torch.ones(5, 7, dtype=torch.bool).tril().expand(2, 1, 5, 7)
    part = mask[:, :, 1:3]
    assert type(part) is torch.Tensor
    assert torch.equal(part, expected[:, :, 1:3])
    assert not mask.rule
    # What is written to a part of it stays.
    mask[0, 0, 0, 0] = False
    assert not mask.write()[0, 0, 0, 0]
    assert torch.equal((mask & expected)[1], expected[1])
    assert torch.equal(torch.where(mask, 0.0, -1.0)[1], torch.where(expected, 0.0, -1.0)[1])
    everything = mask_of(1, 3, 4, allow_is_causal_skip=False, allow_is_bidirectional_skip=True, attention_mask=None)
    assert everything.offset is None
    assert bool(everything.all())
    for skips in (True, False):
        options = {"allow_is_causal_skip": skips, "allow_is_bidirectional_skip": skips}
        assert not mask_of(1, 4, 4, attention_mask=None, **options).rule


@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize(("q_length", "offset"), [(6, 0), (3, 3), (1, 5), (4, 0)])
def test_rules_and_masks_give_the_same(q_length, offset, written):
    module = torch.nn.Module()
    q, k, v = torch.randn(2, 4, q_length, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8)
    module.num_key_value_groups = 2
    mask = Mask((2, 1, q_length, 6), offset)
    if written:
        mask.write()
    found, _ = interface.forward(module, q, k, v, mask)
    seen = torch.arange(6) <= torch.arange(q_length)[:, None] + offset
    expected = rp.attention(*(x.numpy().astype(float) for x in (q, k, v)), mask=seen.numpy(), backend="numpy")
    np.testing.assert_allclose(found.transpose(1, 2).numpy(), expected, rtol=0, atol=1e-5)


def test_decoders_that_do_not_say_that_they_are_causal():
    """Pegasus-X: its decoder's `is_causal` is False; whoever believes it where no mask is written sees the future."""
    config = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4}
    config |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "vocab_size": 50}
    settings = transformers.PegasusXConfig(**config, block_size=8, num_global_tokens=2)
    torch.manual_seed(0)
    model = transformers.PegasusXModel._from_config(settings, attn_implementation="eager").eval()
    inputs = {"input_ids": IDS, "decoder_input_ids": IDS}
    for x in model.parameters():
        torch.nn.init.normal_(x, std=0.3)
    with torch.no_grad():
        expected = model(**inputs).last_hidden_state
        assert not model.decoder.layers[0].self_attn.is_causal
        register(model)
        torch.testing.assert_close(model(**inputs).last_hidden_state, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["MPNet", "RoFormer", "Falcon", "DebertaV2", "XLNet", "Mpt", "Nystromformer", "Bloom"])
def test_where_nothing_would_happen_it_is_an_error(name):
    config = transformers.CONFIG_MAPPING[{"DebertaV2": "deberta-v2"}.get(name, name.lower())](vocab_size=50)
    with torch.device("meta"):
        model = getattr(transformers, f"{name}Model")(config)
    own = model.config._attn_implementation
    with pytest.raises(rp.RelposValueError, match=rf"model: {name}Model has \w*Attention.* would do nothing"):
        register(model)
    assert model.config._attn_implementation == own
    layers = used(model)
    assert layers.here == ()
    assert layers.elsewhere


def test_a_model_made_with_it_that_adds_masks_itself_is_refused():
    """transformers accepts the name for MPNet, which would take True for a bias of 1."""
    register()
    config = transformers.MPNetConfig(**TEXT)
    model = transformers.MPNetModel._from_config(config, attn_implementation="relpos_np").eval()
    with pytest.raises(rp.RelposValueError, match="mask: attention of this model adds its mask to the scores"):
        model(IDS)


def test_used_names_the_layers():
    model = small("Llama")
    names = ("layers.0.self_attn", "layers.1.self_attn")
    assert used(model).elsewhere == names
    register(model)
    assert (used(model).here, used(model).elsewhere) == (names, ())
    with pytest.raises(rp.RelposTypeError, match="expected a model of transformers"):
        used(torch.nn.Linear(2, 2))
