"""One file per scheme: its formula, the same formula as terms, and what is registered of it.

A file that lies here is found; no list of schemes has to be kept.
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
