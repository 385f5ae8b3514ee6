"""Runs the kernels of `relpos_np.kernels._numba` as the Python that they are written in, with every access checked.

`interpreted()` replaces what compiled code is made of: functions by their source, intrinsics by those of `vectors.py`,
and the launch of a kernel by one that calls it here, once for each thread. The planning host runs as it is.
"""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numba
import numpy as np
import pytest
from numba.core.dispatcher import Dispatcher
from numba.core.extending import _Intrinsic

from relpos_np._calls import repeated
from relpos_np.kernels import _numba as host
from relpos_np.kernels._numba.forward_pass.work import CODE
from relpos_np.kernels._numba.launch import launcher, records
from relpos_np.kernels._numba.plan import biases, division, ends
from tests.interpreted.memory import ADDRESS, Fault, Memory, Place, Pointer, Region, bounds, marks
from tests.interpreted.vectors import Vectors

# The package has kernels by the names of their modules.
MODULES = {
    name.rpartition(".")[2]: sys.modules[f"{host.__name__}.{name}"]
    for name in (
        *(
            "forward_pass.attend",
            "backward_pass.pairs",
            "backward_pass.sums",
            "backward_pass.kernel",
            "forward_pass.gated_positions",
            "forward_pass.decode",
            "launch.entries",
        ),
        *(
            "forward_pass.pack",
            "forward_pass.pages",
            "forward_pass.work",
            "forward_pass.planes",
            "forward_pass.product",
            "forward_pass.scores",
            "forward_pass.shift",
            "forward_pass.window",
        ),
    )
}
# Intrinsics by what they are called there, which is what `vectors.py` calls them.
INTRINSICS = {
    value: name.removeprefix("_")
    for module in MODULES.values()
    for name, value in vars(module).items()
    if isinstance(value, _Intrinsic)
}
# What lies behind the address that a kernel is called with, by the first word of its name.
RECORDS = {
    "attend": (records.CALL,),
    "windows": (records.CALL,),
    "decode": (records.CALL, records.DECODE),
    "backward": (records.CALL, records.BACKWARD),
    "product": (records.PRODUCT,),
    "count": (records.COUNT,),
    "recount": (records.COUNT,),
    "shift": (records.SHIFT,),
}
KINDS_OF_ORDER = ("in turn", "backwards", "one takes all")
INPUTS = {
    *("q", "k", "v", "bias", "allowed", "soft", "skew_q", "skew_w", "skew_index", "batches", "adds", "values", "keep"),
    *("q_turn", "k_turn", "ranges", "inner", "k_scale", "v_scale"),
    *("grad_out", "delta", "sinks", "dp_adds", "src", "map", "runs", "weights", "x", "table"),
    *("whole", "counted"),
}
# Results that one piece of work fills, of memory that holds anything before; then sums that begin at 0.
RESULTS = {"out", "lse", "partial", "slopes", "starts"}
SUMS = {
    "dq",
    "dk",
    "dv",
    "dense",
    "diag",
    "diag_low",
    "low",
    "skew_dw_low",
    "skew_dq",
    "skew_dw",
    "dst",
    "ds",
    "to_whole",
}
# Where any piece may leave word.
NOTES = {"ends"}
TABLES = {"adds": records.ADD, "dp_adds": records.ADD, "values": records.VALUE, "sinks": records.SINK}


def unpacked(content, kinds):
    """The fields of consecutive records as a dict."""
    found, at = {}, 0
    for kind in kinds:
        (one,) = np.frombuffer(content, kind, 1, at)
        found |= {name: one[name].item() for name in kind.names}
        at += kind.itemsize
    return found


