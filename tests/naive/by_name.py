"""How tests find the loops of a scheme: by its name in the register, with its constructor's arguments by theirs."""

import inspect
from typing import Any, NamedTuple

import numpy as np

LOOPS = {}


class Loops(NamedTuple):
    """What a scheme changes in `tests.naive.attention`: closures of (b, h, i, j), or other operands and scale."""

    logit: Any = None
    value: Any = None
    q: Any = None
    k: Any = None
    scale: Any = None
    # In place of the scaled product of query and key.
    product: Any = None
    # Other values, and a closure of (b, h, i, row) that is applied to each row of the output.
    v: Any = None
    back: Any = None


def witness(name):
    """These are the loops of the scheme of that name.

    They take what they need of a call (q, k, v, l_q, l_k, heads, offset, scale, batch, last: the largest d that is
    attended, or None; positions, for what is added to inputs) and *all* arguments of the constructor, by name. They
    return `Loops`, or its first fields, or for an absolute scheme a vector per position.
    """

    def register(loops):
        assert name not in LOOPS, f"two functions are the loops of {name!r}"
        LOOPS[name] = loops
        return loops

    return register


def of(name, arguments, **call):
    """The loops of a scheme, for the arguments that it was made of and what is known of a call."""
    assert name in LOOPS, f"write loops from the paper into tests/naive/{name}.py, under @witness({name!r})"
    parameters = inspect.signature(LOOPS[name]).parameters
    missing = set(arguments) - set(parameters)
    assert not missing, f"the loops of {name!r} do not take {sorted(missing)}, which its constructor does"
    known = {**arguments, **call}
    found = LOOPS[name](**{key: known[key] for key in parameters if key in known})
    if isinstance(found, Loops | np.ndarray):
        return found
    return Loops(*found) if isinstance(found, tuple) else Loops(found)


def flat(x, batch, inner):
    """An array whose axes before the last `inner` ones broadcast to those of the batch, with one axis for them all."""
    x = np.asarray(x)
    return np.broadcast_to(x, (*batch, *x.shape[x.ndim - inner :])).reshape(-1, *x.shape[x.ndim - inner :])
