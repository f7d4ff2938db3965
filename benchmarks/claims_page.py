"""``benchmarks/notes/claims.md`` and its charts, from the figures that ``claims.py`` measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

WIDTH, BAR, LABEL = 760, 20, 250
Bar = tuple[str, float, str]
"""A bar's label, its length, and the text after it."""


def page(figures: Mapping[str, Any]) -> str:
    """The page, of the parts that were measured."""
    parts = [part(figures[name]) for name, part in PARTS.items() if name in figures]
    machine = figures["machine"]
    return f"""# Claims, measured

Claims of papers and engines about serving language models, and our measurements.
`python benchmarks/claims.py BUNDLE --hf FOLDER --source MODEL --page benchmarks/notes/claims.md` makes this page.
SmolLM2-135M in int8, {machine["cores"]} cores ({machine["processor"]}), medians of {figures["rounds"]} rounds in turn.

{"".join(parts)}{HEADS}"""


def charts(figures: Mapping[str, Any]) -> dict[str, str]:
    """File name -> SVG."""
    pictures = {}
    if "reservation" in figures:
        one = figures["reservation"]
        rows = [
            ("blocks of 32 tokens", one["blocks"]["waste"]),
            (f"contexts of {one['context']:,} tokens", one["contexts"]["waste"]),
        ]
        bars = [(name, waste, f"{waste:.1%}") for name, waste in rows]
        pictures["claims-reservation.svg"] = chart(bars, (0.04, "4 % (claimed for blocks)"))
    if "batching" in figures:
        one = figures["batching"]
        speeds = {"join and leave at each step": one["continuous"], "begin and end together": one["static"]}
        speeds |= {"transformers, padded": one["transformers"]} if "transformers" in one else {}
        pictures["claims-batching.svg"] = chart(
            [(name, of["tokens_per_second"], f"{of['tokens_per_second']:,.0f} tokens/s") for name, of in speeds.items()]
        )
    if "cache" in figures:
        bars = []
        for length, of in figures["cache"].items():
            bars.append((f"{int(length):,} tokens, cached", of["with"], f"{of['with']:.1f} ms"))
            bars.append((f"{int(length):,} tokens, computed again", of["without"], f"{of['without']:,.0f} ms"))
        pictures["claims-cache.svg"] = chart(bars)
    if "attention" in figures:
        bars = []
        for length, of in figures["attention"].items():
            bars.append(
                (f"{int(length):,} tokens, in tiles", of["tiles"]["seconds"], f"{of['tiles']['seconds']:.2f} s")
            )
            bars.append(
                (f"{int(length):,} tokens, all scores", of["scores"]["seconds"], f"{of['scores']['seconds']:.2f} s")
            )
        pictures["claims-attention.svg"] = chart(bars)
    return pictures


def reservation(found: Mapping[str, Any]) -> str:
    """Writes what is said of memory."""
    blocks, contexts = found["blocks"], found["contexts"]
    prompt, answer, held = (f"{n:.0f}" for n in (found["mean_prompt"], found["mean_answer"], blocks["mean_tokens"]))
    speedup, least, most = (f"{found[key]:.2f}" for key in ("speedup", "speedup_least", "speedup_most"))
    return f"""## Memory that is reserved and not used

PagedAttention (SOSP 2023): systems that reserve a request's context use 20 to 40 % of their KV cache; with blocks
less than 4 % is waste, and the same memory serves 2 to 4 times as much.

![Waste](claims-reservation.svg)

| | blocks of 32 | contexts of {found["context"]:,} |
| --- | --- | --- |
| reserved and not used, while steps run | {blocks["waste"]:.1%} | {contexts["waste"]:.1%} |
| requests that run, on average | {blocks["mean_running"]:.1f} | {contexts["mean_running"]:.1f} |
| tokens a second | {blocks["tokens_per_second"]:,.0f} | {contexts["tokens_per_second"]:,.0f} |

{found["requests"]} requests, all there from the beginning, in memory for {found["memory_tokens"]:,} tokens. Prompts
have {prompt} tokens on average and answers {answer} (the default "chat" of `optimize buckets`, for both), so a running
request holds {held} on average, and half a block of it is empty. Requests with reserved contexts run in the same
engine: what differs is the memory alone. Blocks give **{speedup} times** the tokens
a second ({least} to {most}). The 2 to 4 times are of GPUs, on which a step of sixty requests takes about as long as
one of six; on two cores it takes longer.

"""


def batching(found: Mapping[str, Any]) -> str:
    """Writes what is said of batches."""
    rows = [("requests join and leave at each step", "continuous"), ("batches begin and end together", "static")]
    if "transformers" in found:
        rows.append((f"transformers, padded batches, {found['transformers']['dtype']}", "transformers"))
    ours = found["continuous"]["tokens_per_second"]
    table = "\n".join(
        f"| {name} | {found[key]['tokens_per_second']:,.0f} | {ours / found[key]['tokens_per_second']:.2f} |"
        for name, key in rows
    )
    return f"""## Batches whose requests come and go

Continuous batching is said to give up to 23 times the throughput of static batches (Anyscale, 2023, on a GPU, against
padded batches of transformers; Orca, OSDI 2022, is its origin).

![Batches](claims-batching.svg)

| batches of {found["batch"]} at most | tokens a second | continuous is so many times faster |
| --- | --- | --- |
{table}

{found["requests"]} requests; answers have {found["mean_answer"]:.0f} tokens on average, and the longest
{found["longest_answer"]}. In the same engine a static batch loses what its places don't do after their answers have
ended; a step with fewer requests also takes less time on a CPU, which a GPU's hardly does. transformers computes every
place to the end of the longest.

"""


