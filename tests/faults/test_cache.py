"""The kernel cache where it cannot be used, is damaged, is not to be trusted or is shared: calls work all the same."""

import ast
import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import stat
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.processes import child

pytest.importorskip("numba")
build = pytest.importorskip("relpos_np.kernels._numba.launch.build")
cache = pytest.importorskip("relpos_np.kernels._numba.launch.cache")

from relpos_np.kernels._numba.forward_pass import attend, shift  # noqa: E402

# The smallest kernel, so that compiling it again and again costs little.
SHIFT = (
    "x = rng.standard_normal((3, 5, 9))\n"
    "found, expected = (rp.rel_shift(x, variant='conformer', backend=b) for b in ('numba', 'numpy'))\n"
    "print(np.array_equal(found, expected))"
)


def in_child(folder, *options, code=SHIFT, **variables):
    status, out, log = child(code, *options, RELPOS_CACHE_DIR=str(folder), **variables)
    assert (status, out) == (0, "True\n"), log
    return log


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A cache folder of this test's own for new kernels in this process."""
    monkeypatch.setenv("RELPOS_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setattr(cache, "_not_kept", False)
    cache._folder.cache_clear()
    yield tmp_path / "kernels"
    cache._folder.cache_clear()


def made(kernel):
    """Where the machine code of a kernel that has just been asked for came from: "compiled" or "loaded"."""
    made = []
    compiled = kernel._compile
    kernel._compile = lambda: (made.append("compiled"), compiled())[1]
    assert kernel.address
    return made[0] if made else "loaded"


def new():
    """A kernel that does almost nothing, so that it compiles in a tenth of a second."""

    def _nothing(arrays, lengths, steps, call):
        pass

    return build.Kernel(_nothing, shift.__name__)


@pytest.fixture
def entry(folder):
    """The file of a kernel that has been kept."""
    assert made(new()) == "compiled"
    (path,) = folder.iterdir()
    assert made(new()) == "loaded"
    return path


def test_row_43_a_second_process_loads_what_the_first_compiled(tmp_path):
    assert "compiled _shift" in in_child(tmp_path / "new" / "folder")
    assert "compil" not in in_child(tmp_path / "new" / "folder")
    assert [p.suffix for p in (tmp_path / "new" / "folder").iterdir()] == [".bin"]


def test_row_43_every_byte_counts(entry):
    """Truncated anywhere, or a bit changed anywhere: compiled again, and the entry is whole afterwards."""
    content = entry.read_bytes()
    assert len(content) > 400
    places = [*range(0, 200, 13), *range(200, len(content), len(content) // 9), len(content) - 1]
    for at in places:
        for damaged in (content[:at], content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :]):
            entry.write_bytes(damaged)
            assert made(new()) == "compiled", at
            assert abs(len(entry.read_bytes()) - len(content)) < 10  # the function's number is part of its name
    assert made(new()) == "loaded"


def _other(arrays, lengths, steps, call):
    pass


# What stands before the code of an entry whose digest is right, given what should: JSON, or what is none.
CONTENTS = (
    b"", b"\xff\xfe", b"no json", b"null", b"3", b"{}", b"[]", b'["nothing"]', b"[" * 100_000,
    b'["attend_float32-0", "f", []]', b"[1, 2, 3]", b'[["nothing"], "f", []]',
)  # fmt: skip
HEADERS = {repr(content[:20]): lambda *_, content=content: content for content in CONTENTS} | {
    "a symbol that is not there": lambda of, name, needed: json.dumps([of, "nothing_of_the_sort", needed]).encode(),
    "needs what is not there": lambda of, name, needed: json.dumps([of, name, [*needed, "nothing_else"]]).encode(),
    "needs another type": lambda of, name, needed: json.dumps([of, name, 3]).encode(),
    "a symbol of another type": lambda of, name, needed: json.dumps([of, None, needed]).encode(),
}


@pytest.mark.parametrize("name", HEADERS)
def test_row_43_headers_that_say_something_else(name, entry):
    right, _, code = entry.read_bytes()[32:].partition(b"\n")
    content = HEADERS[name](*json.loads(right)) + b"\n" + code
    entry.write_bytes(hashlib.sha256(content).digest() + content)
    assert made(new()) == "compiled"
    assert made(new()) == "loaded"


def test_row_43_another_kernel_s_entry_is_not_run(entry):
    """A file that was renamed, as whoever may write to the folder can do, is not what its name says."""
    other = entry.with_name(entry.name.replace("nothing", "other"))
    other.write_bytes(entry.read_bytes())
    assert made(build.Kernel(_other, shift.__name__)) == "compiled"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names on this system")
@pytest.mark.parametrize("kind", ["folder", "loop", "dangling", "pipe", "link"])
def test_row_43_what_is_no_file(kind, entry, tmp_path):
    """Nor is a link followed, were it to a right entry that lies elsewhere."""
    entry.rename(tmp_path / "elsewhere")
    if kind == "folder":
        entry.mkdir()
    elif kind == "pipe":
        os.mkfifo(entry)
    else:
        targets = {"loop": entry, "dangling": entry.parent / "missing", "link": tmp_path / "elsewhere"}
        entry.symlink_to(targets[kind])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert made(new()) == "compiled"
        assert made(new()) == ("compiled" if kind == "folder" else "loaded")
    assert not entry.is_symlink()
    assert len(caught) == (kind == "folder")


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="no owners of files on this system")
def test_row_43_entries_that_others_may_write_are_not_run(entry, monkeypatch, caplog):
    caplog.set_level(logging.WARNING, "relpos_np")
    for mode in (0o664, 0o646, 0o666):
        entry.chmod(mode)
        assert made(new()) == "compiled"
        assert "others may write" in caplog.text
        assert made(new()) == "loaded"
        caplog.clear()
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    if owner:
        assert made(new()) == "compiled"
        assert f"belongs to user {owner}" in caplog.text
    else:
        assert made(new()) == "loaded"  # root's entries serve everybody, as in a container image


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root gives files away")
def test_row_43_another_user_s_entry_is_not_run(entry, caplog):
    os.chown(entry, 12345, 12345)
    assert made(new()) == "compiled"
    assert "belongs to user 12345" in caplog.text
    assert made(new()) == "loaded"


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="no owners of files on this system")
def test_row_43_a_folder_that_others_may_write_to_is_not_used(entry, monkeypatch, caplog):
    """Whoever may put files there might have put any; a folder like /tmp, where each keeps his own, is used."""
    caplog.set_level(logging.WARNING, "relpos_np")
    entry.parent.chmod(0o1777)
    assert made(new()) == "loaded"
    entry.parent.chmod(0o775)
    with pytest.warns(cache.CacheWarning, match="others may write to it"):
        assert made(new()) == "compiled"
    assert f"the kernel cache {entry.parent} is not used: others may write to it" in caplog.text
    entry.parent.chmod(0o755)
    monkeypatch.setattr(cache, "_not_kept", False)
    assert made(new()) == "loaded"


