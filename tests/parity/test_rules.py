"""Which keys a query may attend under a rule, as other packages write it down; models are in test_interop_models.py."""

import numpy as np
import pytest

import relpos_np as rp

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
masking = pytest.importorskip("transformers.masking_utils")


def assert_attended(expected, rule, q_len, k_len, batch=(), **options):
    """The pairs that a rule leaves, on each backend that says so."""
    q, k = np.zeros((*batch, 1, q_len, 1)), np.zeros((*batch, 1, k_len, 1))
    for backend in ("numpy", "terms"):
        found = rp.logits(q, k, rule=rule, backend=backend, **options)[..., 0, :, :]
        np.testing.assert_array_equal(found == 0, expected)


@pytest.mark.parametrize(("size", "left"), [(1, 0), (6, 2), (5, None), (30, 1)])
def test_chunks_of_streaming_transducers(size, left):
    """ESPnet's: all of the own chunk and some before it, or all before it for its 0."""
    utils = pytest.importorskip("espnet2.asr_transducer.utils")
    hidden = utils.make_chunk_mask(20, size, 0 if left is None else left)
    if left == 0:  # theirs has no name for none
        hidden = hidden | ~torch.block_diag(*[torch.ones(size, size, dtype=torch.bool)] * (20 // size))
    assert_attended(~hidden.numpy(), rp.Chunked(size, left=left), 20, 20)


@pytest.mark.parametrize(("q_len", "k_len"), [(20, 20), (7, 20), (1, 19)])
def test_chunks_of_transformers_and_of_splash_attention(q_len, k_len):
    """JAX's masks for its kernels on TPUs, too; a query's place is counted among the keys."""
    chunks = masking.chunked_causal_mask_function(6, torch.zeros(1, dtype=int))
    place = {"q_offset": k_len - q_len, "mask_function": chunks, "dtype": torch.float64, "device": "cpu"}
    theirs = (masking.eager_mask(1, q_len, k_len, **place) == 0)[0, 0].numpy()
    assert_attended(theirs, rp.Chunked(6), q_len, k_len, causal=True)
    masks = pytest.importorskip("jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask")
    np.testing.assert_array_equal(np.asarray(masks.ChunkedCausalMask((k_len, k_len), 6)[:, :])[k_len - q_len :], theirs)


def test_prefixes_of_paligemma():
    """An image and a prompt that all may attend, of another length in each item."""
    lengths = np.array([5, 13])
    block = torch.where(torch.arange(20) < torch.tensor(lengths)[:, None], 0, -1)
    config = transformers.GemmaConfig(attn_implementation="eager")
    mask = masking.create_causal_mask(config, torch.zeros(2, 20, 1), None, None, block_sequence_ids=block)
    assert_attended((mask == 0)[:, 0].numpy(), rp.Prefix(lengths), 20, 20, batch=(2,))
