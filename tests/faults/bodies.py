"""Requests that anybody may send to the service of the documentation: right, damaged, and made to do harm."""

import io
import random
import zipfile

import numpy as np

from tests.faults.service import packed, request
from tests.fuzz.targets import mutated

# Of requests that are refused by what they hold, and by how much they ask for.
WRONG, LARGE = {400}, {413}


def good(rng):
    """Arrays of a right request, compressed or not."""
    arrays = dict(zip("qkv", request(rng.randrange(1 << 20)), strict=True))
    if rng.random() < 0.1:
        arrays["v"][0, 0] = rng.choice([np.nan, np.inf])
    return squeezed(**arrays) if rng.random() < 0.3 else packed(**arrays)


def squeezed(**arrays):
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    return file.getvalue()


def zipped(members, compression=zipfile.ZIP_STORED):
    """An archive of what need not be arrays."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, data in members:
            archive.writestr(name, data)
    return file.getvalue()


def npy(descr, shape, data=b""):
    """An array as its header states it, whatever follows."""
    text = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    text += b" " * (-(len(text) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + data


def zeros(*shapes):
    return dict(zip("qkv", (np.zeros(shape, np.float32) for shape in shapes), strict=True))


def entries(data, name, field, value):
    """An archive whose directory gives all members of a name another number: the sizes begin at bytes 20 and 24."""
    out, at = bytearray(data), 0
    while (at := out.find(b"PK\x01\x02", at)) >= 0:
        if out[at + 46 :].startswith(name):
            out[at + field : at + field + 4] = value.to_bytes(4, "little")
        at += 4
    return bytes(out)


def hostile():
    """Bodies by name, with the statuses that may answer them."""
    right = packed(**zeros(*[(4, 9, 32)] * 3))
    bomb = squeezed(**zeros(*[(4, 50_000, 32)] * 3))
    assert len(bomb) < 100_000
    array = npy("<f4", "(4, 9, 32)", bytes(4 * 4 * 9 * 32))
    lies = {
        "far more numbers than bytes": npy("<f4", "(4, 1000000000, 32)"),
        "more than can be counted": npy("<f4", "(4, 99999999999999999999, 32)"),
        "no numbers on a long axis": npy("<f4", "(4, 0, 1000000000000000)"),
        "objects": npy("|O", "(4, 9, 32)", b"\x80\x04K\x01."),
        "texts": npy("<U1000", "(1, 1, 1)", bytes(4000)),
        "a deep header": npy("<f4", "(" * 1000),
        "an expression": npy("<f4", "(4, 9, 32) * 10 ** 9"),
        "70 axes": npy("<f4", f"({'1, ' * 70})", bytes(4)),
        "of width 0": npy("|S0", "(4, 9, 32)"),
        "wide floats": npy("<f16", "(4, 9, 2)", bytes(16 * 72)),
        "complex": npy("<c8", "(4, 9, 32)", bytes(8 * 4 * 9 * 32)),
    }
    found = {name: (zipped([("q.npy", lie), ("k.npy", array), ("v.npy", array)]), WRONG) for name, lie in lies.items()}
    pairs = zeros((400, 1, 4, 1, 8), (1, 400, 4, 1, 8), (1, 400, 4, 1, 64))
    found |= {
        "a small file of many zeros": (bomb, LARGE),
        "a large answer": (packed(**zeros((1, 4, 3000, 1), (1, 4, 1, 1), (1, 4, 1, 20_000))), LARGE),
        "an answer for all pairs of items": (packed(**pairs), LARGE),
        "many pairs": (packed(**zeros((4, 60_000, 1), (4, 60_000, 1), (4, 60_000, 1))), LARGE),
        "many members": (zipped([(f"{n}.npy", npy("<f4", "()", bytes(4))) for n in range(3000)]), WRONG),
        "another member": (packed(**zeros(*[(4, 9, 32)] * 3), mask=np.ones(9)), WRONG),
        "no heads": (packed(**zeros((0, 9, 32), (4, 9, 32), (4, 9, 32))), WRONG),
        "vectors": (packed(**zeros((4,), (4,), (4,))), WRONG),
        "other heads": (packed(**zeros(*[(3, 9, 32)] * 3)), WRONG),
        "batches that do not fit": (packed(**zeros((2, 4, 9, 32), (3, 4, 9, 32), (3, 4, 9, 32))), WRONG),
        "integers": (packed(**{name: np.ones((4, 9, 32), int) for name in "qkv"}), WRONG),
        "no archive": (b"GET / HTTP/1.1\r\n\r\n" * 50, WRONG),
        "a single array": (array, WRONG),
        "a directory alone": (b"PK\x05\x06" + bytes(18), WRONG),
        "a name that is a path": (zipped([("../q.npy", array), ("k.npy", array), ("v.npy", array)]), WRONG),
        "a name twice": (right.replace(b"k.npy", b"q.npy"), WRONG),
        "another compression": (zipped([(f"{n}.npy", array) for n in "qkv"], zipfile.ZIP_LZMA), WRONG),
        "a size of 4 GB": (entries(right, b"q", 24, 0xFFFFFFFE), WRONG),
        "a compressed size of 4 GB": (entries(right, b"q", 20, 0xFFFFFFFE), WRONG),
        "members in one place": (entries(right, b"k", 42, 0), WRONG),
    }
    return found


def head(*fields, way=b"POST", path=b"/"):
    return b"\r\n".join([way + b" " + path + b" HTTP/1.1", b"Host: x", *fields, b"", b""])


# What no library for HTTP would send, with the statuses that may answer it: None if the connection ends without one.
RAW = {
    "no length": (head(b"Transfer-Encoding: chunked") + b"4\r\nPK\x03\x04\r\n0\r\n\r\n", {411}),
    "a length in words": (head(b"Content-Length: many"), {400}),
    "a negative length": (head(b"Content-Length: -1"), {400}),
    "a terabyte": (head(b"Content-Length: 1000000000000"), {413}),
    "a length of 100 digits": (head(b"Content-Length: " + b"9" * 100), {400, 413}),
    "nothing after it": (head(b"Content-Length: 1000") + b"PK\x03\x04", {400, None}),
    "empty": (head(b"Content-Length: 0"), {400}),
    "another way": (head(way=b"GET"), {405}),
    "another path": (head(b"Content-Length: 2", path=b"/../etc/passwd") + b"PK", {404}),
    "no request": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", {400, None}),
}


def mixed(seed, count):
    """So many requests as (kind, name, bytes, statuses): 60 % right, 25 % damaged, the others hostile."""
    rng, made = random.Random(seed), hostile()
    shapes = {"q": (4, 1000, 8), "k": (4, 1000, 8), "v": (4, 1000, 1000)}
    drawn = np.random.default_rng(seed)
    large = packed(**{name: drawn.standard_normal(shape, np.float32) for name, shape in shapes.items()})
    for n in range(count):
        share = rng.random()
        if n % 400 == 0:
            yield "good", "a large answer", large, {200}
        elif share < 0.60:
            yield "good", "", good(rng), {200}
        elif share < 0.85:
            yield "damaged", "", mutated(good(rng), drawn) or b"?", {200, 400, 413}
        elif share < 0.96:
            name = rng.choice(sorted(made))
            yield "hostile", name, *made[name]
        else:
            name = rng.choice(sorted(RAW))
            yield "raw", name, *RAW[name]
