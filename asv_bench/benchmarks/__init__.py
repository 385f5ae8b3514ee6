"""Benchmarks of relpos_np for airspeed velocity.

Cases and the 100 % marks are those of this tree, whatever commit of the package is measured: asv runs these files
against older ones too.
"""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from sys import modules

_PEERS = Path(__file__).parents[2] / "relpos_np" / "_commands" / "peers"

for _name, _file in (("cases", "shapes"), ("limit", "ceiling")):
    _spec = spec_from_file_location(f"{__name__}.{_name}", _PEERS / f"{_file}.py")
    modules[_spec.name] = globals()[_name] = module_from_spec(_spec)
    _spec.loader.exec_module(globals()[_name])
