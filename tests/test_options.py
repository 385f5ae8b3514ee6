"""The options of a call are spelled in one place, and every function that takes them knows them alike."""

import importlib
import inspect
import pkgutil

import numpy as np
import pytest

import relpos_np as rp
from relpos_np import layers
from relpos_np._contract.options import DEFAULTS, Options


def functions():
    """Everything decorated with `takes`, in modules that can be imported here, by its name in the package."""
    found = {}
    for info in pkgutil.walk_packages(rp.__path__, "relpos_np."):
        if any(part.startswith("_") for part in info.name.split(".")) or ".kernels" in info.name:
            continue
        try:
            module = importlib.import_module(info.name)
        except rp.RelposImportError:
            continue
        for owner in (module, *(x for x in vars(module).values() if inspect.isclass(x))):
            for function in vars(owner).values():
                if inspect.isfunction(function) and isinstance(getattr(function, "options", None), frozenset):
                    found[f"{function.__module__.removeprefix('relpos_np.')}.{function.__qualname__}"] = function
    return found


FUNCTIONS = functions()
TO_ONNX = "interop.onnx.export.to_onnx"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_signatures_list_options_with_their_defaults(name):
    function = FUNCTIONS[name]
    parameters = inspect.signature(function).parameters
    assert not any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    assert function.options <= set(Options.__annotations__)
    for option in set(Options.__annotations__) & set(parameters):
        assert parameters[option].kind is inspect.Parameter.KEYWORD_ONLY
        needed = (name, option) == ("paged.paged_attention", "key_lengths")
        assert parameters[option].default == (inspect.Parameter.empty if needed else DEFAULTS[option]), option
    # A model that is written is computed by others.
    assert {"causal", "window"} | ({"backend"} if name != TO_ONNX else set()) <= set(parameters)
    assert ("mask" in parameters) == (name != "paged.paged_attention")
    # What is prepared may be called with other lengths each time.
    assert ("key_lengths" in parameters) == (name != "api.prepare")


def module(name):
    """One of the modules of `relpos_np.layers`."""
    eye, biases = np.eye(4), np.ones((2, 2, 2))
    if name == "MultiHeadAttention":
        return layers.MultiHeadAttention(eye, eye, eye, heads=2)
    return layers.RelativeMultiHeadAttention(eye, eye, eye, pos=eye, content_bias=biases[0], position_bias=biases[1])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_unknown_options_are_refused_with_what_was_meant(name):
    """Before anything else is looked at; so are options that only other functions have."""
    function = FUNCTIONS[name]
    parameters = inspect.signature(function).parameters
    needed = {p.name: None for p in parameters.values() if p.default is p.empty}
    if "self" in needed:
        needed["self"] = module(name.split(".")[-2])
    for option in ("casual", *(set(Options.__annotations__) - set(parameters))):
        with pytest.raises(rp.RelposTypeError, match=rf"^{option}: .*has no such argument") as caught:
            function(**needed, **{option: None})
        assert option != "casual" or "did you mean 'causal'?" in str(caught.value)
