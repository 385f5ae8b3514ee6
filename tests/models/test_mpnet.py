"""The whole of all-mpnet-base-v2 against transformers, and the search built on it."""

import numpy as np
import pytest

import mpnet_search
from networks import weights
from networks.mpnet import Embedder

pytestmark = pytest.mark.models

TEXTS = [
    "A cat sat on the mat.",
    "Kittens like to sleep on carpets.",
    "The central bank raised interest rates by a quarter of a percentage point on Thursday.",
    # Longer than the 128 distances that T5's buckets tell apart.
    "Relative positions say how far apart two words are. " * 14,
    "Straße, 東京, naïve: 3.14!",
]


@pytest.fixture(scope="module")
def embedder(needs, models_dir):
    needs(weights.MPNET, ("safetensors", "tokenizers"))
    return Embedder(weights.mpnet())


@pytest.fixture(scope="module")
def transformers_embed(needs, models_dir):
    """``embed(ids, lengths, dtype)``: hidden states and embeddings as transformers computes them."""
    needs(weights.MPNET, ("torch", "transformers"))
    import torch
    from transformers import MPNetModel

    model = MPNetModel.from_pretrained(
        weights.mpnet(), local_files_only=True, add_pooling_layer=False, attn_implementation="eager"
    ).eval()

    def embed(ids, lengths, dtype):
        mask = np.arange(ids.shape[1]) < lengths[:, None]
        with torch.no_grad():
            states = model.to(getattr(torch, np.dtype(dtype).name))(
                torch.from_numpy(ids), attention_mask=torch.from_numpy(mask.astype(np.int64))
            )[0].numpy()
        mean = (states * mask[..., None]).sum(axis=1) / mask.sum(axis=1)[:, None]
        return states, mean / np.linalg.norm(mean, axis=1, keepdims=True)

    return embed


@pytest.mark.parametrize(
    ("dtype", "backend", "texts", "limit"), [("float32", "numba", TEXTS, 1e-5), ("float64", "numpy", TEXTS[2:4], 1e-12)]
)
def test_embeddings_are_those_of_transformers(embedder, transformers_embed, dtype, backend, texts, limit):
    ids, lengths = embedder.pieces(texts)
    assert lengths.max() > 130
    states, expected = transformers_embed(ids, lengths, dtype)
    ours = embedder.network(ids, lengths, dtype=np.dtype(dtype).type, backend=backend)
    for n, length in enumerate(lengths):
        # Hidden states are some 10 times larger than embeddings; padding means nothing in either.
        np.testing.assert_allclose(ours[n, :length], states[n, :length], rtol=0, atol=100 * limit)
    found = embedder.pool(ours, lengths)
    assert found.dtype == dtype
    np.testing.assert_allclose(found, expected, rtol=0, atol=limit)


def test_the_table_matters(embedder):
    """What agrees with transformers above does not agree by accident: without positions it would not."""
    layers = embedder.network.layers
    kept = [layer.attention.position for layer in layers]
    with_table = embedder(TEXTS[:3])
    try:
        for layer in layers:
            layer.attention.position = None
        without = embedder(TEXTS[:3])
    finally:
        for layer, position in zip(layers, kept, strict=True):
            layer.attention.position = position
    assert np.abs(with_table - without).max() > 1e-2


def test_padding_changes_nothing(embedder):
    together = embedder(TEXTS)
    alone = np.concatenate([embedder([text]) for text in TEXTS])
    np.testing.assert_allclose(together, alone, rtol=0, atol=1e-6)


def test_meaning_is_near(embedder):
    cat, kitten, bank = embedder(TEXTS[:3])
    assert cat @ kitten > 0.3
    assert cat @ kitten > cat @ bank + 0.2


def test_search_finds_the_passage(embedder, tmp_path, capsys):
    text = tmp_path / "notes.md"
    text.write_text(
        "# Notes\n\nThe meeting was moved to Tuesday because two people were ill.\n\n"
        "```\nnot prose but code here\n```\n\n"
        "We agreed to spend at most four hundred euros on the new printer.\n\n"
        "The roof over the bicycle stand leaks when it rains.\n"
    )
    assert mpnet_search.main(["--text", str(text), "--top", "1", "how much money may it cost"]) == 0
    printed = capsys.readouterr()
    assert "four hundred euros" in printed.out
    assert printed.out.count("\n") == 1
    assert "3 passages" in printed.err


def test_damaged_weights_are_refused(needs, tmp_path, monkeypatch):
    needs(weights.MPNET, ())
    monkeypatch.setenv("RELPOS_MODELS_DIR", str(tmp_path))
    monkeypatch.setitem(weights._MPNET_FILES, "model.safetensors", "0" * 64)
    with pytest.raises(weights.MissingWeightsError, match=r"SHA-256 is 78c0197b"):
        weights.mpnet()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
