"""The command line: run attention on real data or a file, check every backend, describe the installation."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import numpy as np

import relpos_np as rp
from relpos_np.archive import UnusableError, attention_schemes, call_arguments, read
from relpos_np.completion import SHELLS, script
from relpos_np.errors import RelposError, RelposImportError
from relpos_np.terminal import note, print_json, print_lines, print_table, progress
from relpos_np.terminal import seconds as duration
from relpos_np.types import Array

_T = TypeVar("_T")

# Exit codes: 0, what was asked for was done; 1, a wrong number was found; 2, it could not be done.
_MISMATCH, _FAILED = 1, 2
# float32 against float64 on the real example, whose outputs are below 1.
_REAL_LIMIT = 2e-6
_REAL_HEADS = ("head 0", "head 3", "head 7", "head 11")

_ATTEND_HELP = """\
Without FILE: attention of four heads of a trained model (all-mpnet-base-v2, T5 bias) on two texts, which is part
of the package. The result is compared with what transformers computed and with the float64 reference.

FILE is an .npz archive, which is never unpickled. Its arrays:
  q k v            (..., H, L_q, D), (..., H_kv, L_k, D), (..., H_kv, L_k, D_v)
  mask             bool (True = may attend) or float (added)          optional
  key_lengths      integers, one per batch item                       optional
  scale offset     a number                                           optional
  causal           True or False                                      optional
  window           w, or (left, right); a negative entry is no limit  optional
  scheme           a name, as in --scheme                             optional
  position.NAME    parameter NAME of the scheme's constructor; position.key_coords.0 for its axis 0
The result holds `out` and `lse`.
"""
_ATTEND_EXAMPLE = """\
examples:
  relpos attend
  relpos attend --threads 1 --plot none --json

  python -c "import numpy as np; r = np.random.default_rng(0); \\
    np.savez('in.npz', **{n: r.standard_normal((1, 4, 100, 64), 'float32') for n in 'qkv'}, \\
    scheme='t5', **{'position.table': r.standard_normal((32, 4), 'float32'), 'position.max_distance': 64})"
  relpos attend in.npz --out out.npz
"""
_PLOT_HELP = """\
What positions do to the scores of a scheme's seeded example, where the content is the same everywhere; of an absolute
encoding its rows. Trained tables are random numbers. Needs matplotlib: pip install "relpos-np[plot]".
"""
_PLOT_EXAMPLE = """\
examples:
  relpos plot t5
  relpos plot transformer_xl --variant espnet_legacy --out shift.svg
"""
_CHECK_HELP = """\
Every scheme and variant with several lengths, masks and dtypes on every backend of this machine, against the
reference in float64. Errors are in units of what is tolerated (4 eps (1 + max |score|) sum p |v|, see
relpos_np.testing.tolerance), so that 1 is the limit.
"""
_CHECK_EXAMPLE = """\
examples:
  relpos check
  relpos check --seed 7 --json > check.json
"""

_VECTORS_HELP = """\
Golden vectors: for every scheme and variant inputs, constructor arguments, masks, and the exact output, log-sum-exp
and gradients in float64 with the tolerances of each precision; and the functions in which published codes differ.
One .npz and one .json per record, and a manifest.json with checksums; docs/vectors.md describes them.

With --check the set is read back, files are compared with their checksums, and every backend of this machine computes
each record from its file alone. Exit code 1 if a file is missing or damaged, or a number is not within its tolerance.
"""
_VECTORS_EXAMPLE = """\
examples:
  relpos vectors golden
  relpos vectors --check golden
  relpos vectors golden-7 --seed 7 --json
