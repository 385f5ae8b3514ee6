"""Interpreters beside the main one, in one process: NumPy is not loaded twice, and what runs is not disturbed."""

import pytest

from tests.faults.mixed import CHILD
from tests.processes import child

pytest.importorskip("numba")

# `beside` imports this library in an interpreter of its own, and returns what came of it.
CODE = CHILD + (
    "import threading\n"
    "try:\n"
    "    import _interpreters as interpreters\n"
    "except ImportError:\n"
    "    try:\n"
    "        import _xxsubinterpreters as interpreters\n"
    "    except ImportError:\n"
    "        raise SystemExit(77)\n"
    "ATTEMPT = '''\n"
    "import os\n"
    "try:\n"
    "    import relpos_np\n"
    "    relpos_np.attention\n"
    "    said = 'loaded'\n"
    "except ImportError as error:\n"
    "    said = 'refused: ' + str(error).splitlines()[0]\n"
    "os.write(TO, said.encode() + bytes(1))\n"
    "'''\n"
    "def beside():\n"
    "    read, write = os.pipe()\n"
    "    one = interpreters.create()\n"
    "    try:\n"
    "        interpreters.run_string(one, f'TO = {write}\\n' + ATTEMPT)\n"
    "    finally:\n"
    "        interpreters.destroy(one)\n"
    "    os.close(write)\n"
    "    with os.fdopen(read, 'rb') as pipe:\n"
    "        return pipe.read().decode().strip(chr(0))\n"
    "names = ('T5 float32', 'backward float32', 'numpy')\n"
    "expected = {name: mixed[name]() for name in names}\n"
)


def test_row_50_an_interpreter_beside_this_one_is_refused_by_numpy():
    """Again and again, the same; calls of the main interpreter and of its threads go on, with the bits they had."""
    code = (
        "stop, wrong, done = threading.Event(), [], []\n"
        "def work():\n"
        "    while not stop.is_set():\n"
        "        for name in names:\n"
        "            if mixed[name]() != expected[name]: wrong.append(name)\n"
        "            done.append(name)\n"
        "others = [threading.Thread(target=work) for _ in range(2)]\n"
        "for other in others: other.start()\n"
        "said = {beside() for _ in range(20)}\n"
        "before = len(done)\n"
        "while len(done) < before + 6: stop.wait(0.01)\n"
        "stop.set()\n"
        "for other in others: other.join()\n"
        "same = all(mixed[name]() == expected[name] for name in names)\n"
        "refused = all(one.startswith('refused: ') and len(one) > 20 for one in said)\n"
        "print(wrong, same, len(said), refused)\n"
    )
    status, out, log = child(CODE + code)
    if status == 77:
        pytest.skip("no module for other interpreters")
    assert (status, out) == (0, "[] True 1 True\n"), log
