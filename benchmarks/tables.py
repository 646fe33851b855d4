"""The tables of figures in README.md and docs/, written from benchmarks/results/*.json and from the atlases of heads.

    python benchmarks/tables.py            writes every table anew
    python benchmarks/tables.py --check    writes nothing; names the tables that are not what the files say, and fails

A table stands between `<!-- table: NAME -->` and `<!-- /table -->`. Above it is a line with the machine it was measured
on. `TABLES` below has the names. NAME@MACHINE is the same table of benchmarks/results/MACHINE/*.json, a benchmark's
`--json` on another machine. Needs nothing but Python.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "docs/tour.md", "docs/performance.md", "docs/kernel.md", "docs/heads.md")
ATLASES = Path("src/regard/heads/analysis/atlases")
MARKED = re.compile(r"(<!-- table: ([\w@-]+) -->\n)(.*?)(<!-- /table -->)", re.DOTALL)
Rows = list[dict[str, Any]]
Lines = list[list[str]]


def markdown(header: list[str], lines: Lines) -> str:
    """A Markdown table."""
    rows = [header, ["---"] * len(header), *lines]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def measured_on(machine: dict[str, Any]) -> str:
    """Where it was measured, in a line."""
    if "compiler" in machine:
        return f"Compiled by {machine['compiler']}, without a GPU; torch {machine['torch']}."
    cpu = f"{machine.get('cpu') or machine['processor']} with {machine['instructions']}"
    threads = f"{machine['threads']} thread{'s' if machine['threads'] > 1 else ''}"
    return f"Measured on: {cpu}, {threads}, torch {machine['torch']}."


def only(rows: Rows, **wanted: Any) -> Rows:
    """The rows that have these values."""
    return [row for row in rows if all(row.get(name) == value for name, value in wanted.items())]


def ratio(a: float | None, b: float | None, digits: int = 2) -> str:
    """a / b; nothing where one of them was not measured."""
    return f"{a / b:.{digits}f}" if a and b else ""


def size(count: float) -> str:
    """Bytes as MB or GB, with three digits or one after the point."""
    for unit, name in ((1e9, "GB"), (1e6, "MB")):
        if count >= unit or name == "MB":
            value = count / unit
            return f"{value:,.0f} {name}" if value >= 100 else f"{value:.1f} {name}"
    raise AssertionError


def short(dtype: str) -> str:
    return dtype.removeprefix("torch.")


def sdpa(row: dict[str, Any]) -> float:
    """SDPA in the better of its two layouts."""
    return min(row["SDPA"], row.get("SDPA apart", row["SDPA"]))


# ----------------------------------------------------------------------------------------------------
# One function for each table


def kernels(rows: Rows) -> str:
    """The native kernel beside SDPA."""
    sizes = sorted({row["tokens"] for row in only(rows, what="forward")})
    lines: Lines = []
    for what in ("forward", "backward"):
        for dtype, width in dict.fromkeys((row["dtype"], row["width"]) for row in only(rows, what=what)):
            cells = []
            for tokens in sizes:
                same = only(rows, what=what, dtype=dtype, width=width, tokens=tokens)
                both = [ratio(sdpa(row), row["regard"]) for row in sorted(same, key=lambda row: row["causal"])]
                cells.append(", ".join(both))
            lines.append([f"{'backward, ' * (what == 'backward')}{short(dtype)}, D = {width}", *cells])
    first, *others = (f"{tokens:,}" for tokens in sizes)
    return markdown(["full, causal", f"{first} tokens", *others], lines)


def kernels_more(rows: Rows) -> str:
    """Decoding, dropout, masks beside SDPA."""
    lines: Lines = []
    decode = only(rows, what="decode")
    cases = dict.fromkeys((r["batch"], r["keys"], r["heads"], r["groups"], r["width"]) for r in decode)
    for batch, keys, heads, groups, width in cases:
        same = only(decode, batch=batch, keys=keys, heads=heads, groups=groups, width=width)
        cells = [ratio(sdpa(row), row["regard"]) for kind in _KINDS for row in only(same, dtype=kind)]
        of = f"{heads} heads over {groups} kv heads" if groups < heads else f"{heads} heads"
        lines.append([f"one query, {keys:,} keys, {of} of {width}, batch {batch}", *cells])
    for row in only(rows, what="dropout"):
        name = f"training with dropout 0.1, {row['tokens']:,} tokens"
        lines.append([name, ratio(row["SDPA"], row["regard"]), ""])
    for row in only(rows, what="masks"):
        mask = f"`{row['mask']}`" if "(" in row["mask"] or "&" in row["mask"] else row["mask"]
        lines.append([f"{mask}, 2 x {row.get('tokens', 2048):,} tokens", ratio(row["SDPA"], row["regard"]), ""])
    return markdown(["SDPA's time / ours", *(short(kind) for kind in _KINDS)], lines)


_KINDS = ("torch.float32", "torch.bfloat16")


def peak(rows: Rows) -> str:
    """Which share of what the CPU can do the native kernel reaches. Shares above 1 are left out: another process held
    up what they were compared with."""

    def between(shares: list[float]) -> str:
        shares = [share for share in shares if share <= 1]
        return f"{min(shares):.0%} to {max(shares):.0%}".replace("%", " %") if shares else ""

    lines: Lines = []
    for what in ("forward", "backward"):
        for kind in _KINDS:
            same = only(rows, what=what, dtype=kind)
            cells = [between([row["peak"] for row in only(same, causal=causal)]) for causal in (False, True)]
            lines.append([f"{what}, {short(kind)}", *cells])
    for kind in _KINDS:
        same = [row for row in only(rows, what="decode", dtype=kind) if row["groups"] < row["heads"]]
        lines.append(
            [f"decode with shared kv heads, {short(kind)}", between([r["read"] / r["regard"] for r in same]), ""]
        )
    return markdown(["", "full", "causal"], lines)


def layer(rows: Rows) -> str:
    """The layer beside its peers."""
    names = {"nn.MHA": "`nn.MultiheadAttention`", "plain SDPA": "plain SDPA module"}
    peers = [name for name in rows[0]["seconds"] if name != "regard"]
    lines: Lines = []
    for row in rows:
        times = row["seconds"]
        name = f"{row['mode']}{' with dropout' * bool(row['dropout'])}, {row['case'].replace('x', ' x ')}"
        lines.append([name, *(ratio(times["regard"], times[peer]) for peer in peers)])
    return markdown(["our time / theirs", *(str(names.get(peer, peer)) for peer in peers)], lines)


def models(rows: Rows) -> str:
    """Whole models beside transformers, packed where they can be."""
    lines: Lines = []
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    for name, case in dict.fromkeys((row["what"], row["case"]) for row in rows):
        cells = []
        for dtype in dtypes:
            values = [row["values"] for row in only(rows, what=name, case=case, dtype=dtype)]
            ours = [one.get("regard, packed", one.get("regard")) for one in values]
            cells.append(ratio(ours[0], values[0].get("transformers")) if values else "")
        lines.append([f"{name}, {_case(case)}", *cells])
    return markdown(["our time / transformers'", *dtypes], lines)


def _case(case: str) -> str:
    what, _, number = case.partition(" ")
    if what in ("decode", "prefill"):
        return f"{what}{' after' * (what == 'decode')} {int(number):,}"
    return case


def models_full(rows: Rows) -> str:
    """Whole models beside transformers and OpenVINO, as they are and packed."""
    lines: Lines = []
    for row in rows:
        values, case = row["values"], row["case"]
        best = min(value for name, value in values.items() if name.startswith("regard"))
        shown = {"load": f"{best:.2f} s", "memory": f"{best / 2**20:,.0f} MB"}.get(case, f"{best * 1e3:,.1f} ms")
        shown += f", {1 / best:.1f} tokens/s" * case.startswith("decode")
        pairs = [(ours, peer) for peer in ("transformers", "openvino") for ours in ("regard", "regard, packed")]
        cells = [ratio(values.get(ours), values.get(peer)) for ours, peer in pairs]
        lines.append([f"{row['what']} {row['dtype']}, {case}", shown, *cells])
    header = ["our time / theirs", "our best", "transformers: as it is", "packed", "OpenVINO: as it is", "packed"]
    return markdown(header, lines)


def pages(rows: Rows) -> str:
    """Our page beside BertViz's."""
    lines: Lines = []
    for row in rows:
        theirs = size(row["theirs bytes"]) + " (estimated)" * ("told from" in row)
        times = [seconds(row["ours seconds"]), seconds(row["theirs seconds"]) if row["theirs seconds"] else "not made"]
        lines.append([f"{row['tokens']:,}", size(row["ours bytes"]), theirs, *times])
    return markdown(["tokens", "our page", "BertViz's", "our time, watching included", "its time"], lines)