def cache(found: Mapping[str, Any]) -> str:
    """Writes what is said of a token's cost."""
    rows = "\n".join(
        f"| {int(n):,} | {of['with']:.1f} | {of['without']:,.1f} | {of['without'] / of['with']:,.0f} |"
        for n, of in found.items()
    )
    return f"""## What a KV cache saves

Without a cache every token computes all before it again, so an answer's cost grows with the square of its length.

![One more token](claims-cache.svg)

| tokens before | with a cache, ms | computed again, ms | ratio |
| --- | --- | --- | --- |
{rows}

"""


def attention(found: Mapping[str, Any]) -> str:
    """Writes what is said of scores."""
    rows = "\n".join(
        f"| {int(n):,} | {of['tiles']['seconds']:.2f} | {of['scores']['seconds']:.2f} "
        f"| {of['tiles']['bytes'] / 2**20:,.0f} | {of['scores']['bytes'] / 2**20:,.0f} |"
        for n, of in found.items()
    )
    return f"""## Attention in tiles

FlashAttention (NeurIPS 2022) never writes the scores of all tokens down: memory that grows with the length and not with
its square, and 2 to 4 times the speed on a GPU.

![Attention](claims-attention.svg)

| tokens of a prompt | tiles, s | all scores, s | tiles, MiB | all scores, MiB |
| --- | --- | --- | --- | --- |
{rows}

Seconds are of all 30 layers. "All scores" is torch on the same shapes, a layer after the other: products of float32,
mask, softmax. MiB are what the process grew by: for tiles by everything that the whole prompt's step needs, KV cache
and activations included; for torch by one layer's scores, which it writes down three times.

"""


def formats(found: Mapping[str, Any]) -> str:
    """Writes what is said of KV formats."""
    rows = "\n".join(
        f"| {kind} | {of['bytes_per_token']:,.0f} | {of['kl']:.2e} | {of['top_1']:.1%} "
        f"| {of['step_milliseconds']:.1f} |"
        for kind, of in found.items()
    )
    return f"""## KV caches of fewer bits

8 bits are said to halve the cache of 16 at no loss that is noticed (vLLM, TensorRT-LLM).

| KV cache | bytes a token | KL from float32's, nats | same best token | step of 8 requests behind 2,000 tokens, ms |
| --- | --- | --- | --- | --- |
{rows}

Weights are int8 in all.

"""


def rounding(found: Mapping[str, Any]) -> str:
    """Writes what is said of keys and values of 4 bits."""
    rows = "\n".join(
        f"| {kind} | {of['bits']:.1f} | {of['kl']:.2e} | {of['top_1']:.1%} |" for kind, of in found.items()
    )
    best = min(of["kl"] for kind, of in found.items() if kind.startswith("4 bits"))
    return f"""## 4 bits, and a rotation

A Hadamard rotation is said to make 4 bits of keys and values nearly lossless (QuaRot, 2024: 7 billion parameters, heads
of 128). Here it has SmolLM2's heads of 64, in transformers' model with 32-bit floats, whose keys and values are
rounded in the attention over 1,500 tokens of English.

| keys and values | bits a number, scales too | KL, nats | same best token |
| --- | --- | --- | --- |
{rows}

A cache of 4 bits for both isn't built: it would have to be within 0.01 of one of 16, and the best is at {best:.3f}.
[Bits of a KV cache](kv-bits.md) has other widths, of which some are built.

"""


HEADS = """## Fewer key and value heads

GQA (2023) converts 8 heads to 1 with 5 % of the training. The page on
[attention heads](../../docs/use/attention-heads.md) has the effect here, with recovery and without.
"""


def chart(bars: Sequence[Bar], mark: tuple[float, str] | None = None) -> str:
    """Bars as SVG, and a line at a value."""
    scale = (WIDTH - LABEL - 120) / max(value for _, value, _ in bars)
    parts = []
    for i, (name, value, label) in enumerate(bars):
        y = 10 + i * (BAR + 10)
        parts.append(f'<text x="{LABEL - 8}" y="{y + 14}" text-anchor="end">{escape(name)}</text>')
        parts.append(f'<rect x="{LABEL}" y="{y}" width="{value * scale:.1f}" height="{BAR}" fill="#1b7f5c"/>')
        parts.append(f'<text x="{LABEL + value * scale + 6:.1f}" y="{y + 14}">{escape(label)}</text>')
    height = 10 + len(bars) * (BAR + 10)
    if mark is not None:
        x = LABEL + mark[0] * scale
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="4" y2="{height}" stroke="#8c959f" stroke-dasharray="3 3"/>')
        parts.append(f'<text x="{x + 4:.1f}" y="{height + 14}">{escape(mark[1])}</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height + 24}" font-family="sans-serif" '
    return "\n".join([head + 'font-size="12" fill="#57606a">', *parts, "</svg>", ""])


PARTS = {
    "reservation": reservation,
    "batching": batching,
    "cache": cache,
    "attention": attention,
    "formats": formats,
    "rounding": rounding,
}
