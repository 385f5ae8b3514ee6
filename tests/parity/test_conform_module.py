"""`conform_module`: modules of PyTorch without glue."""

import pytest

import relpos_np as rp

torch = pytest.importorskip("torch")
from relpos_np.conform import conform_module  # noqa: E402
from tests.parity import conform_torch as functions  # noqa: E402


class WithTable(torch.nn.Module):
    """T5's bias beside attention."""

    def __init__(self, sign=1):
        super().__init__()
        self.bias = torch.nn.Embedding(32, 4)
        self.sign = sign

    def forward(self, query, key, value, is_causal=False):
        table = self.sign * self.bias.weight
        return functions.t5(query, key, value, table, causal=is_causal), None


NAMES = {"table": "bias.weight", "causal": "is_causal"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_parameter_gets_the_array_and_a_gradient(dtype):
    report = conform_module(WithTable(), "t5", names=NAMES, dtype=dtype, grad=True, lengths=(2, 33), excluded="flags")
    assert report.ok, report.text()
    assert report.family("causal").verdict == "right"
    assert "grad_table" in report.family("self").findings[0].errors
    assert report.subject.endswith("WithTable")
    wrong = conform_module(WithTable(-1), "t5", names=NAMES, dtype=dtype, families="self", lengths=(2, 33))
    assert wrong.causes == ("subtracts what positions add",)


def test_projections_are_identities():
    module = torch.nn.MultiheadAttention(64, 4, batch_first=True)
    names = {"q": "in_proj_weight", "out": "out_proj.weight"}
    report = conform_module(module, "plain", names=names, heads=4, head_dim=16, supports=["cross"], lengths=(2, 33, 65))
    assert report.ok, report.text()
    assert report.family("cross").verdict == "right"
    # What the module holds stays as it was.
    assert not torch.equal(module.out_proj.weight, torch.eye(64))
    with pytest.raises(rp.RelposValueError, match="heads"):
        conform_module(module, "plain", names=names)


def test_names_that_the_module_lacks():
    with pytest.raises(rp.RelposValueError, match=r"names: the module has no bias\.table for table"):
        conform_module(WithTable(), "t5", names={"table": "bias.table"})
    with pytest.raises(rp.RelposTypeError, match=r"expected a torch\.nn\.Module"):
        conform_module(functions.t5, "t5")
