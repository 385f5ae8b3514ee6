"""Vectors per distance in other packages: buckets of DeBERTa, Funnel, CoPE."""

import numpy as np
import pytest

import relpos_np as rp
from tests.parity.modules import modeling, normal, randomised

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
deberta_v2, funnel = map(modeling, ("deberta_v2", "funnel"))

BATCH, HEADS, DIM = 2, 3, 12
WIDTH = HEADS * DIM


# ---------------------------------------------------------------------------------------------- DeBERTa


@pytest.mark.parametrize(
    ("span", "max_position"), [(256, 512), (128, 512), (32, 128), (512, 1024), (64, 256), (128, 513), (8, 20), (4, 7)]
)
def test_deberta_buckets(span, max_position):
    """Its logarithms of single precision against integers, far beyond the last bucket."""
    distance = np.arange(-3000, 3001)
    theirs = deberta_v2.make_log_bucket_position(torch.from_numpy(distance), span, max_position).long().numpy()
    ours = rp.reference.deberta_bucket(distance, span=span, max_position=max_position)
    np.testing.assert_array_equal(ours, np.clip(theirs, -span, span))


# ---------------------------------------------------------------------------------------------- XLNet, Funnel


@pytest.mark.parametrize("separate_cls", [True, False])
@pytest.mark.parametrize(("block", "pooled"), [(0, False), (1, True), (1, False), (2, True)])
def test_funnel_is_labels(block, pooled, separate_cls):
    """Pooled queries, a class token without a position, and segments: scores, because its softmax is in float32.

    With the content bias u added to the queries, what differs for the position and segment parts is a bias per label.
    """
    config = transformers.FunnelConfig(
        d_model=WIDTH, n_head=HEADS, d_head=DIM, separate_cls=separate_cls, truncate_seq=False, hidden_dropout=0.0
    )
    module = randomised(funnel.FunnelRelMultiheadAttention(config, block)).eval()
    structure = funnel.FunnelAttentionStructure(config).eval()
    position_embeds = structure.get_position_embeds(17, torch.float64, torch.device("cpu"))
    keys = (17, 17 if pooled else 9, 9 if pooled else 5)[block]
    queries = (keys + 1) // 2 if pooled else keys
    x, y = normal(BATCH, queries, WIDTH), normal(BATCH, keys, WIDTH)
    same_segment = torch.randint(0, 2, (BATCH, queries, keys)).bool()
    cls = torch.ones(queries, keys, dtype=torch.float64)
    if separate_cls:
        cls[0], cls[:, 0] = 0, 0
    scale = DIM**-0.5
    q, k = (linear(t).view(*t.shape[:-1], HEADS, DIM) for linear, t in ((module.q_head, x), (module.k_head, y)))
    expected = torch.einsum("bind,bjnd->bnij", (q + module.r_w_bias) * scale, k)
    expected = expected + module.relative_positional_attention(position_embeds, q * scale, keys, cls)
    expected = expected + module.relative_token_type_attention(same_segment, q * scale, cls)

    shift = 2 if pooled else 1
    rows = torch.einsum("td,dnh->nth", position_embeds[block][shift - 1], module.r_kernel).numpy()
    segments = module.seg_embed.transpose(0, 1).numpy()
    distance = shift * (queries - np.arange(queries)[:, None]) + np.arange(keys)
    u, v, w = (bias.numpy() for bias in (module.r_w_bias, module.r_r_bias, module.r_s_bias))

    def labelled(labels, vectors, bias):
        table = scale * np.einsum("hd,hrd->rh", bias - u, vectors)
        return rp.GraphLabels(np.where(cls.numpy() > 0, labels, -1), table, key_table=vectors)

    schemes = labelled(distance, rows, v), labelled(same_segment.numpy().astype(int), segments, w)
    operands = (q + module.r_w_bias).transpose(1, 2).numpy(), k.transpose(1, 2).numpy()
    for backend in ("numpy", "terms"):
        s = rp.logits(*operands, position=schemes, backend=backend)
        np.testing.assert_allclose(s, expected.numpy(), rtol=0, atol=1e-12)


# ---------------------------------------------------------------------------------------------- Shaw, CoPE


@pytest.mark.parametrize("npos", [1, 4, 30])
@pytest.mark.parametrize(("length", "memory"), [(1, 0), (9, 0), (4, 7)])
def test_cope(agrees, rng, length, memory, npos):
    """x-transformers has the listing of the paper's appendix."""
    peer = pytest.importorskip("x_transformers.x_transformers")
    module = randomised(peer.CoPE(DIM, HEADS, npos))
    q, k, v = (rng.standard_normal((BATCH, HEADS, n, DIM)) for n in (length, length + memory, length + memory))
    s = torch.from_numpy(q @ k.swapaxes(-1, -2) / np.sqrt(DIM))
    s = s.masked_fill(torch.ones(length, length + memory, dtype=torch.bool).triu(1 + memory), -torch.inf)
    expected = torch.softmax(s + module(torch.from_numpy(q), s), dim=-1) @ torch.from_numpy(v)
    agrees(expected, q, k, v, position=rp.CoPE(module.pos_emb.numpy()), causal=True)
