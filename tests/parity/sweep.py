"""Every model type of transformers, tiny: this library's attention against the model's own, or refused by name.

``python -m tests.parity.sweep`` writes ``asv_bench/recorded/transformers.json``; arguments name model types.
"""

import contextlib
import inspect
import json
import logging
import math
import re
import signal
import sys
import time
import warnings
from datetime import UTC, datetime
from pathlib import Path

import torch
import transformers

import relpos_np as rp
from relpos_np.interop import torch as interop_torch
from relpos_np.interop.transformers import Used, register, used
from tests.parity import tiny

RECORD = Path(__file__).parents[2] / "asv_bench" / "recorded" / "transformers.json"
TOLERANCE = 1e-5
SECONDS = 5


class TooSlow(BaseException):
    """A model type that has had its seconds: nothing may catch it."""


@contextlib.contextmanager
def limited(seconds):
    """At most so many seconds of the processor, however many others share it."""

    def stop(*_):
        raise TooSlow

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def tensors(output):
    """All float tensors of a model's output, in its order."""
    if isinstance(output, torch.Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, dict):
        output = [x for name, x in output.items() if "past_key" not in name]
    if isinstance(output, (list, tuple)):
        return [x for part in output for x in tensors(part)]
    return []


def run(model, inputs):
    torch.manual_seed(0)
    with torch.no_grad():
        return tensors(model(**inputs))


def difference(found, expected, keep=None):
    """The largest one, relative to the largest number where that is above 1; of real tokens, where `keep` says them."""
    assert len(found) == len(expected) > 0
    worst = 0.0
    pairs = zip(found, expected, strict=True)
    if keep is not None:
        pairs = ((a[keep], b[keep]) for a, b in pairs if b.shape[:2] == keep.shape)
    for a, b in pairs:
        assert a.shape == b.shape
        # Infinities and NaN of its own are answers too.
        finite = b.isfinite()
        same = torch.equal(a[~finite].nan_to_num(), b[~finite].nan_to_num())
        size = b[finite].abs().max() if finite.any() else b.new_zeros(())
        gap = (a[finite] - b[finite]).abs().max() / size.clamp(min=1) if finite.any() else size
        worst = max(worst, float(gap) if same and not gap.isnan() else float("inf"))
    return worst


def paddings(model, inputs):
    """Masks of tokens: none, then some at the right and at the left of one sequence."""
    yield "none", None
    ids = inputs.get("input_ids", inputs.get("inputs_embeds"))
    if ids is None or "attention_mask" not in inspect.signature(model.forward).parameters:
        return
    for side, part in (("right", slice(-7, None)), ("left", slice(None, 7))):
        mask = torch.ones(ids.shape[:2], dtype=torch.int64)
        mask[0, part] = 0
        yield side, mask


def built(config_class):
    """A model, what it is fed, and the recipe it was made by."""
    reasons, without = [], None
    for recipe in tiny.RECIPES:
        try:
            torch.manual_seed(20260117)
            with torch.no_grad():
                model = tiny.build(config_class, recipe)
            choices = tiny.candidates(model)
        except Exception as error:  # noqa: BLE001 - a reason, recorded
            reasons.append(f"{type(error).__name__}: {error}")
            continue
        for inputs in choices:
            try:
                answer = run(model, inputs)
            except Exception as error:  # noqa: BLE001 - a reason, recorded
                reasons.append(f"{type(error).__name__}: {error}")
                continue
            if answer and all(x.isfinite().any() for x in answer if x.numel()):
                if used(model) != Used((), ()):
                    return model, inputs, recipe
                # Attention may be in a layer that was left out.
                without = without or (model, inputs, recipe)
                break
            reasons.append("no finite answer")
    if without:
        return without
    if not reasons:
        raise tiny.NotBuilt("no inputs that it takes")
    # On one line, without the folders of this machine.
    raise tiny.NotBuilt(re.sub(r"/[\w./+-]*/", "", " ".join(reasons[0].split()))[:150])


