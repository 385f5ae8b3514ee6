"""Twenty cases as a C header: its bytes, and a driver that runs kernels in C, C++ and Rust."""

import hashlib
import shutil
import subprocess
from pathlib import Path

import pytest

from relpos_np._commands import main as cli
from relpos_np.testing import c_header

# Of version 1, which is never to change: another set is another version.
V1 = "532b585d5dc305bdbc6ddda8a6726308c08c0f089c9ab480922d70d5e3ea20fd"
KERNEL, RUST = (Path(__file__).parent / name for name in ("c/attention.c", "rust/attention.rs"))


def test_the_header_is_frozen():
    assert c_header.VERSION == 1
    assert hashlib.sha256(c_header.header().encode()).hexdigest() == V1


def checked_by_driver(tmp_path, built):
    """Run the driver with a kernel that is right, and with one that is wrong where masks are aligned."""
    folder = tmp_path / "c"
    assert cli.main(["vectors", str(folder), "--format", "c"]) == 0
    for wrong in (0, 4):
        program = tmp_path / f"with_{wrong}"
        for command in built(folder, program, bool(wrong)):
            subprocess.run(command, check=True, timeout=120)
        done = subprocess.run([str(program)], capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == bool(wrong), done.stdout
        assert f"{20 - wrong} of 20 cases are right" in done.stdout
        assert done.stdout.count("WRONG") == wrong


@pytest.mark.parametrize(("compiler", "flags"), [("cc", ("-std=c99",)), ("c++", ("-x", "c++", "-std=c++11"))])
def test_the_driver_runs_a_kernel(tmp_path, capsys, compiler, flags):
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler}")

    def built(folder, program, wrong):
        sources = [str(folder / "relpos_driver.c"), str(KERNEL)]
        planted = ["-DWRONG"] if wrong else []
        yield [compiler, *flags, "-Wall", "-Werror", f"-I{folder}", *planted, *sources, "-lm", "-o", str(program)]

    checked_by_driver(tmp_path, built)
    assert "version 1" in capsys.readouterr().out
    assert cli.main(["vectors", str(tmp_path / "other"), "--format", "c", "--seed", "1"]) == 2


def test_the_driver_runs_a_kernel_in_rust(tmp_path):
    if shutil.which("rustc") is None or shutil.which("cc") is None:
        pytest.skip("no rustc, or no cc")

    def built(folder, program, wrong):
        library = f"{program}.a"
        planted = ["--cfg", "wrong"] if wrong else []
        as_library = ["--edition", "2021", "--crate-type", "staticlib", "-C", "panic=abort"]
        yield ["rustc", *as_library, *planted, str(RUST), "-o", library]
        yield ["cc", str(folder / "relpos_driver.c"), library, "-lm", "-lpthread", "-ldl", "-o", str(program)]

    checked_by_driver(tmp_path, built)
