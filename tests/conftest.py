"""What all tests share: hypothesis profiles, a kernel cache of their own, backends; and what the gate leaves out."""

import gc
import os
import random
import re
import subprocess
import sys
import threading
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

import relpos_np as rp
from relpos_np._calls import repeated
from relpos_np.configs import model_types
from tests import fibers

# Examples are arrays made from a drawn seed: generating one is slow at times, and a first call compiles.
_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
settings.register_profile("default", max_examples=5, **_COMMON)
# The same draws each time: a change fails for what it changes. Whoever runs the tests elsewhere draws new ones.
settings.register_profile("ci", max_examples=5, derandomize=True, print_blob=True, **_COMMON)
# Planted bugs are looked for with more draws, the same each time; the night draws as many anew.
settings.register_profile("planted", max_examples=30, derandomize=True, **_COMMON)
settings.register_profile("night", max_examples=30, print_blob=True, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "default"))

# Tests of a run that needs all kernels.
MANY_TESTS = 2000
# Of a test that is repeated for schemes, backends or types of models, `pytest` runs one case in so many.
ONE_IN = 16
SCHEMES = {name: info.cls.__name__ for name, info in rp.SCHEMES.items()}
NAMES = {*SCHEMES, *SCHEMES.values(), *rp.backend.BACKENDS, *model_types()}
WORKERS_ENVIRONMENT = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(256 << 20),
}

fibers.install()
os.environ.pop("RELPOS_BACKEND", None)
# Two threads exist even on a machine with one processor, so that parallel paths always run.
os.environ.setdefault("NUMBA_NUM_THREADS", str(max(2, os.cpu_count() or 1)))


def names_nothing(config):
    """Whether the command chooses no file and no test."""
    return config.args_source == pytest.Config.ArgsSource.TESTPATHS and not config.option.keyword


def draws(config):
    """Whether this run is `pytest` alone, which draws a share of the cases; `pytest tests` runs all of them."""
    return names_nothing(config) and "not slow" in config.option.markexpr


def pytest_configure(config):
    """One seed for all processes of a run, another for each commit."""
    if draws(config) and not os.environ.get("RELPOS_SEED"):
        command = ["git", "log", "-1", "--format=%ct"]
        commit = subprocess.run(command, cwd=config.rootpath, capture_output=True, text=True, check=False)
        os.environ["RELPOS_SEED"] = commit.stdout.strip() or "0"


def pytest_report_header(config):
    """How to draw the same share again."""
    if draws(config):
        return f"a share of the cases, drawn by RELPOS_SEED={os.environ['RELPOS_SEED']}; `pytest tests` runs all"
    return None


def named(item):
    """The schemes, backends and types among the parameters of a test: what these are, or begin with."""
    words = [x for x in item.callspec.params.values() if isinstance(x, str)]
    return NAMES.intersection(words + [re.match(r"\w*", word)[0] for word in words])


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Draw a share of the cases of each test that is repeated for names, or for all that several lists hold together.

    In each file every name has a case. Lists that stand alone, such as those of bad calls, are run whole.
    """
    if not draws(config):
        return
    cases, repeated, kept, met = defaultdict(list), set(), set(), defaultdict(set)
    for item in items:
        if hasattr(item, "callspec"):
            cases[item.location[0], item.originalname].append(item)
            if named(item) or len(list(item.iter_markers("parametrize"))) > 1:
                repeated.add((item.location[0], item.originalname))
    drawn = random.Random(os.environ["RELPOS_SEED"])
    for test in sorted(repeated):
        kept.update(drawn.sample(cases[test], -(-len(cases[test]) // ONE_IN)))
    rest = [item for test in sorted(repeated) for item in cases[test]]
    for item in sorted(drawn.sample(rest, len(rest)), key=lambda item: item not in kept):
        if item in kept or named(item) - met[item.location[0]]:
            kept.add(item)
            met[item.location[0]] |= named(item)
    left_out = set(rest) - kept
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def pytest_xdist_auto_num_workers(config):
    """Several processes for the whole suite; one for chosen files, and where tests fill the machine themselves."""
    whole = names_nothing(config) or config.args == ["tests"]
    if not whole or not ("not stress" in config.option.markexpr or config.option.markexpr == "simulator"):
        return 0
    # Inherited. Threads that wait must not take the processors of other workers, and memory that is freed and asked for
    # again 10,000 times should not be cleared by the system each time.
    for name, value in WORKERS_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # Tests start a hundred processes, each of which would compile the package's sources again.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    return min(os.cpu_count() or 1, 4)


def pytest_collection_finish():
    """What there is by now is not looked through for cycles again and again: it is there to the end."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def kernel_cache(tmp_path_factory, request):
    """A kernel cache for tests alone, unless one is named from outside.

    It is kept with what pytest keeps: kernels are known by their source, so that only what has changed is compiled.
    `pytest --cache-clear` begins anew.
    """
    worker = getattr(request.config, "workerinput", None)
    kept = getattr(request.config, "cache", None)
    folder = tmp_path_factory.mktemp("kernels") if kept is None else kept.mkdir("kernels")
    with pytest.MonkeyPatch.context() as patch:
        if not os.environ.get("RELPOS_CACHE_DIR"):
            folder.chmod(0o700)  # or what is in it would not be trusted
            patch.setenv("RELPOS_CACHE_DIR", str(folder))
        if worker and len(request.session.items) > MANY_TESTS and request.config.option.markexpr != "simulator":
            share = int(worker["workerid"].removeprefix("gw")), worker["workercount"]
            # On a stack of its own: as deep as this one is, CPython maps and unmaps memory for many a call.
            thread = threading.Thread(target=_compile_share, args=share)
            thread.start()
            thread.join()
        yield


def _compile_share(worker, workers):
    """Compile the kernels of some dtypes, which have functions in common: otherwise each worker compiles nearly all."""
    of_dtypes = defaultdict(list)
    for name, kernel in rp.backend.kernels("numba").KERNELS.items():
        of_dtypes[name.split()[-1]].append(kernel)
    shares = [[] for _ in range(workers)]
    # Those that most tests need come first.
    for kernels in sorted(of_dtypes.values(), key=len, reverse=True):
        min(shares, key=len).extend(kernels)
    for kernel in shares[worker]:
        _ = kernel.address


@pytest.fixture(autouse=True)
def no_choice_left_over():
    """Every test starts without a chosen backend or precision, or a known call, as examples leave them."""
    rp.set_backend(None)
    rp.set_precision(None)
    repeated._forget()
    yield
    rp.set_backend(None)
    rp.set_precision(None)
    numba = sys.modules.get("numba")
    if numba is not None:
        numba.set_num_threads(numba.config.NUMBA_NUM_THREADS)


@pytest.fixture(params=rp.backend.HOST_BACKENDS)
def backend(request):
    """Each backend in turn."""
    return request.param


@pytest.fixture
def rng():
    """The same numbers in every test."""
    return np.random.default_rng(20261121)


@pytest.fixture
def unmet(monkeypatch):
    """No call is known from before: each is made by the backend's `evaluate`, which a test may replace."""
    for name in ("form", "form_of_sequences"):
        monkeypatch.setattr(repeated, name, lambda *_, **__: None)
