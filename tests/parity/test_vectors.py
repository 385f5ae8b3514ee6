"""Vectors per distance in other packages: DeBERTa, XLNet in one direction, ESPnet's zero_triu, Seamless v2, CoPE."""

import numpy as np
import pytest

import relpos_np as rp
from tests.parity.modules import randomised

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
deberta = pytest.importorskip("transformers.models.deberta.modeling_deberta")
deberta_v2 = pytest.importorskip("transformers.models.deberta_v2.modeling_deberta_v2")
seamless_v2 = pytest.importorskip("transformers.models.seamless_m4t_v2.modeling_seamless_m4t_v2")
xlnet = pytest.importorskip("transformers.models.xlnet.modeling_xlnet")
funnel = pytest.importorskip("transformers.models.funnel.modeling_funnel")

BATCH, HEADS, DIM = 2, 3, 12
WIDTH = HEADS * DIM
EPS32 = np.finfo(np.float32).eps


def heads_of(flat, dim=DIM):
    """(..., L, H*D) tensor to (..., H, L, D) array."""
    return flat.reshape(*flat.shape[:-1], HEADS, dim).transpose(-3, -2).numpy()


def cast(dtype, *arrays):
    return (None if x is None else x.astype(dtype) for x in arrays)


def padding(length):
    """(B, 1, L, L), True where both tokens stand; the peer asks for no less."""
    there = torch.arange(length) < torch.tensor([length, (length + 1) // 2])[:, None]
    return there[:, None, None, :] & there[:, None, :, None]


# ---------------------------------------------------------------------------------------------- DeBERTa


def compare(agrees, out, q, k, v, pos_key, pos_query, mask, max_position, dim=DIM):
    """Rows of queries that stand; the peer computes something for the others, too."""
    scale = rp.DeBERTa(pos_key, pos_query).scale
    expected = heads_of(out, dim)

    def scheme(dtype):
        return rp.DeBERTa(*cast(dtype, pos_key, pos_query), max_position=max_position)

    # A query that is padding sees no key: uniform there, zero here. Those rows are compared in no way.
    rows = mask.any(dim=-1).numpy()[:, 0]
    first = rows.sum(axis=-1)
    agrees(
        expected[:, :, : first.min()],
        q[:, :, : first.min()],
        k,
        v,
        position=scheme,
        scale=scale,
        offset=0,
        mask=mask[:, :, : first.min()].numpy(),
    )


# The peer rounds the root of D (1 + terms) to float32: numbers whose root is whole.
TERMS = [(("c2p", "p2c"), 12), (("c2p",), 8), (("p2c",), 8)]


@pytest.mark.parametrize(("terms", "dim"), TERMS)
@pytest.mark.parametrize(("length", "span"), [(1, 4), (9, 16), (9, 4), (20, 7)])
def test_deberta_v1(agrees, length, span, terms, dim):
    """Up to the longest distance, and beyond; shorter inputs use the middle of the table."""
    config = transformers.DebertaConfig(
        hidden_size=HEADS * dim,
        num_attention_heads=HEADS,
        relative_attention=True,
        max_relative_positions=span,
        pos_att_type=list(terms),
    )
    module = randomised(deberta.DisentangledSelfAttention(config))
    x = torch.randn(BATCH, length, HEADS * dim, dtype=torch.float64)
    embedding = torch.randn(2 * span, HEADS * dim, dtype=torch.float64)
    mask = padding(length)
    relative = deberta.build_relative_position(x, x)
    out = module(x, mask, relative_pos=relative, rel_embeddings=embedding)[0]
    # Of each head's projections the first third is its query, then its key and its value.
    q, k, v = np.split(heads_of(module.in_proj(x), 3 * dim), 3, axis=-1)
    q = q + heads_of(module.q_bias[None], dim)
    v = v + heads_of(module.v_bias[None], dim)
    pos_key = heads_of(module.pos_proj(embedding), dim) if "c2p" in terms else None
    pos_query = heads_of(module.pos_q_proj(embedding), dim) if "p2c" in terms else None
    compare(agrees, out, q, k, v, pos_key, pos_query, mask, None, dim)


@pytest.mark.parametrize(
    ("length", "buckets", "max_position", "shared", "terms", "dim"),
    [
        (1, 4, 16, False, ("c2p", "p2c"), 12),
        (13, -1, 8, False, ("c2p", "p2c"), 12),
        (40, 8, 20, True, ("c2p", "p2c"), 12),
        (40, 8, 20, False, ("c2p",), 8),
        (40, 8, 20, False, ("p2c",), 8),
        (640, 256, 512, True, ("c2p", "p2c"), 12),
    ],
)
def test_deberta_v2(agrees, length, buckets, max_position, shared, terms, dim):
    """The last case has the published sizes, 256 buckets and 512 positions, on a longer input."""
    config = transformers.DebertaV2Config(
        hidden_size=HEADS * dim,
        num_attention_heads=HEADS,
        relative_attention=True,
        position_buckets=buckets,
        max_relative_positions=max_position,
        share_att_key=shared,
        pos_att_type=list(terms),
    )
    module = randomised(deberta_v2.DisentangledSelfAttention(config))
    batch = 1 if length > 100 else BATCH
    x = torch.randn(batch, length, HEADS * dim, dtype=torch.float64)
    span = buckets if buckets > 0 else max_position
    embedding = torch.randn(2 * span, HEADS * dim, dtype=torch.float64)
    mask = padding(length)[:batch]
    out = module(x, mask, rel_embeddings=embedding)[0]
    q, k, v = (heads_of(linear(x), dim) for linear in (module.query_proj, module.key_proj, module.value_proj))
    tables = {}
    for term, own, lent in (("c2p", "pos_key_proj", "key_proj"), ("p2c", "pos_query_proj", "query_proj")):
        linear = getattr(module, lent if shared else own, None)
        tables[term] = heads_of(linear(embedding), dim) if term in terms else None
    compare(agrees, out, q, k, v, *tables.values(), mask, max_position if buckets > 0 else None, dim)


@pytest.mark.parametrize(
    ("span", "max_position"), [(256, 512), (128, 512), (32, 128), (512, 1024), (64, 256), (128, 513), (8, 20), (4, 7)]
)
def test_deberta_buckets(span, max_position):
    """Its logarithms of single precision against integers, far beyond the last bucket."""
    distance = np.arange(-3000, 3001)
    theirs = deberta_v2.make_log_bucket_position(torch.from_numpy(distance), span, max_position).long().numpy()
    ours = rp.reference.deberta_bucket(distance, span=span, max_position=max_position)
    np.testing.assert_array_equal(ours, np.clip(theirs, -span, span))


# ---------------------------------------------------------------------------------------------- XLNet, ESPnet


@pytest.mark.parametrize("clamp", [-1, 3])
@pytest.mark.parametrize(("length", "memory"), [(1, 0), (6, 0), (1, 5), (7, 11)])
@pytest.mark.parametrize(("attn_type", "variant"), [("uni", "xlnet_uni"), ("bi", "xlnet")])
def test_xlnet_in_one_direction(agrees, rng, attn_type, variant, length, memory, clamp):
    """What its shift leaves above the diagonal is compared, too: without a mask."""
    keys = length + memory
    config = transformers.XLNetConfig(
        d_model=WIDTH, n_head=HEADS, n_layer=1, d_inner=8, vocab_size=16, attn_type=attn_type, clamp_len=clamp
    )
    module = randomised(xlnet.XLNetRelativeAttention(config))
    encoded = xlnet.XLNetModel(config).relative_positional_encoding(length, keys)[:, 0]
    distances = rp.reference.row_distances(length, keys, variant, clamp=None if clamp < 0 else clamp)
    own = rp.Sinusoidal(WIDTH, layout="concatenated").encode(distances)
    np.testing.assert_allclose(own, encoded.numpy(), rtol=0, atol=4 * EPS32 * (1 + keys))
    rows = torch.einsum("rw,whd->rhd", encoded.double(), module.r)
    q, k, v = (torch.from_numpy(rng.standard_normal((n, BATCH, HEADS, DIM))) for n in (length, keys, keys))
    hidden = torch.from_numpy(np.triu(np.ones((length, keys)), 1 + memory))[:, :, None, None]
    parts = module.r_w_bias.numpy(), module.r_r_bias.numpy(), rows.numpy()

    def scheme(dtype):
        return rp.TransformerXL(*cast(dtype, *parts), variant=variant)

    for mask in (None, hidden.expand(-1, -1, BATCH, HEADS)):
        out = module.rel_attn_core(q, k, v, rows[:, None].expand(-1, BATCH, -1, -1), attn_mask=mask)
        arrays = (t.permute(1, 2, 0, 3).numpy() for t in (q, k, v))
        agrees(out.permute(1, 2, 0, 3).numpy(), *arrays, position=scheme, causal=mask is not None)


@pytest.mark.parametrize("length", [1, 2, 13])
@pytest.mark.parametrize(
    ("name", "encoding", "variant"),
    [
        ("RelPositionMultiHeadedAttention", "RelPositionalEncoding", "conformer"),
        ("LegacyRelPositionMultiHeadedAttention", "LegacyRelPositionalEncoding", "espnet_legacy"),
    ],
)
def test_espnet_zero_triu(agrees, name, encoding, variant, length):
    attention = pytest.importorskip("espnet.nets.pytorch_backend.transformer.attention")
    embedding = pytest.importorskip("espnet.nets.pytorch_backend.transformer.embedding")
    module = randomised(getattr(attention, name)(HEADS, WIDTH, 0.0, zero_triu=True))
    module.linear_out = torch.nn.Identity()
    x = torch.randn(BATCH, length, WIDTH, dtype=torch.float64)
    _, pos = getattr(embedding, encoding)(WIDTH, 0.0, max_len=20)(x)
    rows = module.linear_pos(pos).view(-1, HEADS, DIM).numpy()
    parts = module.pos_bias_u.numpy(), module.pos_bias_v.numpy(), rows
    q, k, v = (heads_of(linear(x)) for linear in (module.linear_q, module.linear_k, module.linear_v))

    def scheme(dtype):
        return rp.TransformerXL(*cast(dtype, *parts), variant=variant, zero_triu=True)

    agrees(heads_of(module(x, x, x, pos, None)), q, k, v, position=scheme)


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
    x, y = (torch.randn(BATCH, n, WIDTH, dtype=torch.float64) for n in (queries, keys))
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


@pytest.mark.parametrize("length", [1, 6, 15])
def test_seamless_v2_is_shaw_with_more_rows_to_the_left(agrees, length):
    config = transformers.SeamlessM4Tv2Config(
        hidden_size=WIDTH,
        speech_encoder_attention_heads=HEADS,
        position_embeddings_type="relative_key",
        left_max_position_embeddings=6,
        right_max_position_embeddings=2,
    )
    module = randomised(seamless_v2.SeamlessM4Tv2ConformerSelfAttention(config))
    module.linear_out = torch.nn.Identity()
    x = torch.randn(BATCH, length, WIDTH, dtype=torch.float64)
    q, k, v = (heads_of(linear(x)) for linear in (module.linear_q, module.linear_k, module.linear_v))
    table = module.distance_embedding.weight.numpy()
    agrees(heads_of(module(x)[0]), q, k, v, position=lambda dtype: rp.Shaw(table.astype(dtype), left=6))


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
    table = module.pos_emb.numpy()
    agrees(expected.numpy(), q, k, v, position=lambda dtype: rp.CoPE(table.astype(dtype)), causal=True)


def test_cope_of_the_authors_repository(agrees, rng):
    """facebookresearch/RAM scales the position part with the rest, and closes the gates of hidden keys."""
    q, k, v = (torch.from_numpy(rng.standard_normal((BATCH, HEADS, 9, DIM))) for _ in range(3))
    table, seen = torch.from_numpy(rng.standard_normal((5, DIM))), torch.ones(9, 9, dtype=torch.float64).tril()
    seen[:, 3] = 0
    seen[3, 0] = 1
    products = q @ k.transpose(-1, -2)
    gates = torch.sigmoid(products / DIM**0.5) * seen
    positions = gates.flip(-1).cumsum(-1).flip(-1).clamp(max=4)
    whole = q @ table.T
    below = positions.floor().long()
    share = positions - below
    part = whole.gather(-1, positions.ceil().long()) * share + whole.gather(-1, below) * (1 - share)
    expected = torch.softmax((products + part) / DIM**0.5 + seen.log(), dim=-1) @ v

    def scheme(dtype):
        return rp.CoPE(table.numpy().astype(dtype), variant="ram", counted=seen.numpy() > 0)

    agrees(expected.numpy(), *(x.numpy() for x in (q, k, v)), position=scheme, mask=seen.numpy() > 0)