def pages_long(rows: Rows) -> str:
    """The page of a long text beside the plain forward."""
    lines: Lines = []
    for row in rows:
        times = [seconds(row[f"{name} cpu seconds"]) for name in ("forward", "watched", "page")]
        ratios = [f"{row[f'ratio {kind}']:.2f}" for kind in ("cpu seconds", "seconds")]
        memory = [f"{row[name] / 1e9:.1f} GB" for name in ("forward peak bytes", "peak bytes")]
        lines.append([f"{row['tokens']:,}", size(row["bytes"]), *times, *ratios, *memory])
    times = ["forward, CPU", "watched, CPU", "page made, CPU"]
    return markdown(
        ["tokens", "page", *times, "(watched + page) / forward", "by wall time", "peak, forward", "peak, all"], lines
    )


def seconds(time: float) -> str:
    return f"{time:.0f} s" if time >= 10 else f"{time:.1f} s" if time >= 1.2 else f"{time:.2f} s"


def prune(rows: Rows) -> str:
    """A layer with fewer heads beside the whole one."""
    names = [name for name in rows[0]["seconds"] if name != "whole"]
    lines: Lines = []
    for row in rows:
        times, parameters = row["seconds"], row["parameters"]
        own = [name for name in times if name != "whole"]
        cells = [f"{ratio(times[x], times['whole'])} ({ratio(parameters[x], parameters['whole'])})" for x in own]
        lines.append([row["case"], *cells, *[""] * (len(names) - len(cells))])
    return markdown(["time (parameters) / whole", *names], lines)