SETTINGS = {"BOUNDSCHECK": "1", "DEBUGINFO": "1", "LOOP_VECTORIZE": "0", "SLP_VECTORIZE": "1", "OPT": "2"}


@pytest.mark.slow
def test_row_43_settings_that_change_code_have_entries_of_their_own():
    """An entry that was compiled with checks is not run without them, nor the reverse."""
    code = f"from relpos_np.kernels._numba.launch.cache import _stamp; print(_stamp({shift.__name__!r}))"
    stamps = set()
    for settings in ({}, *({f"NUMBA_{name}": value} for name, value in SETTINGS.items())):
        status, stamp, log = child(code, bare=True, **settings)
        assert (status, len(stamp)) == (0, 21), log
        stamps.add(stamp)
    assert len(stamps) == 1 + len(SETTINGS)


@pytest.mark.skipif(sys.platform == "win32", reason="no modes of files")
@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o027, 0o077])
def test_row_43_entries_are_written_by_their_owner_alone(umask, folder):
    """And readable by others as far as the umask allows: an image's user is not the one who built it."""
    before = os.umask(umask)
    try:
        assert made(new()) == "compiled"
        assert made(new()) == "loaded"
    finally:
        os.umask(before)
    (path,) = folder.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o644 & ~umask


@pytest.mark.skipif(sys.platform == "win32", reason="no modes of files")
def test_row_43_the_user_s_own_folder_is_private(folder, tmp_path, monkeypatch):
    monkeypatch.delenv("RELPOS_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert made(new()) == "compiled"
    assert made(new()) == "loaded"
    assert stat.S_IMODE((tmp_path / ".cache" / "relpos_np").stat().st_mode) == 0o700


def test_row_43_an_upgrade_compiles_anew(entry, monkeypatch):
    monkeypatch.setattr(cache.numba, "__version__", "99.0")
    cache._stamp.cache_clear()
    try:
        assert made(new()) == "compiled"
        assert made(new()) == "loaded"
    finally:
        cache._stamp.cache_clear()
    assert len(list(entry.parent.iterdir())) == 2


def test_row_43_a_change_compiles_what_it_changes(monkeypatch):
    """A kernel depends on the sources that it imports, and these on theirs: on no other."""
    cache._stamp.cache_clear()
    before = [cache._stamp(module.__name__) for module in (attend, shift)]
    read = cache._source
    changed = f"{cache._PACKAGE}.forward_pass.scores"
    monkeypatch.setattr(cache, "_source", lambda name: (b"", ()) if name == changed else read(name))
    cache._stamp.cache_clear()
    after = [cache._stamp(module.__name__) for module in (attend, shift)]
    cache._stamp.cache_clear()
    assert [x == y for x, y in zip(before, after, strict=True)] == [False, True]


def test_row_43_no_import_of_a_source_is_overlooked():
    for path in cache._FOLDER.rglob("*.py"):
        home = ".".join((cache._PACKAGE, *path.relative_to(cache._FOLDER).with_suffix("").parts))
        imported = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                imported |= {node.module, *(f"{node.module}.{one.name}" for one in node.names)}
            elif isinstance(node, ast.Import):
                imported |= {one.name for one in node.names}
        own = {name for name in imported if name.startswith(cache._PACKAGE)}
        assert own <= {*cache._source(home)[1]}, path


@contextlib.contextmanager
def one_warning(words):
    """Kernels work without a cache, and one warning in all says so."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    (warning,) = caught
    assert issubclass(warning.category, cache.CacheWarning)
    assert re.search(words, str(warning.message))
    assert "RELPOS_CACHE_DIR" in str(warning.message)
    assert cache.cache_folder() is None


@pytest.mark.parametrize("where", ["below a file", "a file", "too long"])
def test_row_43_folders_that_cannot_be(where, folder, tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("")
    path = {"below a file": file / "cache", "a file": file, "too long": tmp_path / ("x" * 5000)}[where]
    monkeypatch.setenv("RELPOS_CACHE_DIR", str(path))
    with one_warning("Not a directory|File exists|File name too long"):
        assert made(new()) == made(new()) == "compiled"


def test_row_43_a_read_only_folder_is_read(entry, monkeypatch):
    """As an image has it, whose file system cannot be written: what is there is used, and one warning says the rest."""
    opened = os.open

    def read_only(path, flags, *mode):
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return opened(path, flags, *mode)

    monkeypatch.setattr(cache.os, "open", read_only)

    with one_warning("Read-only file system"):
        assert made(new()) == "loaded"
        assert cache.cache_folder() == entry.parent
        assert made(build.Kernel(_other, shift.__name__)) == "compiled"
        assert made(build.Kernel(_other, shift.__name__)) == "compiled"
        assert made(new()) == "loaded"


@pytest.mark.filterwarnings("error")
def test_row_43_a_warning_that_is_an_error_costs_one_call(folder):
    """With -W error the first call raises it; the kernel is there all the same."""
    folder.write_text("a file where the folder should be")
    kernel = new()
    with pytest.raises(cache.CacheWarning, match="RELPOS_CACHE_DIR"):
        _ = kernel.address
    assert kernel.address
    assert made(new()) == "compiled"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="no limits of processes")
def test_row_43_a_full_disk_leaves_nothing_behind(tmp_path):
    """The file of an entry is cut off in the middle of writing it."""
    code = (
        "import resource, signal\n"
        "from tests.faults.test_cache import made, new\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (500, resource.RLIM_INFINITY))\n"
        "print(made(new()) == made(new()) == 'compiled')\n"
    )
    log = in_child(tmp_path, "-W", "always", code=code)
    assert log.count("CacheWarning") == 1, log
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(sys.platform == "win32", reason="no such homes")
@pytest.mark.parametrize("home", ["cannot be made", "nobody's"])
def test_row_43_users_without_a_home(home, folder, tmp_path, monkeypatch):
    import pwd

    (tmp_path / "file").write_text("")
    for name in ("RELPOS_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    if home == "nobody's":
        monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
        with pytest.raises(RuntimeError):
            Path.home()
    else:
        monkeypatch.setenv("HOME", str(tmp_path / "file" / "home"))
    with one_warning("no home folder|Not a directory"):
        assert made(new()) == made(new()) == "compiled"


def test_row_43_an_interrupt_while_an_entry_is_written(folder, monkeypatch):
    def interrupted(path, target):
        raise KeyboardInterrupt

    kernel = new()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            _ = kernel.address
    assert not list(folder.iterdir())
    assert kernel.address
    assert made(new()) == "compiled"


@pytest.mark.stress
def test_row_43_eight_processes_share_a_cold_cache(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: in_child(tmp_path, code=SHIFT), range(8)))
    assert [path.name.partition("-")[0] for path in tmp_path.iterdir()] == ["shift"]
    assert "compil" not in in_child(tmp_path, code=SHIFT)
