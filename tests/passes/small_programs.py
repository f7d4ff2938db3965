"""Small decoders that call the ew ops themselves, as captured models look once normalised, and inputs for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import sympy
import torch
from torch import nn
from torch.export import Dim, export

import enginewright.passes.ops  # noqa: F401  (registers torch.ops.ew)
from enginewright.optimizer.capture.functional_graph import make_functional
from enginewright.passes.framework.verify_program import verify_program
from enginewright.passes.ir.program import Program, from_exported
from enginewright.passes.ir.weights import Source
from enginewright.runtime.shared.contracts import STATE, CacheGroup

ew = torch.ops.ew
BLOCK = 32


@dataclass(frozen=True)
class Shape:
    """The sizes of a small decoder. ``windows``: of each layer."""

    windows: tuple[int, ...] = (0, 0)
    hidden: int = 32
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 8
    intermediate: int = 48
    vocabulary: int = 67
    bias: tuple[bool, bool, bool] = (False, False, False)
    qk_norm: bool = False
    layer_norm: bool = False
    tied: bool = True
    logits_cap: float = 0.0


class Linear(nn.Module):
    def __init__(self, n: int, k: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n, k) * k**-0.5)
        self.bias = nn.Parameter(torch.randn(n) * 0.3) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ew.linear(x, self.weight, self.bias)


class Norm(nn.Module):
    def __init__(self, size: int, layer_norm: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + torch.randn(size) * 0.2)
        self.bias = nn.Parameter(torch.randn(size) * 0.2) if layer_norm else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.bias is not None:
            return ew.layer_norm(x, self.weight, self.bias, 1e-5)
        return ew.rms_norm(x, self.weight, 1e-5)


class Layer(nn.Module):
    def __init__(self, s: Shape, index: int) -> None:
        super().__init__()
        self.s, self.index = s, index
        self.input_norm, self.post_norm = Norm(s.hidden, s.layer_norm), Norm(s.hidden, s.layer_norm)
        self.q_proj = Linear(s.heads * s.head_size, s.hidden, s.bias[0])
        self.k_proj = Linear(s.kv_heads * s.head_size, s.hidden, s.bias[1])
        self.v_proj = Linear(s.kv_heads * s.head_size, s.hidden, s.bias[2])
        self.o_proj = Linear(s.hidden, s.heads * s.head_size)
        self.q_norm, self.k_norm = Norm(s.head_size), Norm(s.head_size)
        self.gate_proj, self.up_proj = Linear(s.intermediate, s.hidden), Linear(s.intermediate, s.hidden)
        self.down_proj = Linear(s.hidden, s.intermediate)

    def forward(self, x: torch.Tensor, table: torch.Tensor, q_start: torch.Tensor) -> torch.Tensor:
        s = self.s
        h = self.input_norm(x)
        q = self.q_proj(h).view(-1, s.heads, s.head_size)
        k = self.k_proj(h).view(-1, s.kv_heads, s.head_size)
        v = self.v_proj(h).view(-1, s.kv_heads, s.head_size)
        if s.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = ew.rope(q, table, False), ew.rope(k, table, False)
        out = ew.attention(q, k, v, q_start, self.index, s.head_size**-0.5, s.windows[self.index], 0.0, None)
        x = x + self.o_proj(out.view(-1, s.heads * s.head_size))
        h = self.post_norm(x)
        gate_up = torch.cat((self.gate_proj(h), self.up_proj(h)), -1)
        return x + self.down_proj(ew.gated_activation(gate_up, "silu"))


class Decoder(nn.Module):
    """Takes the step inputs; ``take_rows`` comes last of all, as capture leaves it."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.s = s
        self.embed = nn.Parameter(torch.randn(s.vocabulary, s.hidden))
        self.register_buffer("inv_freq", 10000.0 ** (-torch.arange(0, s.head_size, 2) / s.head_size))
        self.layers = nn.ModuleList(Layer(s, i) for i in range(len(s.windows)))
        self.norm = Norm(s.hidden, s.layer_norm)
        self.head = None if s.tied else nn.Parameter(torch.randn(s.vocabulary, s.hidden))

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        q_start: torch.Tensor,
        kv_len: torch.Tensor,
        slots: torch.Tensor,
        block_table: torch.Tensor,
        rows: torch.Tensor,
    ) -> torch.Tensor:
        x = ew.embedding(ids, self.embed)
        table = ew.rope_table(positions, self.inv_freq, 1.0)
        for layer in self.layers:
            x = layer(x, table, q_start)
        logits = ew.linear(self.norm(x), self.embed if self.head is None else self.head, None)
        if self.s.logits_cap:
            logits = torch.tanh(logits / self.s.logits_cap) * self.s.logits_cap
        return ew.take_rows(logits, rows)