def endless(rows: Rows) -> str:
    """Perplexity of a text without end."""
    names = list(dict.fromkeys(name for row in rows for name in row["perplexity"]))
    lines: Lines = []
    for row in rows:
        cells = [f"{row['perplexity'][name]:.1f}" if name in row["perplexity"] else "" for name in names]
        lines.append([f"{row['begin']:,} - {row['end']:,}", *cells])
    return markdown(["tokens", *names], lines)


def latent(rows: Rows) -> str:
    """One token from the cache of latent attention: the absorbed form, and others divided by it."""
    lines: Lines = []
    for row in rows:
        times = row["seconds"]
        others = (ratio(times[name], times["absorbed"], 1) for name in ("plain", "transformers"))
        lines.append([f"{row['length']:,}", *others])
    return markdown(["tokens in the cache", "plain / absorbed", "transformers / absorbed"], lines)


def headline(rows: Rows) -> str:
    """Seeing every head beside blind attention."""
    lines: Lines = []
    for width, tokens in dict.fromkeys((row["width"], row["tokens"]) for row in rows):
        both = sorted(only(rows, width=width, tokens=tokens), key=lambda row: row["causal"])
        times = [row["seconds"] for row in both]
        pairs = [
            [ratio(sdpa(one), one["looking"]) for one in times],
            [ratio(one["looking"], one["attend"]) for one in times],
            [ratio(one.get("dense"), one["looking"], 1) for one in times],
        ]
        cells = [", ".join(part for part in parts if part) or "not run" for parts in pairs]
        lines.append([f"D = {width}, {tokens:,} tokens: full, causal", *cells])
    header = ["SDPA, blind / ours, seeing", "ours, seeing / ours, blind", "today's way / ours, seeing"]
    return markdown(["", *header], lines)


