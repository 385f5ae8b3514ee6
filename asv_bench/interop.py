"""Time whole encoders: ``python asv_bench/interop.py --out FILE``.

Encoders of the sizes of BERT-base and T5-small, with random weights: as transformers runs them on PyTorch, as ONNX
Runtime and OpenVINO run what is exported of them, and with this library's `unpadded`. A batch of texts of many lengths,
and one long text. Each way has a process of its own, and they take turns. A ratio is the median over rounds of the
ratio within a round; an error is the largest at a real token, beside the same model in float64.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from contextlib import ExitStack, closing, nullcontext
from importlib.metadata import version
from pathlib import Path

# The checkout is measured, installed or not.
sys.path.insert(0, str(Path(__file__).parents[1]))

from relpos_np._commands.peers import OURS, Prepared
from relpos_np._commands.peers.rounds import Process, alternate, figures, load
from relpos_np._commands.peers.worker import Worker, serve
from relpos_np.versions import processor

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


class Encoder(Worker):
    """One way of running an encoder, in a process of its own."""

    def prepare(self, model, texts, dtype):
        """Have a run ready; return its error and the share of tokens that are no padding."""
        import torch

        torch.set_num_threads(self.threads)
        net, example, kind = encoder(model), texts_of(texts), getattr(torch, dtype)
        with torch.no_grad():
            exact = net.double()(input_ids=example[0], attention_mask=example[1])[0]
        net = net.float()
        if self.name == "onnxruntime":
            run = in_onnxruntime(net, model, self.threads)
        elif self.name == "openvino":
            run = in_openvino(net, example, kind, self.threads)
        else:
            run = in_torch(self.name, net, kind)
        error, real = (run(*example) - exact).abs() * example[1][..., None], example[1].float().mean()
        self.prepared = Prepared(lambda: run(*example))
        return {"error": float(error.max()), "real": float(real)}


def measure(work, dtype, rounds, threads):
    """Errors, medians and ratios of all ways, of which each has a process."""
    model, texts = work
    with ExitStack() as stack:
        processes, said = {}, {}
        for way in WAYS[dtype]:
            process = Process(way, sys.executable, threads, program=(__file__,))
            processes[way] = stack.enter_context(closing(process))
            said[way] = process.ask("prepare", model=model, texts=texts, dtype=dtype)
        times, _ = alternate(processes, WAYS[dtype], rounds, 0)
    found = {way: figures(each, times[OURS], None, None) for way, each in times.items()}
    return {
        "real": said[OURS]["real"],
        "errors": {way: one["error"] for way, one in said.items()},
        "median_ms": {way: round(one["median_ms"], 1) for way, one in found.items()},
        "times_ours": {way: round(one["times_ours"], 3) for way, one in found.items()},
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="where to write the record")
    arguments = parser.parse_args()
    record = {
        "date": time.strftime("%Y-%m-%d"),
        "processor": processor(),
        "threads": arguments.threads,
        "rounds": arguments.rounds,
        "versions": {name: version(name) for name in ("torch", "transformers", "onnxruntime", "openvino")},
        "load_before": load(),
        "works": {", ".join(work): {} for work in WORKS},
    }
    for work in WORKS:
        for dtype in WAYS:
            found = measure(work, dtype, arguments.rounds, arguments.threads)
            record["works"][", ".join(work)][dtype] = found
            print(*work, dtype, json.dumps(found), flush=True)
    record["load_after"] = load()
    if arguments.out:
        arguments.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    # The processes that take turns are this file too, with a way and a number of threads.
    if sys.argv[1:2] and sys.argv[1] in WAYS["float32"]:
        serve(Encoder)
    else:
        main()
