"""How fast are real models on the layer, beside transformers (sdpa) and OpenVINO? Two threads, float32 and bfloat16.

    python benchmarks/models.py [--seconds 5] [--models minilm] [--dtypes float32] [--only decode]

    minilm    hidden states of a batch of texts of one length, as it is and within `model.packed()`; OpenVINO compiles
              the transformers model for each shape
    prefill   smollm2 reads a text into a cache and gives the logits of the next token, as it is and packed
    decode    smollm2 writes token after token after a text of some length, in a cache and packed, as `generate` does
    load      from the file to a model in memory, in a process of its own, imports not counted
    memory    the peak of that process above what the imports took, after loading and one use

A ratio is our time (or memory) divided by theirs, first as it is, then packed: below 1 we are ahead. Packing took
place before. Rows of the JSON: what, dtype, case, and for
each contestant seconds (memory: bytes).
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from side_by_side import machine, save, table, take_turns
from torch import Tensor, nn

from regard import models
from regard.projections import project

THREADS = 2
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MINILM = [(batch, length) for batch in (1, 16) for length in (16, 128, 512)]
CONTEXTS = (128, 1024, 4096)
STEPS = 8  # tokens of one turn of decoding

HEADER = ["our time / theirs", "our best", "transformers", "packed", "openvino", "packed"]

Contestants = dict[str, Callable[[], object]]


def path_of(name: str) -> Path:
    """Where the weights of an embedded model are."""
    return models.source(name, check=False).path


def theirs(name: str, dtype: torch.dtype) -> nn.Module:
    """The same weights in transformers."""
    from transformers import AutoModel, AutoModelForCausalLM

    path, options = path_of(name), {"dtype": dtype, "attn_implementation": "sdpa"}
    if name == "minilm":
        return AutoModel.from_pretrained(path, **options).eval()
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, **options).eval()


# ----------------------------------------------------------------------------------------------------
# minilm


def minilm(dtype: str) -> Iterator[tuple[str, Contestants]]:
    ours, peer = models.load("minilm", dtype=DTYPES[dtype]), theirs("minilm", DTYPES[dtype])
    packed = ours.packed()

    def in_packed(ids: Tensor) -> Tensor:
        with packed:
            return ours(ids)

    for batch, length in MINILM:
        ids = torch.randint(1000, 30000, (batch, length))
        yield (
            f"{batch} x {length}",
            {
                "regard": inference(lambda ids=ids: ours(ids)),
                "regard, packed": inference(lambda ids=ids: in_packed(ids)),
                "transformers": inference(lambda ids=ids: peer(input_ids=ids).last_hidden_state),
                "openvino": openvino(ids, dtype),
            },
        )


def openvino(ids: Tensor, dtype: str) -> Callable[[], object]:
    """The float32 model of transformers, compiled for one shape; in bfloat16 by its own hint."""
    import openvino as ov

    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = theirs("minilm", torch.float32)

        def forward(self, ids: Tensor) -> Tensor:
            return self.model(input_ids=ids).last_hidden_state

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        converted = ov.convert_model(Hidden(), example_input=ids, input=[ov.PartialShape(list(ids.shape))])
    options = {
        "INFERENCE_NUM_THREADS": THREADS,
        "INFERENCE_PRECISION_HINT": {"float32": "f32", "bfloat16": "bf16"}[dtype],
        "PERFORMANCE_HINT": "LATENCY",
    }
    compiled = ov.Core().compile_model(converted, "CPU", options)
    request, given = compiled.create_infer_request(), ids.numpy()
    return lambda: request.infer([given])


# ----------------------------------------------------------------------------------------------------
# smollm2


def smollm2(dtype: str) -> Iterator[tuple[str, Contestants]]:
    from transformers import DynamicCache

    ours, peer = models.load("smollm2", dtype=DTYPES[dtype]), theirs("smollm2", DTYPES[dtype])
    packed = ours.packed()

    def prefill(ids: Tensor) -> Tensor:
        return project(ours.head, ours.hidden(ids, cache=ours.new_cache())[:, -1])

    def in_packed(ids: Tensor) -> Tensor:
        with packed:
            return prefill(ids)

    for context in CONTEXTS:
        ids = torch.randint(1000, 40000, (1, context))
        yield (
            f"prefill {context}",
            {
                "regard": inference(lambda ids=ids: prefill(ids)),
                "regard, packed": inference(lambda ids=ids: in_packed(ids)),
                "transformers": inference(
                    lambda ids=ids: peer(ids, past_key_values=DynamicCache(config=peer.config), logits_to_keep=1).logits
                ),
            },
        )
    with packed:
        for context in CONTEXTS:
            ids = torch.randint(1000, 40000, (1, context))
            yield (
                f"decode {context}",
                {"regard, packed": decode_ours(ours, ids), "transformers": decode_theirs(peer, ids)},
            )


def decode_ours(model: models.Decoder, ids: Tensor) -> Callable[[], object]:
    cache = model.new_cache(capacity=ids.shape[1] + STEPS)
    with torch.inference_mode():
        model.hidden(ids, cache=cache)

    def run() -> Tensor:
        for held in cache:
            held.truncate(ids.shape[1])
        token = ids[:, -1:]
        for _ in range(STEPS):
            token = model(token, cache=cache)[:, -1:].argmax(-1)
        return token

    return inference(run)


def decode_theirs(model: nn.Module, ids: Tensor) -> Callable[[], object]:
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(ids, past_key_values=cache, logits_to_keep=1)

    def run() -> Tensor:
        if cache.get_seq_length() > ids.shape[1]:
            cache.crop(ids.shape[1] - cache.get_seq_length())
        token = ids[:, -1:]
        for _ in range(STEPS):
            token = model(token, past_key_values=cache).logits[:, -1:].argmax(-1)
        return token

    return inference(run)


def inference(run: Callable[[], object]) -> Callable[[], object]:
    def wrapped() -> object:
        with torch.inference_mode():
            return run()

    return wrapped


# ----------------------------------------------------------------------------------------------------
# load and memory, each in a process of its own

MEASURE = """
    import os, sys, time, warnings
    warnings.simplefilter("ignore")
    os.environ["TQDM_DISABLE"] = "1"
    import torch
    torch.set_num_threads({threads})
    {imports}
    def status(key):
        return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key)) * 1024
    before, begin = status("VmRSS"), time.perf_counter()
    {load}
    seconds = time.perf_counter() - begin
    with torch.inference_mode():
        {use}
    print(seconds, status("VmHWM") - before)