def memory(rows: Rows) -> str:
    """Peak memory of one call that sees all, causal."""
    names = {"SDPA": "SDPA, blind", "default": "default measures", "every": "every", "all": "all", "dense": "dense"}
    lines: Lines = []
    for row in [row for row in only(rows, what="layer", case="causal") if "bytes" in row]:
        cells = []
        for name in names:
            told = row["estimated"].get(name, {}).get("bytes")
            cells.append(size(row["bytes"][name]) if name in row["bytes"] else f"about {size(told)}" if told else "")
        lines.append([f"{row['tokens']:,}", *cells])
    return markdown(["tokens", *names.values()], lines)


def watching(rows: Rows) -> str:
    """A whole model under `watch`, beside the same model unwatched and beside its maps."""
    lines: Lines = []
    for row in rows:
        cells = [ratio(row.get(name), row["blind"]) or "not run" for name in ("watched", "exact", "eager", "roles")]
        blind = row["blind"] if "transformers" in row["model"] else None
        theirs = [ratio(row["watched"], row.get(name) or blind) or "not run" for name in ("torch", "peer")]
        lines.append([row["model"], f"{row['tokens']:,}", cells[0], *theirs, *cells[1:]])
    header = ["watched / blind", "watched / blind with PyTorch's attention", "watched / blind in transformers"]
    header += ["`exact=True` / blind"]
    header += ["eager with maps / blind", "`seen.roles()` alone / blind"]
    return markdown(["model", "tokens", *header], lines)


def attn_implementation(rows: Rows) -> str:
    """Models of transformers on our kernels, beside the same models on their own."""
    lines: Lines = []
    for row in rows:
        cells = [ratio(row.get(name), row["regard"]) or "not run" for name in ("sdpa", "eager")]
        lines.append([row["model"], row["what"], f"{row['tokens']:,}", *cells])
    return markdown(["model", "what", "tokens", "sdpa / regard", "eager / regard"], lines)


def diffusers_backend(rows: Rows) -> str:
    """Models of diffusers on our kernels, beside the same models on torch's."""
    lines: Lines = [
        [row["model"], row["what"], f"{row['tokens']:,}", ratio(row["native"], row["regard"]) or "not run"]
        for row in rows
    ]
    return markdown(["model", "what", "tokens", "native / regard"], lines)


def small_calls(rows: Rows) -> str:
    """Calls so small that what surrounds the kernel is most of the time."""
    peers = list(dict.fromkeys(name for row in rows for name in row["seconds"] if name != "regard"))
    lines: Lines = []
    for row in rows:
        times = row["seconds"]
        cells = [ratio(times["regard"], times.get(peer)) for peer in peers]
        lines.append([f"{row['case'].replace('x', ' x ')}, {row['mode']}", f"{times['regard'] * 1e6:,.1f} us", *cells])
    return markdown(["our time / theirs", "ours", *peers], lines)


def products(rows: Rows) -> str:
    """Projections by the number of rows: the smallest and largest ratio over the weights."""
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    lines: Lines = []
    for count in dict.fromkeys(row["rows"] for row in rows):
        line = [f"{count:,}"]
        for dtype in dtypes:
            times = [row["times"] for row in rows if (row["rows"], row["dtype"]) == (count, dtype)]
            here = [time["nn.Linear"] / time["regard"] for time in times]
            line.append(f"{min(here):.2f} - {max(here):.2f}")
        lines.append(line)
    return markdown(["nn.Linear's time / ours, rows", *dtypes], lines)


# ----------------------------------------------------------------------------------------------------
# What heads do, from the atlases of the package


