"""Relative positions of residues, tokens and chains, as ESMFold2 in transformers has them."""

import numpy as np
import pytest

import relpos_np as rp
from tests.parity.modules import modeling, sdpa

torch = pytest.importorskip("torch")
esmfold2 = modeling("esmfold2")


class Config:
    num_relative_residx_bins = 3
    num_relative_chain_bins = 2
    pairwise_hidden_size = 4


def test_esmfold2(agrees, rng):
    """Their pair encoding of four numbers, as the bias of four heads."""
    module = esmfold2.EsmFold2RelativePositionEncoding(Config()).double()
    torch.nn.init.normal_(module.embed.weight)
    entity = np.array([0] * 9 + [1] * 4)
    chain = np.array([0] * 4 + [1] * 2 + [2] * 3 + [3] * 4)
    symmetry = np.array([0] * 4 + [1] * 2 + [4] * 3 + [0] * 4)
    residue = np.array([0, 1, 1, 9, 0, 1, 2, 2, 2, 0, 3, 7, 8])
    token = np.array([0, 1, 2, 3, 4, 5, 6, 7, 20, 9, 10, 11, 12])
    given = [torch.from_numpy(x)[None] for x in (residue, chain, symmetry, entity, token)]
    bias = module(*given)[0].permute(2, 0, 1)
    labels = rp.reference.alphafold_labels(
        residue, chain, entity, symmetry, token, residue_bins=3, chain_bins=2, offsets="chain"
    )
    # Every class occurs, or its column would not be compared.
    assert [np.unique(x).tolist() for x in labels[2:]] == [[-1, 0], [0, 1, 2, 3, 4, 5]]
    columns = np.split(module.embed.weight.numpy().T, [8, 16, 17])
    q, k, v = rng.standard_normal((3, 1, 4, 13, 8))
    position = tuple(rp.GraphLabels(x, table) for x, table in zip(labels, columns, strict=True))
    agrees(sdpa(q, k, v, attn_mask=bias[None]), q, k, v, position=position)
