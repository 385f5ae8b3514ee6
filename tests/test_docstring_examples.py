"""Examples in docstrings print what they say."""

import doctest
import importlib
import io
import pkgutil
from contextlib import redirect_stderr

import pytest

import relpos_np as rp

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def examples():
    """Every docstring with examples, of modules that need no other framework to be imported."""
    for info in pkgutil.walk_packages(rp.__path__, "relpos_np."):
        apart = ("relpos_np.interop.", "relpos_np.kernels.", "relpos_np._commands.peers.with_", "relpos_np.__main__")
        if info.name.startswith(apart):
            continue
        module = importlib.import_module(info.name)
        for test in doctest.DocTestFinder(exclude_empty=True).find(module):
            if test.examples:
                yield pytest.param(test, id=test.name)


@pytest.mark.parametrize("test", [*examples()])
def test_examples(test):
    printed = io.StringIO()
    with redirect_stderr(printed):
        result = doctest.DocTestRunner(optionflags=FLAGS, verbose=False).run(test, out=printed.write)
    assert result.failed == 0, printed.getvalue()


FUNCTIONS = [name for name in rp.__all__ if callable(getattr(rp, name)) and not isinstance(getattr(rp, name), type)]
CLASSES = [info.cls.__name__ for info in rp.SCHEMES.values()]


@pytest.mark.parametrize("name", [*FUNCTIONS, *CLASSES])
def test_every_public_function_and_scheme_has_an_example(name):
    assert "\n    Examples\n    --------\n    >>> " in (getattr(rp, name).__doc__ or "")
