"""Attention over Dask arrays on a cluster of processes, of which one is killed while it works."""

import numpy as np
import pytest

from tests import clusters

pytest.importorskip("distributed")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def client():
    """Two processes on the loopback interface."""
    with clusters.two_workers() as one:
        yield one


def test_a_cluster_gives_what_one_process_gives(client, rng):
    lazy, expected = clusters.call(rng, 0.0)
    np.testing.assert_allclose(client.compute(lazy).result(timeout=60), expected, rtol=1e-12, atol=1e-12)


def test_a_worker_that_is_killed_costs_no_result(client, rng):
    lazy, expected = clusters.call(rng, 0.05)
    before = clusters.workers(client)
    future = client.compute(lazy)
    clusters.amid(client, future, 8)
    clusters.kill(client)
    np.testing.assert_allclose(future.result(timeout=120), expected, rtol=1e-12, atol=1e-12)
    client.wait_for_workers(2, timeout=60)
    # One of the processes is another one now.
    assert len(set(before.values()) & set(clusters.workers(client).values())) == 1
