"""Independent witnesses: every formula as plain loops over b, h, i, j, written from the papers.

All functions of all files in this folder can be had from here; `of` finds the loops of a scheme.
"""

import importlib
import inspect
import pkgutil

for _file in pkgutil.iter_modules(__path__):
    _module = importlib.import_module(f"{__name__}.{_file.name}")
    for _name, _found in vars(_module).items():
        if inspect.isfunction(_found) and _found.__module__ == _module.__name__ and not _name.startswith("_"):
            # The file of a function may have its name.
            assert not inspect.isfunction(globals().get(_name)), f"two functions are called {_name}"
            globals()[_name] = _found