class Machine:
    """One way to run kernels.

    Parameters
    ----------
    threads : int, optional
        So many, however small the work; default what the host chooses.
    order : str
        One of KINDS_OF_ORDER: which thread takes which piece of work, and when.
    poison : int
        Byte in all memory that nothing has been written to: 255 makes NaN of it.
    excluded : ndarray of bool, shape (batch items, L_k), optional
        Keys and values that may not be read.
    """

    def __init__(self, *, threads=None, order="in turn", poison=0xFF, excluded=None):
        self.threads, self.order, self.poison, self.excluded = threads, order, poison, excluded
        self.launches = Counter()
        self.lent = {}
        self.constants = [np.frombuffer(ends._met.kinds, np.int64)]

    # the host's side -----------------------------------------------------------------------------

    def lend(self, size, threads):
        """Workspaces that begin where a cache line does, with some bytes between them."""
        stride = -(-size // 64) * 64 + 64
        memory = np.full(threads * stride + 64, self.poison, np.uint8)
        address = memory.ctypes.data + -memory.ctypes.data % 64
        # Kept, so that no other array comes to lie there.
        self.lent[address] = size, threads, memory
        return memory, address, stride

    def run(self, kernel, record, threads):
        """Interpret a kernel in place of `launch.run`."""
        name = kernel.function.__name__.strip("_")
        self.launches[name] += 1
        fields = unpacked(record, RECORDS[name.partition("_")[0]])
        self.memory = Memory(name)
        where = np.frombuffer(record, np.uint8)
        self.memory.add(Region("record", where.ctypes.data, where.nbytes, writable=True))
        self._map(fields, self._held(sys._getframe(1)))
        # The kernel's own arguments: for each thread an array of its number's address, and a count of 1.
        numbers = np.arange(threads, dtype=np.int64)
        addresses, one = numbers.ctypes.data + 8 * numbers, np.ones(1, np.int64)
        for label, x in (("thread numbers", numbers), ("their addresses", addresses), ("lengths", one)):
            self.memory.add(Region(label, x.ctypes.data, x.nbytes))
        self.unit.m = self.memory
        pieces = self._pieces(fields, threads)
        for thread in range(threads) if self.order != "backwards" else reversed(range(threads)):
            self._start(fields, thread, pieces[thread])
            start = addresses.ctypes.data + 8 * thread
            arrays = Pointer(self.memory.find(start), start, ADDRESS, start, start + 8)
            with np.errstate(all="ignore"):
                self.plain(kernel.function)(arrays, self.unit.longs(one.ctypes.data), arrays, where.ctypes.data)

    def plain(self, value):
        """A compiled function, or an intrinsic, as Python; so are those that its closure holds."""
        if isinstance(value, _Intrinsic):
            return getattr(self.unit, INTRINSICS[value])
        function = value.py_func if isinstance(value, Dispatcher) else value
        for cell in function.__closure__ or ():
            if isinstance(cell.cell_contents, Dispatcher | _Intrinsic):
                self.patch.setattr(cell, "cell_contents", self.plain(cell.cell_contents))
        return function

    def _held(self, frame):
        """Arrays that the functions which launch keep alive, and those that live as long as the process."""
        found = list(self.constants)
        while "_numba" in Path(frame.f_code.co_filename).parts:
            for value in frame.f_locals.values():
                found += [x for x in (value, *getattr(value, "kept", ())) if isinstance(x, np.ndarray)]
            frame = frame.f_back
        unique = {(x.__array_interface__["data"][0], x.shape, x.strides, x.dtype): x for x in found if x.size}
        return [(*bounds(x), x) for x in unique.values()]

    def _map(self, fields, held):
        """Make the arrays that a record names legal, and nothing else."""
        uses = [(name, fields[name]) for name in fields if name in INPUTS | RESULTS | SUMS | NOTES and fields[name]]
        for name in fields.keys() - INPUTS - RESULTS - SUMS - NOTES - {"work"}:
            if any(low <= fields[name] < high for low, high, _ in held):
                raise Fault(f"{self.memory.kernel}: the record's {name} is an address; name it among the inputs")
        # The backward pass reads what the forward one has left.
        results = set() if self.memory.kernel.startswith("backward") else RESULTS
        for name in TABLES:
            for entry in self._entries(fields, name, held):
                uses += [(field, entry[field]) for field in entry if field in INPUTS | SUMS]
        if fields.get("work") and fields["work"] not in self.lent:
            uses.append(("work", fields["work"]))
        uses = [(name, address) for name, address in uses if address]
        # Arrays that share memory, such as a packed projection's parts, become one region.
        spans = []
        for low, high, x in sorted(held, key=lambda one: one[:2]):
            if not any(low <= address < high for _, address in uses):
                continue
            if spans and low < spans[-1][1]:
                spans[-1] = spans[-1][0], max(spans[-1][1], high), [*spans[-1][2], x]
            else:
                spans.append((low, high, [x]))
        for name, address in uses:
            if not any(low <= address < high for low, high, _ in spans):
                raise Fault(f"{self.memory.kernel}: the record's {name} is an address that nobody keeps alive")
        for low, high, arrays in spans:
            names = {name for name, address in uses if low <= address < high}
            if len(names & (results | SUMS)) and len(names) > 1:
                raise Fault(f"{self.memory.kernel}: {sorted(names)} share memory")
            result, own = bool(names & (results | SUMS)), names in ({"work"}, NOTES)
            name, legal = ", ".join(sorted(names)), marks(low, high, arrays)
            region = Region(name, low, high - low, legal=legal, writable=result or own, shared=result)
            if (names & results and fields["counter"] == 0) or (names == {"work"} and fields["cut"] == 0):
                region.bytes[:] = self.poison
            self.memory.add(region)
            # Gates count keys that a mask excludes, if they are in the record.
            if self.excluded is not None and names in ({"k"}, {"v"}) and "k_kind" in fields:
                (batches,) = (x for first, _, x in held if first == fields["batches"])
                self._exclude(region, fields, batches, *names)
        self.work = self.lent.get(fields.get("work"))
        if self.work:
            size, threads, _ = self.work
            size += (threads - 1) * fields["work_stride"]
            self.workspace = self.memory.add(Region("the workspace", fields["work"], size, writable=True))

    def _entries(self, fields, name, held):
        """The records of a table, as dicts."""
        if not fields.get(name):
            return []
        (table,) = (x for low, _, x in held if low == fields[name] and x.dtype == TABLES[name])
        return [dict(zip(table.dtype.names, row.tolist(), strict=True)) for row in table]

    def _exclude(self, region, fields, batches, name):
        """Of keys or values, make those illegal that no query may attend."""
        offsets = batches[records.BATCH_K if name == "k" else records.BATCH_V]
        heads = fields["heads"] // fields[name + "_group"]
        depth, size = fields["depth" if name == "k" else "v_depth"], 8 if self.memory.kernel.endswith("64") else 4
        size = 1 if fields[name + "_kind"] == CODE else 2 if fields[name + "_kind"] else size
        region.legal = np.zeros(region.size, np.uint8)
        base = fields[name] - region.start
        for b, shut in enumerate(np.broadcast_to(self.excluded, (fields["count"], fields["k_len"]))):
            for h in range(heads):
                for j in np.flatnonzero(~shut):
                    at = base + (int(offsets[b]) + h * fields[name + "_head"] + int(j) * fields[name + "_row"]) * size
                    region.legal[at : at + depth * size] = 1

    # the kernel's side -----------------------------------------------------------------------------

    def _pieces(self, fields, threads):
        """The pieces of work of each thread."""
        # Where a record counts in smaller units than pieces.
        unit = fields.get("run") or 1
        todo = list(range(fields["counter"], -(-fields["stop"] // unit)))
        if self.order == "one takes all":
            return [todo, *([] for _ in range(threads - 1))]
        mine = [todo[n::threads] for n in range(threads)]
        return [part[::-1] for part in mine] if self.order == "backwards" else mine

    def _start(self, fields, thread, pieces):
        """A thread begins; of the workspace it has its own part."""
        self.todo, self.end = iter(pieces), fields["stop"]
        if self.work:
            self.workspace.first = fields["work"] + thread * fields["work_stride"]
            self.workspace.last = self.workspace.first + self.work[0]

    def take(self, counter):
        """The thread's next piece of work, whose result must not depend on what memory held."""
        self.memory.put(counter, 0, self.memory.get(counter, 0) + 1)
        if self.work:
            at = self.workspace.first - self.workspace.start
            self.workspace.bytes[at : at + self.work[0]] = self.poison
        piece = next(self.todo, None)
        if piece is None:
            return self.end
        self.memory.piece = piece + 1
        return piece

    def carray(self, pointer, count, kind):
        """Records at an address, read once."""
        if not count:
            return []
        content = self.memory.row(pointer, 0, count * kind.itemsize).tobytes()
        at = range(0, len(content), kind.itemsize)
        return [SimpleNamespace(**unpacked(content[n:], (kind,))) for n in at]


def _layout(function):
    """A function that lays out a workspace, whose offsets know their buffers."""

    def places(*args):
        return Place.all_of(function.py_func(*args))

    places.py_func = function.py_func
    return places


@contextmanager
def interpreted(**options):
    """Run every kernel that is launched within the block in the interpreter; yields the `Machine`."""
    machine = Machine(**options)
    machine.unit = Vectors(None, machine.take)
    with pytest.MonkeyPatch.context() as patch:
        machine.patch = patch
        for module in MODULES.values():
            for name, value in list(vars(module).items()):
                if isinstance(value, Dispatcher):
                    patch.setattr(module, name, _layout(value) if "layout" in name else machine.plain(value))
                elif isinstance(value, _Intrinsic):
                    patch.setattr(module, name, machine.plain(value))
                elif "layout" in name and callable(value):  # a test's own
                    patch.setattr(module, name, _layout(SimpleNamespace(py_func=value)))
                elif value is numba.carray:
                    patch.setattr(module, name, machine.carray)
                elif name in ("run", "lend"):
                    patch.setattr(module, name, getattr(machine, name))
        for name in ("run", "lend"):
            patch.setattr(launcher, name, getattr(machine, name))

        def no_bias(dtype, k_len, made=biases._no_bias):
            row = made(dtype, k_len)
            machine.constants.append(row)
            return row

        patch.setattr(biases, "_no_bias", no_bias)
        # Elsewhere the same sizes may have been planned for other threads.
        patch.setattr(repeated, "form", lambda *_, **__: None)
        if machine.threads is not None:
            for module in (division, launcher, MODULES["product"], MODULES["shift"]):
                for name in ("SERIAL_FLOPS", "SERIAL_DECODE_FLOPS", "SERIAL_BYTES"):
                    patch.setattr(module, name, 1e-9, raising=False)
            for module in (launcher, MODULES["shift"]):
                patch.setattr(module, "available_threads", lambda: machine.threads)
        yield machine