def decoder(shape: Shape = Shape(), seed: int = 0) -> Program:
    """A random decoder as a Program, to be rewritten at will."""
    return _decoder(shape, seed).copy()


@cache
def _decoder(shape: Shape, seed: int) -> Program:
    torch.manual_seed(seed)
    return program_of(Decoder(shape).eval())


class Table(nn.Module):
    """A module with one random weight, ``table`` [256, width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(width)
        self.table = nn.Parameter(torch.randn(256, width))


class _StepModule(nn.Module):
    def __init__(self, inner: nn.Module, call: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.inner, self.call = inner, call

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        q_start: torch.Tensor,
        kv_len: torch.Tensor,
        slots: torch.Tensor,
        block_table: torch.Tensor,
        rows: torch.Tensor,
    ) -> torch.Tensor:
        inputs = {"ids": ids, "positions": positions, "q_start": q_start, "kv_len": kv_len, "slots": slots}
        return self.call(self.inner, inputs | {"block_table": block_table, "rows": rows})


def program_from(
    call: Callable[..., torch.Tensor], inner: nn.Module | None = None, *, decomposed: bool = False
) -> Program:
    """A program of ``call(inner, inputs)``, where inputs are the step inputs by name; see ``program_of``."""
    return program_of(_StepModule(inner or nn.Module(), call).eval(), "inner.", decomposed=decomposed)


def program_of(module: nn.Module, prefix: str = "", *, decomposed: bool = False) -> Program:
    """Exports a module that takes all step inputs. Its parameters become Sources under their own names.

    ``decomposed``: by torch's run_decompositions, which takes twice as long, and leaves casts that do nothing.
    """
    t, b, r, m = (Dim(name, min=1, max=1 << 20) for name in "TBRM")
    shapes = {"ids": [t], "positions": [t], "q_start": [b + 1], "kv_len": [b], "slots": [t], "rows": [r]}
    shapes |= {"block_table": [b, m]}
    sizes = {"T": 13, "B": 3, "B + 1": 4, "R": 5, "M": 11}
    values = {
        name: torch.zeros([sizes[str(d.__name__)] for d in dims], dtype=torch.int64) for name, dims in shapes.items()
    }
    exported = export(module, (), values, dynamic_shapes={k: dict(enumerate(v)) for k, v in shapes.items()})
    exported = exported.run_decompositions({}) if decomposed else make_functional(exported)
    symbols: dict[sympy.Symbol, str] = {}
    for node in exported.graph.nodes:
        if node.op == "placeholder" and node.name in shapes:
            for dim, size in zip(shapes[node.name], node.meta["val"].shape, strict=True):
                if dim.__name__ in "TBRM":
                    symbols[size.node.expr] = dim.__name__
    weights = {}
    for name, value in {**exported.state_dict, **exported.constants}.items():
        clean = name.removeprefix(prefix)
        weights[clean] = Source(clean, tuple(value.shape), value.dtype, lambda value=value: value.detach())
    program = from_exported(exported, weights, module_prefix=prefix, symbols=symbols)
    verify_program(program)
    return program


@dataclass
class Request:
    """The cache contents of a request: its tokens and, by cache group, its blocks."""

    tokens: list[int] = field(default_factory=list)
    blocks: dict[str, list[int]] = field(default_factory=dict)


class Steps:
    """Makes step inputs over a paged cache, with blocks dealt out in a scrambled order.

    A request has one block of each of the groups ``states``, and no slots there.
    """

    def __init__(self, groups: Sequence[str], blocks: int = 24, seed: int = 0, states: Sequence[str] = ()) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.groups, self.states = list(groups), frozenset(states)
        self.pool_blocks = blocks
        self.free = {g: torch.randperm(blocks, generator=generator).tolist() for g in groups}
        self.requests: dict[str, Request] = {}

    def step(self, chunks: Mapping[str, Sequence[int]], rows: Sequence[int] | None = None) -> dict[str, torch.Tensor]:
        """Inputs that append ``chunks[request]`` to each request; rows: by default each request's last token."""
        ids: list[int] = []
        positions: list[int] = []
        q_start, kv_len = [0], []
        slots: dict[str, list[int]] = {g: [] for g in self.groups}
        for name, chunk in chunks.items():
            request = self.requests.setdefault(name, Request(blocks={g: [] for g in self.groups}))
            for token in chunk:
                at = len(request.tokens)
                for g in self.groups:
                    if at % BLOCK == 0 and not (at and g in self.states):
                        request.blocks[g].append(self.free[g].pop())
                    slots[g].append(-1 if g in self.states else request.blocks[g][-1] * BLOCK + at % BLOCK)
                ids.append(token)
                positions.append(at)
                request.tokens.append(token)
            q_start.append(len(ids))
            kv_len.append(len(request.tokens))
        last = [end - 1 for end in q_start[1:]]
        inputs = {"ids": ids, "positions": positions, "q_start": q_start, "kv_len": kv_len}
        result = {k: torch.tensor(v) for k, v in inputs.items()}
        result["rows"] = torch.tensor(last if rows is None else list(rows), dtype=torch.int64)
        for g in self.groups:
            tables = [self.requests[name].blocks[g] for name in chunks]
            widest = max(len(t) for t in tables)
            result[f"block_table:{g}"] = torch.tensor([t + [-1] * (widest - len(t)) for t in tables])
            result[f"slots:{g}"] = torch.tensor(slots[g])
        return result


