"""Write the stubs that name schemes and formulas for type checkers: ``python docs/register.py [--check]``.

``--check`` writes nothing, and fails where a stub is not up to date.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from pathlib import Path
from types import ModuleType

import relpos_np as rp


def stub(module: ModuleType) -> str:
    """Names of a module, each imported from where it is defined."""
    lines = []
    for name in module.__all__:
        found = getattr(module, name)
        if inspect.ismodule(found):
            home = found.__name__.rpartition(".")[0]
        else:
            home = "relpos_np.schemes.registry" if found is rp.SCHEMES else found.__module__
        lines.append(f"from {home} import {name} as {name}")
    version = ["", "__version__: str", "__all__: list[str]"] if module is rp else ["", "__all__: list[str]"]
    return "\n".join([*sorted(lines), *version, ""])


def files() -> dict[Path, str]:
    """What should stand in each file."""
    package = Path(rp.__file__).parent
    return {
        package / "__init__.pyi": stub(rp),
        package / "reference.pyi": stub(rp.reference),
    }


def main() -> int:
    """Write the files, or compare with them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a file is not up to date")
    check = parser.parse_args().check
    old = [path for path, text in files().items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    for path in old:
        if check:
            sys.stderr.write(f"{path.name} is not up to date: run `python docs/register.py`\n")
        else:
            path.write_text(files()[path], encoding="utf-8")
    return int(check and bool(old))


if __name__ == "__main__":
    sys.exit(main())
