"""How fast is the native kernel? Beside `F.scaled_dot_product_attention`, in one run, contestants taking turns.

    python benchmarks/kernels.py [--only forward|backward|decode|dropout|masks|crossover] [--quick] [--seconds 3]

    forward    B = 1, H = 12; without gradient; SDPA in the better of its two layouts, (B, H, N, D) and (B, N, H, D)
    backward   the backward pass alone, of a graph that is kept
    decode     one query, 32 heads over 8 kv heads of width 128, 4,096 keys
    dropout    forward and backward with dropout 0.1 (SDPA falls back to the N x N matrix for it)
    masks      forward with masks that SDPA wants dense: a window, padding, packed documents, a boolean tensor
    crossover  small shapes: what "auto" takes, against SDPA

A ratio is SDPA's median time / ours: above 1 we are faster. `peak` is the share of the multiply-adds that the CPU does
from registers alone, measured in the same run; of a causal plane half the work is counted. For decode it is the share
of the bandwidth with which plain reads run through the same memory.
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from side_by_side import save, table, take_turns
from torch import Tensor

import regard
from regard import doctor
from regard.kernels import native_library as library
from regard.masks import Causal, Documents, Keep, Padding, Window

Run = Callable[[], object]
HEADS = 12


class Peak:
    """What the CPU does at most, measured when asked."""

    def __init__(self) -> None:
        folder = tempfile.mkdtemp()
        source, target = Path(__file__).with_name("peak.cpp"), f"{folder}/peak.so"
        subprocess.run(["g++", "-O3", "-fopenmp", "-shared", "-fPIC", "-o", target, str(source)], check=True)
        self.library = ctypes.CDLL(target)
        self.best: dict[torch.dtype, float] = {}
        features = doctor.cpu_features() or []
        self.products = {torch.float32: "fma_avx512" if "avx512f" in features else "fma_avx2"}
        self.products[torch.bfloat16] = "bf16_avx512" if "avx512_bf16" in features else self.products[torch.float32]

    def flops(self, dtype: torch.dtype) -> float:
        """Floating-point operations per second: the best of a few short bursts, and of all before."""
        run = getattr(self.library, self.products[dtype])
        run.restype, run.argtypes = ctypes.c_double, [ctypes.c_int64, ctypes.c_int]
        best = self.best.get(dtype, 0.0)
        for _ in range(5):
            begin = time.perf_counter()
            done = run(1_000_000, torch.get_num_threads())
            best = max(best, done / (time.perf_counter() - begin))
        self.best[dtype] = best
        return best

    def reader(self, tensors: list[Tensor]) -> Run:
        """Reads some tensors once: a contestant for whatever has to read them."""
        run = self.library.read_all
        run.restype, run.argtypes = ctypes.c_int64, [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
        places = [(x.data_ptr(), x.numel() * x.element_size()) for x in tensors]
        return lambda: [run(*place, torch.get_num_threads()) for place in places]


def heads_side_by_side(*tensors: Tensor) -> list[Tensor]:
    """The same in the layout of a projection, (B, N, H, D)."""
    return [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]


def inference(run: Run) -> Run:
    def wrapped() -> object:
        with torch.inference_mode():
            return run()

    return wrapped


def forward(dtype: torch.dtype, width: int, n: int, causal: bool) -> tuple[dict[str, Run], float]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, n, width).to(dtype) for _ in range(3))
    apart = heads_side_by_side(q, k, v)
    mask = Causal() if causal else None
    ours = regard.attend(q, k, v, mask=mask)
    tolerance = 1e-5 if dtype is torch.float32 else 3e-2
    torch.testing.assert_close(
        ours, F.scaled_dot_product_attention(q, k, v, is_causal=causal), atol=tolerance, rtol=tolerance
    )
    runs: dict[str, Run] = {
        "SDPA": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal),
        "SDPA apart": lambda: F.scaled_dot_product_attention(*apart, is_causal=causal),
        "regard": lambda: regard.attend(q, k, v, mask=mask),
        "regard apart": lambda: regard.attend(*apart, mask=mask),
    }
    return {name: inference(run) for name, run in runs.items()}, 4 * HEADS * n * n * width / (2 if causal else 1)


def backward(dtype: torch.dtype, width: int, n: int, causal: bool) -> tuple[dict[str, Run], float]:
    torch.manual_seed(0)
    inputs = [torch.randn(1, HEADS, n, width).to(dtype).requires_grad_() for _ in range(3)]
    apart = [x.detach().requires_grad_() for x in heads_side_by_side(*inputs)]
    mask = Causal() if causal else None

    def of(out: Tensor, leaves: list[Tensor]) -> Run:
        d_out = torch.randn_like(out)
        return lambda: torch.autograd.grad(out, leaves, d_out, retain_graph=True)

    runs = {
        "SDPA": of(F.scaled_dot_product_attention(*inputs, is_causal=causal), inputs),
        "SDPA apart": of(F.scaled_dot_product_attention(*apart, is_causal=causal), apart),
        "regard": of(regard.attend(*inputs, mask=mask), inputs),
        "regard apart": of(regard.attend(*apart, mask=mask), apart),
    }
    return runs, 10 * HEADS * n * n * width / (2 if causal else 1)


def dropout(width: int, n: int) -> dict[str, Run]:
    torch.manual_seed(0)
    inputs = [torch.randn(1, HEADS, n, width, requires_grad=True) for _ in range(3)]

    def of(attend: Callable[..., Tensor], **options: object) -> Run:
        return lambda: torch.autograd.grad(attend(*inputs, **options).sum(), inputs)

    return {
        "SDPA": of(F.scaled_dot_product_attention, dropout_p=0.1),
        "regard": of(regard.attend, dropout=0.1),
        "regard without": of(regard.attend),
    }


def decode(
    dtype: torch.dtype, batch: int, keys: int, heads: int, groups: int, width: int, peak: Peak
) -> dict[str, Run]:
    torch.manual_seed(0)
    q = torch.randn(batch, heads, 1, width).to(dtype)
    k, v = (torch.randn(batch, groups, keys, width).to(dtype) for _ in range(2))
    gqa = heads != groups
    runs: dict[str, Run] = {
        "SDPA": lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=gqa),
        "regard": lambda: regard.attend(q, k, v),
    }
    return {name: inference(run) for name, run in runs.items()} | {"read": peak.reader([k, v])}


def masks(n: int) -> dict[str, dict[str, Run]]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, HEADS, n, 64) for _ in range(3))
    kinds = {
        "Causal & Window(256)": Causal() & Window(256),
        "Padding(lengths)": Padding(lengths=torch.tensor([n, n // 2])),
        "Causal & Documents": Causal() & Documents(torch.arange(n) // 400),
        "a boolean tensor": Keep(torch.rand(n, n) < 0.9),
    }
    found = {}
    for name, mask in kinds.items():
        dense = mask.dense(n).contiguous()

        def theirs(dense: Tensor = dense) -> object:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=dense)

        def ours(mask: regard.masks.Mask = mask) -> object:
            return regard.attend(q, k, v, mask=mask)

        found[name] = {"SDPA": inference(theirs), "regard": inference(ours)}
    return found


def small(batch: int, heads: int, n: int, m: int, width: int, dtype: torch.dtype) -> dict[str, Run]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, heads, x, width).to(dtype) for x in (n, m, m))
    runs: dict[str, Run] = {
        "SDPA": lambda: F.scaled_dot_product_attention(q, k, v),
        "auto": lambda: regard.attend(q, k, v),
        "fused": lambda: regard.attend(q, k, v, kernel="fused"),
        "native": lambda: regard.attend(q, k, v, kernel="native"),
    }
    return {name: inference(run) for name, run in runs.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="sections whose name contains this")
    parser.add_argument("--sizes", type=int, nargs="*", default=None, help="tokens; 128 512 2048 8192 by default")
    parser.add_argument("--quick", action="store_true", help="does it work? small sizes, no JSON")
    parser.add_argument("--seconds", type=float, default=3.0, help="time spent on each row")
    parser.add_argument("--json", help="where the numbers go; a full run writes benchmarks/results/kernels.json")
    options = parser.parse_args()
    if library.load() is None:
        raise SystemExit(f"there is no native kernel to measure: {library.why_not()}")
    sizes = options.sizes or ([128] if options.quick else [128, 512, 2048, 8192])
    seconds = 0.2 if options.quick else options.seconds
    partial = options.quick or options.only or options.sizes
    path = options.json or (None if partial else "benchmarks/results/kernels.json")
    peak, rows = Peak(), []

    def wanted(section: str) -> bool:
        return options.only in section

    for section, make in (("forward", forward), ("backward", backward)):
        if not wanted(section):
            continue
        shown = []
        for dtype in (torch.float32, torch.bfloat16):
            for width in (64, 128):
                for causal in (False, True):
                    for n in [x for x in sizes if section == "forward" or x <= 2048]:
                        runs, flops = make(dtype, width, n, causal)
                        times = take_turns(runs, seconds=seconds, rounds=7 if n < 8192 else 3)
                        theirs = min(times["SDPA"], times["SDPA apart"])
                        share = flops / times["regard"] / peak.flops(dtype)
                        name = f"{str(dtype)[6:]} D{width}{' causal' if causal else ''}"
                        shown.append(
                            [
                                name,
                                f"{n:,}",
                                f"{theirs * 1e3:.2f} ms",
                                f"{theirs / times['regard']:.2f}",
                                f"{theirs / times['regard apart']:.2f}",
                                f"{share:.0%}",
                            ]
                        )
                        rows.append(
                            {
                                "what": section,
                                "dtype": str(dtype),
                                "width": width,
                                "causal": causal,
                                "tokens": n,
                                "peak": share,
                                **times,
                            }
                        )
                        print(*shown[-1], flush=True)
        print(f"\n{section}\n")
        print(table(["", "tokens", "SDPA", "SDPA / regard", "heads apart", "peak"], shown), "\n", flush=True)

    if wanted("decode"):
        shown = []
        for dtype in (torch.float32, torch.bfloat16):
            for batch, keys, heads, groups, width in (
                (1, 4096, 32, 8, 128),
                (8, 4096, 32, 8, 128),
                (1, 1024, 12, 12, 64),
                (1, 32768, 9, 3, 64),
            ):
                if options.quick and batch * keys > 4096:
                    continue
                times = take_turns(decode(dtype, batch, keys, heads, groups, width, peak), seconds=seconds)
                name = f"{str(dtype)[6:]} B{batch} {heads}/{groups} D{width}"
                shown.append(
                    [
                        name,
                        f"{keys:,}",
                        f"{times['SDPA'] * 1e3:.2f} ms",
                        f"{times['SDPA'] / times['regard']:.2f}",
                        f"{times['read'] / times['regard']:.0%}",
                    ]
                )
                rows.append(
                    {
                        "what": "decode",
                        "dtype": str(dtype),
                        "batch": batch,
                        "keys": keys,
                        "heads": heads,
                        "groups": groups,
                        "width": width,
                        **times,
                    }
                )
        print("\ndecode\n")
        print(table(["", "keys", "SDPA", "SDPA / regard", "of bandwidth"], shown), "\n", flush=True)

    if wanted("dropout"):
        shown = []
        for n in [x for x in sizes if x <= 2048]:
            times = take_turns(dropout(64, n), seconds=seconds)
            shown.append(
                [
                    f"{n:,}",
                    f"{times['SDPA'] * 1e3:.1f} ms",
                    f"{times['SDPA'] / times['regard']:.2f}",
                    f"{times['regard'] / times['regard without']:.2f}",
                ]
            )
            rows.append({"what": "dropout", "tokens": n, **times})
        print("\nforward and backward with dropout 0.1\n")
        print(table(["tokens", "SDPA", "SDPA / regard", "with / without dropout"], shown), "\n", flush=True)

    if wanted("masks"):
        shown = []
        tokens = 256 if options.quick else 2048
        for name, runs in masks(tokens).items():
            times = take_turns(runs, seconds=seconds)
            shown.append([name, f"{times['SDPA'] * 1e3:.1f} ms", f"{times['SDPA'] / times['regard']:.2f}"])
            rows.append({"what": "masks", "mask": name, "tokens": tokens, **times})
        print(f"\nmasks, 2 x {tokens:,} tokens\n")
        print(table(["", "SDPA", "SDPA / regard"], shown), "\n", flush=True)

    if wanted("crossover"):
        shown = []
        for dtype in (torch.float32, torch.bfloat16):
            for shape in (
                (1, 1, 1, 1),
                (1, 12, 1, 16),
                (1, 12, 1, 128),
                (1, 12, 4, 128),
                (1, 12, 16, 16),
                (1, 12, 32, 32),
                (8, 12, 16, 16),
                (1, 12, 64, 64),
                (1, 12, 128, 128),
            ):
                runs = small(*shape, 64, dtype)
                times = take_turns(runs, seconds=min(seconds, 1.0))
                ratios = [f"{times['SDPA'] / times[name]:.2f}" for name in ("auto", "fused", "native")]
                shown.append([f"{str(dtype)[6:]} {shape}", f"{times['SDPA'] * 1e6:.0f} us", *ratios])
                rows.append({"what": "crossover", "dtype": str(dtype), "shape": shape, **times})
        print("\ncrossover: SDPA's time / that of `attend`, (B, H, N, M), D = 64\n")
        print(table(["", "SDPA", "auto", "fused", "native"], shown), "\n", flush=True)

    if path:
        save(path, rows)


if __name__ == "__main__":
    main()
