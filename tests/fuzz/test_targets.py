"""The fuzz targets on their seeds, on what was found before, and on some mutations, without a fuzzer."""

import numpy as np
import pytest

from tests.fuzz import run, targets

# So many mutations of seeds; a stress run has more.
FEW, MANY = 60, 3000


def test_every_target_has_seeds():
    assert tuple(targets.TARGETS) == run.NAMES
    assert set(targets.CORPORA) == set(run.NAMES)


@pytest.mark.parametrize("name", run.NAMES)
def test_seeds(name):
    """Some are accepted and some refused: a target that refuses everything would test nothing."""
    assert {targets.TARGETS[name](data) for data in targets.seeds(name)} == {True, False}


def mutate(name, count):
    rng = np.random.default_rng(7)
    seeds = targets.seeds(name)
    for n in range(count):
        data = targets.mutated(seeds[n % len(seeds)], rng)
        try:
            targets.TARGETS[name](data)
        except BaseException:
            print(f"finding, for tests/fuzz/findings/{name}: {data!r}")
            raise


@pytest.mark.parametrize("name", run.NAMES)
def test_mutations(name):
    mutate(name, FEW)


@pytest.mark.stress
@pytest.mark.parametrize("name", run.NAMES)
def test_many_mutations(name):
    mutate(name, MANY)


def test_a_pickle_would_be_noticed():
    """What guards the targets does."""
    import pickle

    data = pickle.dumps([1])
    with targets.guarded(), pytest.raises(AssertionError, match="a pickle would have been loaded"):
        pickle.loads(data)
    assert pickle.loads(data) == [1]