"""


def measure(imports: str, load: str, use: str) -> tuple[float, float]:
    """Seconds to load, and bytes at the peak."""
    code = textwrap.dedent(MEASURE).format(threads=THREADS, imports=imports, load=load, use=use)
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    seconds, size = out.split()[-2:]
    return float(seconds), float(size)


def load_and_memory(name: str, dtype: str, rounds: int = 3) -> dict[str, tuple[float, float]]:
    """The medians of each contestant, taking turns."""
    path, kind = path_of(name), DTYPES[dtype]
    if name == "minilm":
        files, use, peer = f"{str(path)!r}", "model(torch.ones(1, 512, dtype=torch.int64))", "AutoModel"
        our_use = use
    else:
        files, peer = f"{str(path.parent)!r}, gguf_file={path.name!r}", "AutoModelForCausalLM"
        use = "model.generate(torch.ones(1, 128, dtype=torch.int64), max_new_tokens=32, do_sample=False)"
        our_use = "model.generate(' a' * 128, 32)"
    ways = {
        "regard": (
            "from regard import models; import tokenizers, safetensors, gguf",
            f"model = models.load({name!r}, dtype={kind})",
            our_use,
        ),
        "transformers": (
            f"from transformers import {peer}; import safetensors, gguf",
            f"model = {peer}.from_pretrained({files}, dtype={kind})",
            use,
        ),
    }
    found = {peer: [] for peer in ways}
    for _ in range(rounds):
        for peer, way in ways.items():
            found[peer].append(measure(*way))
    return {peer: tuple(map(statistics.median, zip(*values, strict=True))) for peer, values in found.items()}


# ----------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="time spent on each row (more for slow ones)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contestant, at least")
    parser.add_argument("--json", default="benchmarks/results/models.json", help="where the numbers go")
    parser.add_argument("--models", nargs="+", default=["minilm", "smollm2"])
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES))
    parser.add_argument("--only", default="", help="rows whose case contains this, such as decode or load")
    options = parser.parse_args()

    os.environ["TQDM_DISABLE"] = "1"
    warnings.simplefilter("ignore")
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    rows, lines = [], []

    def report(name: str, dtype: str, case: str, values: dict[str, float], shown: str) -> None:
        rows.append({"what": name, "dtype": dtype, "case": case, "values": values})
        ratios = [
            f"{values[ours] / values[peer]:.2f}" if ours in values and peer in values else ""
            for ours, peer in (
                ("regard", "transformers"),
                ("regard, packed", "transformers"),
                ("regard", "openvino"),
                ("regard, packed", "openvino"),
            )
        ]
        lines.append([f"{name} {dtype}, {case}", shown, *ratios])
        print(" | ".join(lines[-1]), flush=True)

    for name, contest in (("minilm", minilm), ("smollm2", smollm2)):
        for dtype in DTYPES:
            if name not in options.models or dtype not in options.dtypes or options.only in ("load", "memory"):
                continue
            for case, contestants in contest(dtype):
                if options.only not in case:
                    continue
                times = take_turns(contestants, seconds=options.seconds, rounds=options.rounds)
                if case.startswith("decode"):
                    times = {peer: value / STEPS for peer, value in times.items()}
                ours = min(value for peer, value in times.items() if peer.startswith("regard"))
                tokens = f", {1 / ours:.1f} tokens/s" if case.startswith("decode") else ""
                report(name, dtype, case, times, f"{ours * 1e3:.1f} ms{tokens}")
    for name in ("minilm", "smollm2"):
        for dtype in DTYPES:
            if name not in options.models or dtype not in options.dtypes or options.only not in "load, memory":
                continue
            found = load_and_memory(name, dtype)
            report(
                name, dtype, "load", {peer: value[0] for peer, value in found.items()}, f"{found['regard'][0]:.2f} s"
            )
            report(
                name,
                dtype,
                "memory",
                {peer: value[1] for peer, value in found.items()},
                f"{found['regard'][1] / 2**20:.0f} MB",
            )
    print("\n" + table(HEADER, lines))
    print("\n" + ", ".join(f"{key} {value}" for key, value in machine().items()))
    if not options.only and len(options.models) == len(options.dtypes) == 2:
        save(options.json, rows)


if __name__ == "__main__":
    main()
