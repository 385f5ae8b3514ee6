"""Vectors per distance in other packages: DeBERTa, XLNet in both directions, Funnel, Seamless v2, CoPE."""

import numpy as np
import pytest

import relpos_np as rp
from tests.parity.modules import EPS32, modeling, normal, projected, randomised, split_heads, without

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
deberta, deberta_v2, funnel, xlnet = map(modeling, ("deberta", "deberta_v2", "funnel", "xlnet"))
seamless_v2 = modeling("seamless_m4t_v2")

BATCH, HEADS, DIM = 2, 3, 12
WIDTH = HEADS * DIM


def heads_of(flat):
    """(..., L, H*D) tensor to (..., H, L, D) array."""
    return split_heads(flat, HEADS)


def padding(length):
    """(B, 1, L, L), True where both tokens stand; the peer asks for no less."""
    there = torch.arange(length) < torch.tensor([length, (length + 1) // 2])[:, None]
    return there[:, None, None, :] & there[:, None, :, None]


# ---------------------------------------------------------------------------------------------- DeBERTa


def compare(agrees, out, q, k, v, pos_key, pos_query, mask, max_position):
    """Rows of queries that stand: a query that is padding sees no key, uniform there, zero here."""
    scheme = rp.DeBERTa(pos_key, pos_query, max_position=max_position)
    seen = slice(mask.any(dim=-1).sum(dim=-1).min())
    options = {"scale": scheme.scale, "offset": 0, "mask": mask[:, :, seen].numpy()}
    agrees(heads_of(out)[:, :, seen], q[:, :, seen], k, v, position=scheme, **options)


# The peer rounds the root of D (1 + terms) to float32: numbers whose root is whole.
TERMS = [(("c2p", "p2c"), 12), (("c2p",), 8), (("p2c",), 8)]


def sizes(terms, dim):
    sizes = {"hidden_size": HEADS * dim, "num_attention_heads": HEADS, "relative_attention": True}
    return sizes | {"pos_att_type": list(terms)}


@pytest.mark.parametrize(("terms", "dim"), TERMS)
@pytest.mark.parametrize(("length", "span"), [(1, 4), (9, 16), (9, 4), (20, 7)])
def test_deberta_v1(agrees, length, span, terms, dim):
    """Up to the longest distance, and beyond; shorter inputs use the middle of the table."""
    config = transformers.DebertaConfig(**sizes(terms, dim), max_relative_positions=span)
    module = randomised(deberta.DisentangledSelfAttention(config))
    x, embedding, mask = normal(BATCH, length, HEADS * dim), normal(2 * span, HEADS * dim), padding(length)
    out = module(x, mask, relative_pos=deberta.build_relative_position(x, x), rel_embeddings=embedding)[0]
    # Of each head's projections the first third is its query, then its key and its value.
    q, k, v = np.split(heads_of(module.in_proj(x)), 3, axis=-1)
    q, v = (y + heads_of(bias[None]) for y, bias in ((q, module.q_bias), (v, module.v_bias)))
    pos_key = heads_of(module.pos_proj(embedding)) if "c2p" in terms else None
    pos_query = heads_of(module.pos_q_proj(embedding)) if "p2c" in terms else None
    compare(agrees, out, q, k, v, pos_key, pos_query, mask, None)


@pytest.mark.parametrize(
    ("length", "buckets", "max_position", "shared", "terms", "dim"),
    [
        (1, 4, 16, False, *TERMS[0]),
        (13, -1, 8, False, *TERMS[0]),
        (40, 8, 20, True, *TERMS[0]),
        (40, 8, 20, False, *TERMS[1]),
        (40, 8, 20, False, *TERMS[2]),
        (640, 256, 512, True, *TERMS[0]),
    ],
)
def test_deberta_v2(agrees, length, buckets, max_position, shared, terms, dim):
    """The last case has the published sizes, 256 buckets and 512 positions, on a longer input."""
    options = {"position_buckets": buckets, "max_relative_positions": max_position, "share_att_key": shared}
    config = transformers.DebertaV2Config(**sizes(terms, dim), **options)
    module = randomised(deberta_v2.DisentangledSelfAttention(config))
    batch = 1 if length > 100 else BATCH
    span = buckets if buckets > 0 else max_position
    x, embedding, mask = normal(batch, length, HEADS * dim), normal(2 * span, HEADS * dim), padding(length)[:batch]
    out = module(x, mask, rel_embeddings=embedding)[0]
    qkv = projected(module, "query_proj key_proj value_proj", x, HEADS)
    names = {"c2p": "key_proj", "p2c": "query_proj"}
    tables = [
        heads_of(getattr(module, name if shared else f"pos_{name}")(embedding)) if term in terms else None
        for term, name in names.items()
    ]
    compare(agrees, out, *qkv, *tables, mask, max_position if buckets > 0 else None)


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


@pytest.mark.parametrize("clamp", [-1, 3])
@pytest.mark.parametrize(("length", "memory"), [(1, 0), (6, 0), (1, 5), (7, 11)])
@pytest.mark.parametrize(("attn_type", "variant"), [("uni", "xlnet_uni"), ("bi", "xlnet")])
def test_xlnet(agrees, rng, attn_type, variant, length, memory, clamp):
    """What its shift leaves above the diagonal is compared, too: without a mask."""
    keys = length + memory
    sizes = {"d_model": WIDTH, "n_head": HEADS, "n_layer": 1, "d_inner": 8, "vocab_size": 16}
    config = transformers.XLNetConfig(**sizes, attn_type=attn_type, clamp_len=clamp)
    module = randomised(xlnet.XLNetRelativeAttention(config))
    encoded = xlnet.XLNetModel(config).relative_positional_encoding(length, keys)[:, 0]
    distances = rp.reference.row_distances(length, keys, variant, clamp=None if clamp < 0 else clamp)
    own = rp.Sinusoidal(WIDTH, layout="concatenated").encode(distances)
    np.testing.assert_allclose(own, encoded.numpy(), rtol=0, atol=4 * EPS32 * (1 + keys))
    rows = torch.einsum("rw,whd->rhd", encoded.double(), module.r)
    # The module counts (length, batch, heads, dim), and masks with 1 where a key is hidden.
    q, k, v = (torch.from_numpy(rng.standard_normal((n, BATCH, HEADS, DIM))) for n in (length, keys, keys))
    hidden = torch.from_numpy(np.triu(np.ones((length, keys)), 1 + memory))[:, :, None, None]
    position = rp.TransformerXL(*(x.numpy() for x in (module.r_w_bias, module.r_r_bias, rows)), variant=variant)
    for mask in (None, hidden.expand(-1, -1, BATCH, HEADS)):
        out = module.rel_attn_core(q, k, v, rows[:, None].expand(-1, BATCH, -1, -1), attn_mask=mask)
        agrees(*(t.permute(1, 2, 0, 3) for t in (out, q, k, v)), position=position, causal=mask is not None)


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


@pytest.mark.parametrize("length", [1, 6, 15])
def test_seamless_v2_is_shaw_with_more_rows_to_the_left(agrees, length):
    config = transformers.SeamlessM4Tv2Config(
        hidden_size=WIDTH,
        speech_encoder_attention_heads=HEADS,
        position_embeddings_type="relative_key",
        left_max_position_embeddings=6,
        right_max_position_embeddings=2,
    )
    module = without(randomised(seamless_v2.SeamlessM4Tv2ConformerSelfAttention(config)), "linear_out")
    x = normal(BATCH, length, WIDTH)
    position = rp.Shaw(module.distance_embedding.weight.numpy(), left=6)
    agrees(heads_of(module(x)[0]), *projected(module, "linear_q linear_k linear_v", x, HEADS), position=position)


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
    allowed = seen.numpy() > 0
    agrees(expected, q, k, v, position=rp.CoPE(table.numpy(), variant="ram", counted=allowed), mask=allowed)