def _entries(atlas: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Every entry of every head, with the head as layer.head."""
    return [
        (f"{i}.{j}", {"source": "treebank", "clear": True, "shuffled": None} | entry)
        for i, layer in enumerate(atlas["heads"])
        for j, head in enumerate(layer)
        for entry in head["entries"]
    ]


def heads_by_role(atlas: dict[str, Any]) -> str:
    """How many heads have each role as their first, and the clearest of them."""
    roles: dict[str, list[tuple[float, str, dict[str, Any]]]] = {}
    for i, layer in enumerate(atlas["heads"]):
        for j, head in enumerate(layer):
            for entry in head["entries"][:1]:
                roles.setdefault(entry["role"], []).append((entry["score"], f"{i}.{j}", entry))
    lines: Lines = []
    for role, heads in sorted(roles.items(), key=lambda item: (item[0] == "broad", -len(item[1]))):
        heads.sort(key=lambda head: -head[0])
        clearest = [f"{name}: {score:.2f} ({entry['baseline']:.2f})" for score, name, entry in heads[:3]]
        lines.append([role, str(len(heads)), ", ".join(clearest)])
    none = sum(not head["entries"] for layer in atlas["heads"] for head in layer)
    lines.append(["(none)", str(none), ""])
    return markdown(["role", "heads", "clearest as layer.head: score (uniform attention, or the best offset)"], lines)


def heads_syntax(atlas: dict[str, Any]) -> str:
    """The best head of each relation that a head follows."""
    best: dict[tuple[str, str], tuple[str, dict[str, Any]]] = {}
    for name, entry in _entries(atlas):
        key = (entry.get("relation", ""), entry.get("direction", ""))
        if entry["source"] == "syntax" and (key not in best or entry["score"] > best[key][1]["score"]):
            best[key] = name, entry
    percent = lambda x: f"{100 * x:.1f}"  # noqa: E731
    lines = [
        [*key, name, percent(e["score"]), f"{percent(e['low'])}-{percent(e['high'])}", percent(e["baseline"])]
        + [percent(e["shuffled"] or 0), str(e["n"])]
        for key, (name, e) in sorted(best.items(), key=lambda item: item[1][1]["baseline"] - item[1][1]["score"])
    ]
    header = ["relation", "direction", "layer.head", "accuracy, %", "95 %", "best offset", "shuffled", "n"]
    return markdown(header, lines)


def heads_controls(atlas: dict[str, Any]) -> str:
    """How many heads do something, and what there is to distrust."""
    resting = {"broad", "first", "separator", "sink", "resting only"}
    heads = [head for layer in atlas["heads"] for head in layer]
    told = sum(any(entry["role"] not in resting for entry in head["entries"]) for head in heads)
    made = atlas["made"]
    lines = [
        ["sentences, tokens", f"{made['sentences']:,}, {made['tokens']:,}"],
        ["heads that do something beside resting and looking everywhere", f"{told} of {len(heads)}"],
        ["the same with shuffled weights", str(made["shuffled"])],
        ["roles of word classes with another sentence's classes", str(made["other_sentences"])],
        ["roles of syntax with another sentence's tree", str(made["other_sentences_syntax"])],
        ["heads whose role in one half of the sentences is among those in the other", made["halves_agree"]],
        ["heads whose first role is the same in both halves", made["halves_same"]],
    ]
    return markdown(["", atlas["model"]], lines)


HEADS: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    f"{what}-{model}": (model, write)
    for model in ("minilm", "smollm2")
    for what, write in (("roles", heads_by_role), ("syntax", heads_syntax), ("controls", heads_controls))
}


# Name: the file of its figures in benchmarks/results, and what writes it.
def compile_gpu(rows: Rows) -> str:
    """Registers, spilled bytes and shared memory of the GPU kernels; of widths and dtypes together, the most."""
    targets = list(dict.fromkeys(row["target"] for row in rows))
    lines: Lines = []
    for features, dtype in dict.fromkeys((row["features"], row["dtype"]) for row in rows):
        for width in sorted({row["width"] for row in only(rows, features=features, dtype=dtype)}):
            same = only(rows, features=features, dtype=dtype, width=width)
            cells = []
            for target in targets:
                of_target = only(same, target=target)
                most = {
                    name: max((row[name] for row in of_target), default=0) for name in ("registers", "spills", "shared")
                }
                worst = f"{most['registers']} / {most['spills']} / {most['shared']:,}"
                cells.append(f"{len(of_target)}: {worst}" if of_target else "")
            lines.append([f"{features}, {dtype}, {width}", *cells])
    return markdown(["kernels: most registers / spilled bytes / shared bytes", *targets], lines)


def gpu(rows: Rows) -> str:
    """The GPU kernels beside others on a GPU: others' time over ours; seeing over blind."""
    others = ("SDPA", "flex", "blockwise")
    lines: Lines = []
    for row in rows:
        times = {name: found["median"] for name, found in row["times"].items()}
        where = f"{row['queries']} x {row['tokens']}, {row['dtype']}, {row['width']}"
        if row["what"] == "seeing":
            cells = ["", "", "", ratio(times["rows"], times["blind"]), ratio(times["every"], times["blind"])]
        else:
            cells = [ratio(times.get(other), times["ours"]) for other in others] + ["", ""]
        lines.append([f"{row['what']}, {row['feature']}, {where}", *cells])
    header = [
        "",
        "SDPA / ours",
        "FlexAttention / ours",
        "blockwise / ours",
        "statistics of rows / blind",
        "all / blind",
    ]
    return markdown(header, lines)


TABLES: dict[str, tuple[str, Callable[[Rows], str]]] = {
    "kernels": ("kernels", kernels),
    "kernels-more": ("kernels", kernels_more),
    "peak": ("kernels", peak),
    "layer": ("layer", layer),
    "models": ("models", models),
    "models-full": ("models", models_full),
    "pages": ("pages", pages),
    "pages-long": ("pages_long", pages_long),
    "prune": ("prune", prune),
    "endless": ("endless", endless),
    "latent": ("latent", latent),
    "headline": ("headline", headline),
    "memory": ("looking", memory),
    "watching": ("watching", watching),
    "attn-implementation": ("attn_implementation", attn_implementation),
    "diffusers-backend": ("diffusers_backend", diffusers_backend),
    "small-calls": ("small_calls", small_calls),
    "products": ("products", products),
    "compile-gpu": ("compile_gpu", compile_gpu),
    "gpu": ("gpu", gpu),
}

# ----------------------------------------------------------------------------------------------------


def rendered(name: str, results: Path) -> str:
    """A table with the line above it, as it stands between its markers."""
    if name in HEADS:
        model, write_heads = HEADS[name]
        path = results.parent.parent / ATLASES / f"{model}.json"
        return write_heads(json.loads(path.read_text(encoding="utf-8")))
    name, _, machine = name.partition("@")
    if name not in TABLES:
        raise SystemExit(f"table {name}: expected one of {', '.join([*TABLES, *HEADS])}; remedy: add it to TABLES")
    file, write = TABLES[name]
    path = results / machine / f"{file}.json"
    if not path.is_file():
        raise SystemExit(f"table {name}: expected {path}, which is not there; remedy: run the benchmark that writes it")
    found = json.loads(path.read_text(encoding="utf-8"))
    return f"{measured_on(found['machine'])}\n\n{write(found['rows'])}"


def page_with_tables(text: str, results: Path) -> tuple[str, list[str]]:
    """A page whose tables say what the files say, and the names of those that did not."""
    if not len(MARKED.findall(text)) == text.count("<!-- table:") == text.count("<!-- /table -->"):
        expected = "<!-- table: NAME -->, the table, <!-- /table -->"
        raise SystemExit(f"tables: expected {expected}; received one without the other; remedy: add what is missing")
    stale: list[str] = []

    def replaced(found: re.Match[str]) -> str:
        begin, name, old, end = found.groups()
        new = rendered(name, results)
        if new != old:
            stale.append(name)
        return f"{begin}{new}{end}"

    return MARKED.sub(replaced, text), stale


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a table is stale, and name it")
    parser.add_argument("--root", type=Path, default=ROOT, help="the folder that has README.md, docs and benchmarks")
    options = parser.parse_args()
    stale: list[str] = []
    for name in PAGES:
        path = options.root / name
        before = path.read_text(encoding="utf-8")
        after, of_page = page_with_tables(before, options.root / "benchmarks" / "results")
        stale += [f"{name}: table {table} is not what its file says" for table in of_page]
        if after != before and not options.check:
            path.write_text(after, encoding="utf-8")
    if options.check and stale:
        print("\n".join([*stale, "remedy: python benchmarks/tables.py"]))
        sys.exit(1)


if __name__ == "__main__":
    main()
