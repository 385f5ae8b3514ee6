"""An interpreter beside the main one, in one process: NumPy is not loaded twice, and what runs is not disturbed."""

import pytest

from tests.processes import child

pytest.importorskip("numba")

CODE = """
import threading
try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters
ATTEMPT = '''
import os
try:
    import relpos_np
    relpos_np.attention
    said = 'loaded'
except ImportError as error:
    said = 'refused'
os.write(TO, said.encode())
'''

def beside():
    read, write = os.pipe()
    one = interpreters.create()
    interpreters.run_string(one, f'TO = {write}\\n' + ATTEMPT)
    interpreters.destroy(one)
    os.close(write)
    with os.fdopen(read) as pipe:
        return pipe.read()

q = rng.standard_normal((4, 300, 32))
expected, stop, same = rp.attention(q, q, q), threading.Event(), []

def work():
    while not stop.is_set() or not same:
        same.append((rp.attention(q, q, q) == expected).all())

other = threading.Thread(target=work)
other.start()
said = {beside() for _ in range(20)}
stop.set()
other.join()
print(said, all(same), (rp.attention(q, q, q) == expected).all())
"""


@pytest.mark.slow
def test_row_50_an_interpreter_beside_this_one_is_refused_by_numpy():
    """Again and again; calls of the main interpreter and of its threads go on, with the bits they had."""
    status, out, log = child(CODE)
    if "No module named '_xxsubinterpreters'" in log:
        pytest.skip("no module for other interpreters")
    assert (status, out) == (0, "{'refused'} True True\n"), log
