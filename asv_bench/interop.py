"""Time whole encoders: ``python asv_bench/interop.py --out FILE``.

Encoders of the sizes of BERT-base and T5-small, with random weights: as transformers runs them on PyTorch, as ONNX
Runtime and OpenVINO run what is exported of them, and with this library's `unpadded`. A batch of texts of many lengths,
and one long text. Each way has a process of its own, and they take turns. A ratio is the median over rounds of the
ratio within a round; an error is the largest at a real token, beside the same model in float64.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from relpos_np._commands.peers import OURS  # noqa: E402
from relpos_np.versions import processor  # noqa: E402

# Lengths of sentences: log-normal, half of all up to 36 tokens, and none beyond 85.
MANY, LONG = "32 texts", "one text"
WORKS = [(model, texts) for model in ("BERT-base", "T5-small") for texts in (MANY, LONG)]
WAYS = {"float32": (OURS, "transformers", "onnxruntime", "openvino"), "bfloat16": (OURS, "transformers", "openvino")}


def encoder(name):
    """A model of a size, with random weights, the same ones in each process."""
    import torch
    import transformers

    torch.manual_seed(0)
    if name == "BERT-base":
        return transformers.BertModel(transformers.BertConfig(return_dict=False), add_pooling_layer=False).eval()
    size = {"num_layers": 6, "d_model": 512, "num_heads": 8, "d_kv": 64, "d_ff": 2048}
    return transformers.T5EncoderModel(transformers.T5Config(**size, use_cache=False, return_dict=False)).eval()


def texts_of(kind):
    """Tokens, and which of them are no padding."""
    import numpy as np
    import torch

    rng = np.random.default_rng(0)
    many = np.clip(np.round(np.exp(rng.normal(np.log(36), 0.5, 32))), 11, 85).astype(int)
    lengths = torch.tensor(many if kind == MANY else [512])
    mask = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
    return torch.randint(5, 1000, mask.shape, generator=torch.Generator().manual_seed(0)) * mask, mask


def in_torch(way, model, dtype):
    """The model on PyTorch's attention, or on this library's."""
    import torch

    from relpos_np.interop.transformers import unpadded

    model = model.to(dtype)
    model.set_attn_implementation("sdpa")

    def run(ids, mask):
        with torch.no_grad(), unpadded(model) if way == OURS else nullcontext():
            return model(input_ids=ids, attention_mask=mask)[0]

    return run


def whole(model):
    """The model as a function of tokens and mask alone, for those who export it."""
    import torch

    class Encoder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, ids, mask):
            return self.model(input_ids=ids, attention_mask=mask)[0]

    return Encoder().eval()


def in_onnxruntime(model, name, threads):
    """The exported model, with the layers fused that ONNX Runtime's tools know."""
    import onnxruntime
    import torch
    from onnxruntime.transformers import optimizer

    if name == "T5-small":
        model.set_attn_implementation("eager")  # its SDPA cannot be exported
    axes, heads = {0: "batch", 1: "length"}, model.config.num_attention_heads
    with tempfile.TemporaryDirectory() as folder:
        plain, fused = (str(Path(folder, f"{kind}.onnx")) for kind in ("plain", "fused"))
        names = {"input_names": ["ids", "mask"], "dynamic_shapes": {"ids": axes, "mask": axes}}
        # An axis of length 1 would be taken for one that is always so.
        torch.onnx.export(
            whole(model), texts_of(MANY), plain, **names, output_names=["out"], dynamo=True, verbose=False
        )
        kind = "bert" if name == "BERT-base" else "t5"
        made = optimizer.optimize_model(plain, kind, num_heads=heads, hidden_size=model.config.hidden_size)
        made.save_model_to_file(fused)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        session = onnxruntime.InferenceSession(fused, options, providers=["CPUExecutionProvider"])
    taken = [one.name for one in session.get_inputs()]

    def run(*given):
        feed = dict(zip(taken, (x.numpy() for x in given), strict=True))
        return torch.from_numpy(session.run(None, feed)[0])

    return run