def whole_inputs(sequences: Sequence[Sequence[int]], rows: Sequence[int] | None = None) -> dict[str, torch.Tensor]:
    """Inputs of a captured program: all sequences from their start."""
    names = {str(i): s for i, s in enumerate(sequences)}
    inputs = Steps(["x"]).step(names, rows)
    return {k.removesuffix(":x"): v for k, v in inputs.items()}


def random_sequences(lengths: Sequence[int], vocabulary: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocabulary, (n,), generator=generator).tolist() for n in lengths]


def evaluate(program: Program, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The logits of one evaluation."""
    return program.evaluate(inputs)[0]


def check_logits(
    after: Program,
    before: Program,
    tolerance: float,
    *,
    lengths: Sequence[Sequence[int]] = ((5, 1, 17), (33,)),
    vocabulary: int = 67,
) -> None:
    """Checks that two programs have the same logits for random sequences of these lengths, within a tolerance."""
    for one in lengths:
        inputs = whole_inputs(random_sequences(one, vocabulary))
        torch.testing.assert_close(evaluate(after, inputs), evaluate(before, inputs), rtol=0, atol=tolerance)


def steps_of(groups: Sequence[CacheGroup], blocks: int = 24, seed: int = 0) -> Steps:
    """Steps over these cache groups."""
    return Steps([g.name for g in groups], blocks, seed, [g.name for g in groups if g.kind == STATE])


STATE_ARGUMENTS = {
    getattr(ew, name).default: [argument.name for argument in getattr(ew, name).default._schema.arguments].index(
        "state"
    )
    for name in ("stored_convolution", "stored_scan", "stored_delta_rule")
}
"""Recurrences -> the number of the argument that is the cache."""


class PagedEvaluation:
    """Evaluates a paged program step by step, keeping its caches between steps. Empty slots hold NaN."""

    def __init__(self, program: Program, blocks: int = 24, seed: int = 0) -> None:
        self.program = program
        self.steps = steps_of(program.cache_groups, blocks, seed)
        self.caches: dict[str, torch.Tensor] = {}
        for name, node in program.inputs.items():
            if name.startswith(("k_cache:", "v_cache:", "k_ends:", "v_ends:")):
                shape = program.value(node).shape
                self.caches[name] = torch.full([blocks, BLOCK, int(shape[2]), int(shape[3])], float("nan"))
            elif name.startswith(f"{STATE}:"):
                self.caches[name] = torch.full([blocks, int(program.value(node).shape[1])], float("nan"))

    def run(self, chunks: Mapping[str, Sequence[int]], rows: Sequence[int] | None = None) -> torch.Tensor:
        inputs = self.steps.step(chunks, rows)

        def keep(node: Any, value: Any) -> None:
            if node.target is torch.ops.ew.kv_write.default:
                self.caches[str(node.args[0].target)], self.caches[str(node.args[1].target)] = value
            elif (at := STATE_ARGUMENTS.get(node.target)) is not None:
                source = node.args[at]
                while source.op != "placeholder":  # an op before this one wrote to the layer's cache
                    source = source.args[0].args[STATE_ARGUMENTS[source.args[0].target]]
                self.caches[str(source.target)] = value[1]

        return self.program.evaluate(inputs | self.caches, keep)[0]


def captured_programs() -> dict[str, Shape]:
    """Shapes that tests go through."""
    return {
        "plain": Shape(),
        "windows": Shape(windows=(8, 0, 8), kv_heads=4, tied=False),
        "norms": Shape(qk_norm=True, bias=(True, False, True), layer_norm=True, logits_cap=5.0),
    }