"""

_WARMUP_HELP = """\
Compile every CPU kernel for this processor and keep it in RELPOS_CACHE_DIR (default: the user's cache folder), so that
no later process pays for it. About half a minute the first time. An entry serves the processor model it was made on.
"""
_WARMUP_EXAMPLE = """\
examples:
  relpos warmup
  RELPOS_CACHE_DIR=kernels relpos warmup --json
"""

_INFO_HELP = """\
What this installation consists of: please add it to a report of a problem. `relpos_np.show_versions()` prints the same.
"""
_INFO_EXAMPLE = """\
examples:
  relpos info
  relpos info --json
"""

_COMPLETION_HELP = """\
Print a script that makes the shell complete commands, options, their values and files. Load it where the shell starts:
  bash  eval "$(relpos completion bash)" in ~/.bashrc
  zsh   eval "$(relpos completion zsh)" in ~/.zshrc, after compinit
  fish  relpos completion fish | source in ~/.config/fish/config.fish
"""
_COMPLETION_EXAMPLE = """\
examples:
  relpos completion bash > relpos.bash
  relpos completion zsh
  relpos completion fish
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments without the program's name; default those of the process.

    Returns
    -------
    int
        Exit code: 0; 1 if a wrong number was found; 2 for unusable arguments or files.
    """
    args = _parser().parse_args(argv)
    try:
        return int(args.run(args))
    except (RelposError, MemoryError) as error:
        message = " ".join(str(error).split()) or "out of memory"
        if isinstance(error, MemoryError):
            message += "; backend numba needs the least, and a part of the queries less than all"
        note(f"relpos {args.command}: {message}")
        return _FAILED
    except KeyboardInterrupt:
        note(f"relpos {args.command}: interrupted")
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="relpos", description=rp.__doc__)
    parser.add_argument("--version", action="version", version=f"relpos {rp.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run: Callable[..., int], summary: str, text: str, example: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            name,
            help=summary,
            description=text or summary,
            epilog=example,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
        sub.set_defaults(run=run)
        return sub

    attend = command("attend", _attend, "attention on real data, or on a file", _ATTEND_HELP, _ATTEND_EXAMPLE)
    attend.add_argument("file", nargs="?", type=Path, metavar="FILE", help="an .npz archive with q, k and v")
    attend.add_argument("--scheme", help=f"of a FILE: {', '.join(attention_schemes())}; default: no positions")
    attend.add_argument("--out", type=Path, help="where the result of a FILE goes; default FILE-out.npz")
    attend.add_argument(
        "--plot",
        metavar="PNG",
        help='picture to write; "none" for none; default relpos-attend.png, with a FILE none',
    )
    attend.add_argument("--backend", choices=rp.backend.BACKENDS, help="default: $RELPOS_BACKEND, or numba")
    attend.add_argument("--threads", type=_positive, metavar="N", help="threads of the numba backend")

    picture = command("plot", _plot, "a picture of a scheme", _PLOT_HELP, _PLOT_EXAMPLE)
    picture.add_argument("scheme", choices=tuple(rp.SCHEMES), metavar="SCHEME", help=", ".join(rp.SCHEMES))
    picture.add_argument("--variant", help="of the scheme; default its first")
    picture.add_argument("--seed", type=_natural, default=0, metavar="N", help="of the random numbers; default 0")
    picture.add_argument("--out", metavar="FILE", help="PNG, SVG, PDF ...; default relpos-SCHEME.png")

    check = command("check", _check, "all backends against the reference", _CHECK_HELP, _CHECK_EXAMPLE)
    check.add_argument("--seed", type=_natural, default=0, metavar="N", help="of the random numbers; default 0")

    vectors = command(
        "vectors", _vectors, "exact answers as files, for tests in any language", _VECTORS_HELP, _VECTORS_EXAMPLE
    )
    vectors.add_argument("folder", type=Path, metavar="DIR", help="to write to, new or empty; with --check, to read")
    vectors.add_argument("--check", action="store_true", help="read DIR back, and compare every backend with it")
    vectors.add_argument("--seed", type=_natural, metavar="N", help="of the random numbers; default 0")
    vectors.add_argument(
        "--bfloat16", action="store_true", help='also records in bfloat16; needs pip install "relpos-np[safetensors]"'
    )

    command("warmup", _warmup, "compile all kernels, for a container image", _WARMUP_HELP, _WARMUP_EXAMPLE)
    command("info", _info, "versions, processor, threads, kernel cache", _INFO_HELP, _INFO_EXAMPLE)

    # Not by command(): a script has no form in JSON.
    completion = commands.add_parser(
        "completion",
        help="tab completion for bash, zsh or fish",
        description=_COMPLETION_HELP,
        epilog=_COMPLETION_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    completion.add_argument("shell", choices=tuple(SHELLS), help="for which shell")
    completion.set_defaults(run=_completion)
    return parser


def _natural(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"expected a number from 0 on, found {text}")
    return number


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a number from 1 on, found {text}")
    return number


# ---------------------------------------------------------------------------------------------- attend


@contextmanager
def _threads(count: int | None, backend: str) -> Iterator[None]:
    """Run with so many threads."""
    if count is None:
        yield
        return
    if backend != "numba":
        raise UnusableError(
            f"--threads: only backend 'numba' has threads of its own, the backend is {backend!r}; add --backend numba"
        )
    rp.backend.kernels("numba")
    import numba

    before, most = numba.get_num_threads(), numba.config.NUMBA_NUM_THREADS
    if count > most:
        raise UnusableError(f"--threads: at most {most} here (processors, or NUMBA_NUM_THREADS), found {count}")
    numba.set_num_threads(count)
    try:
        yield
    finally:
        numba.set_num_threads(before)


def _timed(call: Callable[[], _T]) -> tuple[_T, float]:
    started = time.perf_counter()
    result = call()
    return result, time.perf_counter() - started


def _repeated(calls: Mapping[str, Callable[[], Any]], rounds: int = 5, budget: float = 1.0) -> dict[str, list[float]]:
    """Sorted seconds of each call; they take turns of some calls each, so that a busy machine slows all of them."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            stop = time.perf_counter() + budget / rounds / len(calls)
            for n in range(50):
                if n >= 3 and time.perf_counter() > stop:
                    break
                times[name].append(_timed(call)[1])
    return {name: sorted(spent) for name, spent in times.items()}


def _attend(args: argparse.Namespace) -> int:
    backend = rp.backend.current(args.backend)
    if args.file is not None:
        with _threads(args.threads, backend):
            return _attend_file(args, backend)
    for name in ("scheme", "out"):
        if getattr(args, name) is not None:
            raise UnusableError(f"--{name}: goes with a FILE: relpos attend FILE --{name} ...")
    with _threads(args.threads, backend):
        return _attend_real(args, backend)


def _kernel_facts(backend: str) -> dict[str, Any]:
    """Vector unit and threads, which only compiled kernels have."""
    if backend != "numba":
        return {"vectors": None, "threads": None}
    kernels = rp.versions.kernels()
    if isinstance(kernels, str):
        return {"vectors": None, "threads": None}
    return {"vectors": kernels["vectors"], "threads": kernels["threads"]}


def _announce(args: argparse.Namespace, backend: str) -> None:
    """Say why the next seconds pass in silence, to whoever sits there."""
    if backend == "numba" and sys.stderr.isatty() and not args.json:
        note("loading the kernel; the first time it is compiled, in about 10 s ...")


def _attend_real(args: argparse.Namespace, backend: str) -> int:
    """The embedded example: correct, and how fast."""
    from relpos_np.testing import real_example

    real = real_example()
    options: dict[str, Any] = {
        "position": rp.T5(real["table"], max_distance=128),
        "mask": real["mask"][:, None, None, :],
        "scale": 0.125,
    }
    q, k, v, expected = (real[name] for name in ("q", "k", "v", "expected"))

    def call(name: str) -> Array:
        return np.asarray(rp.attention(q, k, v, backend=name, **options))

    _announce(args, backend)
    out, first = _timed(lambda: call(backend))
    oracle = rp.attention(*(x.astype(np.float64) for x in (q, k, v)), backend="numpy", **options)
    errors = {"transformers": _largest(out, expected), "float64": _largest(out, oracle)}
    ok = all(error <= _REAL_LIMIT for error in errors.values())
    times = _repeated({name: partial(call, name) for name in (backend, "numpy")})
    seconds, numpy_seconds = median(times[backend]), median(times["numpy"])
    load = _load()
    path, problem = _draw(args.plot or "relpos-attend.png", lambda: _real_picture(real, options))
    found = {
        "backend": backend,
        "ok": ok,
        "error": errors,
        "limit": _REAL_LIMIT,
        "seconds": seconds,
        "fastest_seconds": times[backend][0],
        "runs": len(times[backend]),
        "numpy_seconds": numpy_seconds,
        "speedup": numpy_seconds / seconds,
        "first_call_seconds": first,
        "load": load,
        **_kernel_facts(backend),
        "plot": path,
    }
    if problem:
        note(f"relpos attend: {problem}")
    if args.json:
        print_json(found)
        return 0 if ok else _MISMATCH
    texts, heads, length, dim = q.shape
    lines = [
        ("data", f"all-mpnet-base-v2, layer 5: {texts} texts, {heads} heads, {length} tokens, head_dim {dim}, float32"),
        ("positions", "T5, 32 buckets up to distance 128"),
        ("backend", f"{backend}, {found['vectors']}, {found['threads']} threads" if found["vectors"] else backend),
        ("max error", f"{errors['transformers']:.1e} from transformers"),
        ("", f"{errors['float64']:.1e} from the float64 reference"),
        ("verdict", f"correct (limit {_REAL_LIMIT:.0e})" if ok else f"MISMATCH: the limit is {_REAL_LIMIT:.0e}"),
        ("time", f"{duration(seconds)} (median of {len(times[backend])}, fastest {duration(times[backend][0])})"),
        ("first call", duration(first)),
    ]
    if backend != "numpy":
        lines.append(("NumPy", f"{duration(numpy_seconds)}: {backend} is {numpy_seconds / seconds:.1f} times as fast"))
    if load is not None and load > 1:
        lines.append(("note", "this machine is busy, so times are longer than they should be"))
    if path:
        lines.append(("picture", path))
    print_lines(lines)
    return 0 if ok else _MISMATCH


def _largest(actual: Array, expected: Array) -> float:
    """The largest difference; a NaN counts as infinite."""
    difference = float(np.abs(actual.astype(np.float64) - expected).max())
    return np.inf if np.isnan(difference) else difference


def _load() -> float | None:
    """Programs that want to run, per processor, during the last minute."""
    return os.getloadavg()[0] / (os.cpu_count() or 1) if hasattr(os, "getloadavg") else None


def _real_picture(real: Mapping[str, Array], options: Mapping[str, Any]) -> Any:
    """The shorter text, without its padding; head 11, which looks for the next word."""
    from relpos_np import plot

    length = int(real["mask"][1].sum())
    return plot.attention_with_and_without(
        real["q"][1, :, :length],
        real["k"][1, :, :length],
        position=options["position"],
        scale=options["scale"],
        tokens=[str(token) for token in real["tokens"][1, :length]],
        head=3,
        heads=_REAL_HEADS,
        title="What positions do to attention: all-mpnet-base-v2, layer 5",
    )


def _draw(target: str | None, picture: Callable[[], Any]) -> tuple[str | None, str | None]:
    """Write a picture; return its path, and what to tell the user where there is none."""
    if target is None or target.lower() == "none":
        return None, None
    from relpos_np import plot

    try:
        figure = picture()
    except RelposImportError as error:
        return None, f"no picture: {error}"
    plot.save(figure, target)
    return target, None


def _attend_file(args: argparse.Namespace, backend: str) -> int:
    """Attention of the arrays in a file."""
    arrays = read(args.file)
    out_path = args.out or args.file.with_name(f"{args.file.stem}-out.npz")
    with suppress(OSError):
        if out_path.samefile(args.file):
            raise UnusableError(f"--out: {out_path} is the input")
    call = call_arguments(arrays, args.scheme, str(args.file))
    q, k, v = (call.pop(name) for name in "qkv")
    _announce(args, backend)
    (out, lse), seconds = _timed(lambda: rp.attention(q, k, v, backend=backend, return_lse=True, **call))
    try:
        with out_path.open("wb") as file:
            np.savez(file, out=out, lse=lse)
    except OSError as error:
        raise UnusableError(
            f"{out_path}: cannot be written: {error.strerror or error}; choose another place with --out"
        ) from error

    def picture() -> Any:
        from relpos_np import plot

        # Batch and head 0.
        p = plot.attention_weights(q, k, **call)
        return plot.heat_map(p.reshape(-1, *p.shape[-2:])[0], title=f"{args.file.name}: attention of head 0").figure

    path, problem = _draw(args.plot, picture)
    if problem:
        note(f"relpos attend: {problem}")
    found = {
        "file": str(args.file),
        "out": str(out_path),
        "shape": list(out.shape),
        "dtype": str(out.dtype),
        "position": None if call.get("position") is None else repr(call["position"]),
        "finite": bool(np.isfinite(out).all()),
        "backend": backend,
        **_kernel_facts(backend),
        "first_call_seconds": seconds,
        "plot": path,
    }
    if args.json:
        print_json(found)
        return 0
    lines = [
        ("input", f"q {q.shape}, k {k.shape}, v {v.shape}, {q.dtype}"),
        ("positions", found["position"] or "none"),
        ("output", f"{out_path}: out {out.shape} {out.dtype}, lse {lse.shape} {lse.dtype}"),
        ("time", f"{duration(seconds)} on backend {backend}, first call"),
    ]
    if not found["finite"]:
        lines.append(("note", "the output holds NaN or infinity"))
    if path:
        lines.append(("picture", path))
    print_lines(lines)
    return 0


def _plot(args: argparse.Namespace) -> int:
    """The picture of `relpos_np.pictures`."""
    from relpos_np import pictures, plot

    path = args.out or f"relpos-{args.scheme}.png"
    plot.save(pictures.scheme_picture(args.scheme, variant=args.variant, seed=args.seed), path)
    if args.json:
        print_json({"scheme": args.scheme, "variant": args.variant, "seed": args.seed, "plot": path})
    else:
        print_lines([("picture", path)])
    return 0


# ---------------------------------------------------------------------------------------------- check and info


def _check(args: argparse.Namespace) -> int:
    """The sweep of `relpos_np.sweep`, as a table."""
    from relpos_np.sweep import DTYPES, cases, parts

    backends, absent = rp.backend.available()
    worst: dict[tuple[str, str | None, str, str], tuple[float, str]] = {}
    count, started = 0, time.perf_counter()
    for part in progress(parts(), "checking", quiet=args.json):
        for case in cases(*part, backends, args.seed):
            key = *part, case.backend, case.dtype
            error = case.error()
            count += 1
            if key not in worst or error > worst[key][0]:
                worst[key] = error, case.example.where
    ok = all(error <= 1 for error, _ in worst.values())
    seconds = time.perf_counter() - started
    if args.json:
        names = ("scheme", "variant", "backend", "dtype")
        results = [
            {**dict(zip(names, key, strict=True)), "error": error, "where": where, "ok": error <= 1}
            for key, (error, where) in worst.items()
        ]
        found = {"ok": ok, "seed": args.seed, "cases": count, "seconds": seconds}
        print_json({**found, "not_available": absent, "results": results})
        return 0 if ok else _MISMATCH

    def cell(*key: Any) -> str:
        return f"{worst[key][0]:.2f}" if key in worst else "   -"

    rows = []
    for name, variant in dict.fromkeys(key[:2] for key in worst):
        cells = (" ".join(cell(name, variant, backend, dtype) for dtype in DTYPES) for backend in backends)
        rows.append([name, variant or "", *(text if text.strip(" -") else "" for text in cells)])
    print(f"Largest errors in units of the tolerance, in {', '.join(DTYPES)}:")
    print_table(["scheme", "variant", *backends], rows)
    for backend, reason in absent.items():
        print(f"not checked: {backend}: {reason}")
    for (_, _, backend, _), (error, where) in worst.items():
        if error > 1:
            print(f"MISMATCH on {backend}: {error:.3g} times the tolerance in {where}")
    print(f"{count} cases in {seconds:.0f} s; {'all' if ok else 'NOT all'} within the tolerance")
    return 0 if ok else _MISMATCH


def _vectors(args: argparse.Namespace) -> int:
    """Write a set of golden vectors, or check one."""
    from relpos_np.testing import golden

    started = time.perf_counter()
    if not args.check:
        options = {"seed": args.seed or 0, "bfloat16": args.bfloat16}
        names = sum(1 for _ in progress(golden.writing(args.folder, **options), "writing", quiet=args.json))
        size = sum(path.stat().st_size for path in args.folder.iterdir())
        if args.json:
            print_json({"folder": str(args.folder), "records": names, "bytes": size, **options})
        else:
            print(f"{names} records, {size / 1e6:.1f} MB, written to {args.folder}")
        return 0
    for name in ("seed", "bfloat16"):
        if getattr(args, name):
            raise UnusableError(f"--{name}: goes without --check; what was written decides")
    backends, absent = rp.backend.available()
    listed = golden.manifest(args.folder)
    found = [
        one
        for name, entry in progress(list(listed.items()), "checking", quiet=args.json)
        for one in golden.check_record(args.folder, name, entry, backends)
    ]
    wrong = [one for one in found if not one.ok]
    worst = max((one.error for one in found if one.ok), default=0.0)
    if args.json:
        facts = {"ok": not wrong, "records": len(listed), "comparisons": len(found), "largest_error": worst}
        problems = [{"record": one.record, "what": one.what, "error": one.error} for one in wrong]
        print_json({**facts, "backends": list(backends), "not_available": absent, "problems": problems})
        return _MISMATCH if wrong else 0
    for one in wrong:
        amount = "" if one.error == np.inf else f": {one.error:.3g} times the tolerance"
        print(f"MISMATCH: {one.record}: {one.what}{amount}")
    for backend, reason in absent.items():
        print(f"not checked: {backend}: {reason}")
    print(
        f"{len(listed)} records, {len(found)} comparisons in {time.perf_counter() - started:.0f} s on "
        f"{', '.join(backends)}: {f'{len(wrong)} NOT' if wrong else 'all'} within the tolerance "
        f"(largest error {worst:.2f} of it)"
    )
    return _MISMATCH if wrong else 0


def _warmup(args: argparse.Namespace) -> int:
    """Compile what is not in the cache yet."""
    kernels = rp.backend.kernels("numba")
    done = dict(progress(kernels.warm_up(), "compiling", quiet=args.json))
    folder = kernels.cache_folder()
    if args.json:
        print_json({"folder": None if folder is None else str(folder), "seconds": done})
        return 0
    print_table(["kernel", "seconds"], [[name, f"{seconds:.1f}"] for name, seconds in done.items()])
    print(f"kept in {folder}" if folder is not None else "not kept: the folder cannot be written")
    return 0


def _info(args: argparse.Namespace) -> int:
    rp.show_versions(as_json=args.json)
    return 0


def _completion(args: argparse.Namespace) -> int:
    print(script(args.shell, _parser(), {"--scheme": attention_schemes()}), end="")
    return 0