def in_openvino(model, example, dtype, threads):
    """The converted model."""
    import openvino
    import torch

    hints = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32" if dtype == torch.float32 else "bf16"}
    converted = openvino.convert_model(whole(model), example_input=example)
    request = openvino.compile_model(converted, "CPU", {"INFERENCE_NUM_THREADS": threads, **hints})
    request = request.create_infer_request()

    def run(*given):
        request.infer([x.numpy() for x in given])
        return torch.from_numpy(request.get_output_tensor().data.copy())

    return run


def serve(way, name, texts, dtype, threads):
    """Print an error, and then the seconds of a run for each line of the input."""
    import torch

    torch.set_num_threads(threads)
    model, example, dtype = encoder(name), texts_of(texts), getattr(torch, dtype)
    with torch.no_grad():
        exact = model.double()(input_ids=example[0], attention_mask=example[1])[0]
    model = model.float()
    if way == "onnxruntime":
        run = in_onnxruntime(model, name, threads)
    elif way == "openvino":
        run = in_openvino(model, example, dtype, threads)
    else:
        run = in_torch(way, model, dtype)
    found = run(*example)
    share = float(example[1].float().mean())
    print(
        json.dumps({"error": float(((found - exact).abs() * example[1][..., None]).max()), "real": share}), flush=True
    )
    for _ in sys.stdin:
        started = time.perf_counter()
        run(*example)
        print(time.perf_counter() - started, flush=True)


def measure(work, dtype, rounds, threads):
    """Errors, medians and ratios of all ways, of which each has a process."""
    pinned = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), str(threads))
    path = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = {}
    for way in WAYS[dtype]:
        line = [sys.executable, __file__, "--threads", str(threads), "--serve", way, *work, dtype]
        processes[way] = subprocess.Popen(line, env=os.environ | pinned | {"PYTHONPATH": path}, **pipes)

    def answer(process):
        while line := process.stdout.readline():
            if line[0] in "{0123456789":
                return json.loads(line)
        sys.exit(f"{work}, {dtype}: {process.args} has ended")

    said = {way: answer(process) for way, process in processes.items()}
    seconds = {way: [] for way in processes}
    for _ in range(rounds + 1):
        for way, process in processes.items():
            print(file=process.stdin, flush=True)
            seconds[way].append(answer(process))
    for process in processes.values():
        process.communicate()
    # The first round is not counted.
    taken = {way: each[1:] for way, each in seconds.items()}
    return {
        "real": said[OURS]["real"],
        "errors": {way: one["error"] for way, one in said.items()},
        "median_ms": {way: round(1e3 * statistics.median(each), 1) for way, each in taken.items()},
        "times_ours": {
            way: round(statistics.median(x / y for x, y in zip(each, taken[OURS], strict=True)), 3)
            for way, each in taken.items()
        },
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="where to write the record")
    parser.add_argument("--serve", nargs=4, metavar=("WAY", "MODEL", "TEXTS", "DTYPE"), help="be one of the processes")
    arguments = parser.parse_args()
    if arguments.serve:
        serve(*arguments.serve, arguments.threads)
        return
    from importlib.metadata import version

    record = {
        "date": time.strftime("%Y-%m-%d"),
        "processor": processor(),
        "threads": arguments.threads,
        "rounds": arguments.rounds,
        "versions": {name: version(name) for name in ("torch", "transformers", "onnxruntime", "openvino")},
        "load_before": os.getloadavg(),
        "works": {", ".join(work): {} for work in WORKS},
    }
    for work in WORKS:
        for dtype in WAYS:
            found = measure(work, dtype, arguments.rounds, arguments.threads)
            record["works"][", ".join(work)][dtype] = found
            print(*work, dtype, json.dumps(found), flush=True)
    record["load_after"] = os.getloadavg()
    if arguments.out:
        arguments.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