def verdict(config_class):
    """What became of one model type: a dict with ``verdict`` and its reasons."""
    try:
        model, inputs, recipe = built(config_class)
    except tiny.NotBuilt as error:
        return {"verdict": "not built", "why": str(error)}
    calls = []
    original = rp.attention

    def counted(*args, **options):
        calls.append(1)
        return original(*args, **options)

    found = {"recipe": recipe, "inputs": sorted(inputs)}
    cases = []
    for side, mask in paddings(model, inputs):
        given = inputs if mask is None else {**inputs, "attention_mask": mask}
        try:
            expected = run(model, given)
        except Exception:
            if mask is None:
                raise
            continue  # it takes no mask of this form
        if mask is None and difference(run(model, given), expected) > 0:
            return {**found, "verdict": "not built", "why": "its own answer changes from call to call"}
        cases.append((side, given, expected, None if mask is None else mask.bool()))
    layers = used(model)
    if not layers.here + layers.elsewhere:
        return {**found, "verdict": "no attention"}
    try:
        register(model)
    except rp.RelposError as error:
        return {**found, "verdict": "refused: not of the interface", "why": str(error)}
    layers = used(model)
    worst = {}
    interop_torch.rp.attention, before = counted, rp.attention
    try:
        for side, given, expected, keep in cases:
            worst[side] = difference(run(model, given), expected, keep)
    except rp.RelposError as error:
        return {**found, "verdict": "refused", "why": str(error)}
    finally:
        interop_torch.rp.attention = before
    found |= {
        "calls": len(calls),
        "layers": len(layers.here),
        "elsewhere": len(layers.elsewhere),
        "difference": {side: float(f"{x:.1e}") for side, x in worst.items()},
    }
    if not calls:
        return {**found, "verdict": "no call"}
    for side, given, expected, keep in cases:
        if worst[side] > TOLERANCE:
            reason = explained(model, given, expected, keep, worst[side])
            if reason is None:
                return {**found, "verdict": "differs"}
            found["because"] = reason
    return {**found, "verdict": "equal"}


def explained(model, inputs, expected, keep, gap):
    """Why a gap is the model's own: its float32 is further from its float64, or its "sdpa" differs in the same way."""
    if keep is not None:
        with contextlib.suppress(ValueError):
            model.set_attn_implementation("sdpa")
            own = run(model, inputs)
            register(model)
            if difference(run(model, inputs), own, keep) <= TOLERANCE:
                return 'its "sdpa" answers the same: rows of padding that see no key are read on'
    with contextlib.suppress(Exception):
        model.set_attn_implementation("eager")
        model.set_experts_implementation("eager")  # others have no float64
        exact = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
        own = difference([x.float() for x in run(model.double(), exact)], expected, keep)
        if gap <= own < math.inf:
            return f"its own float32 is {own:.0e} from its float64"
    return None


def sweep(names=None):
    """Verdicts by model type."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    register()
    for name, config_class in tiny.model_types().items():
        if names and name not in names:
            continue
        start = time.perf_counter()
        try:
            with limited(SECONDS):
                row = verdict(config_class)
        except TooSlow:
            row = {"verdict": "not built", "why": f"more than {SECONDS} s"}
        except Exception as error:  # noqa: BLE001 - a reason, recorded
            row = {"verdict": "failed", "why": f"{type(error).__name__}: {error}"[:300]}
        yield name, row, time.perf_counter() - start


def record(rows):
    """What the documentation shows: one line per model type."""
    kept = ("verdict", "why", "because", "difference", "elsewhere")
    lines = [json.dumps({name: {key: row[key] for key in kept if row.get(key)}})[1:-1] for name, row in rows.items()]
    about = {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
    }
    about |= {"length": tiny.LENGTH, "tolerance": TOLERANCE}
    RECORD.write_text(json.dumps(about)[:-1] + ', "types": {\n' + ",\n".join(lines) + "\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    rows = {}
    for name, row, seconds in sweep(sys.argv[1:]):
        rows[name] = row
        print(f"{seconds:5.1f} {name:35} {row}", flush=True)
    if not sys.argv[1:]:
        record(rows)
