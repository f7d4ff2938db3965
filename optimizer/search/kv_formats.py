"""The search of [kv_cache] for the format of each layer's keys and values: the least KL within bytes per token.

One evaluation of the program measures the cost of each layer alone. At the call of an attention, its result is computed
from keys and values in every format. With the format of the largest error the rest of the program is computed again,
and the KL of the logits is measured. The KL of the other formats is predicted from their squared errors.

Formats may store the ends of a request in more bits, so sequences are longer than both ends: calibration sequences are
joined.
"""

from __future__ import annotations

import glob
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx.node import Node

from enginewright.optimizer.recipes.recipe import Recipe
from enginewright.passes.attention.keep_ends import stored_format
from enginewright.passes.attention.lower_attention import LowerAttention, begins
from enginewright.passes.attention.round_kv_cache import RoundKvCache
from enginewright.passes.framework.kv_options import CacheOptions, CacheOverride
from enginewright.passes.framework.match import bound_arguments
from enginewright.passes.framework.stepwise_evaluation import StepwiseEvaluation
from enginewright.passes.framework.token_sequences import mean_kl
from enginewright.passes.ir.program import Program
from enginewright.passes.ir.provenance import WHERE, join_where
from enginewright.passes.ops.attention import of_one_request, request_spans
from enginewright.passes.ops.cache import rounded_heads
from enginewright.runtime.shared.contracts import KV_BLOCK_SIZE, head_bytes
from enginewright.runtime.shared.kv_formats import CACHES, KV_FORMATS, CacheDtype, heads_fit

from .assign import Assignment, Options, fewest_bytes
from .measure_choices import Check, affordable_tokens, cache_bytes, share_of
from .report import CachePoint, FormatOption, KvFormatsReport, UnitChoice
from .search import NothingToChooseError, NothingWithinError, Search, Tried, some_of

ew = torch.ops.ew

FEWEST_TOKENS = 512
"""The fewest tokens of a sequence, for a model of any size: half of them see others than the ends of the request."""

MOST_LOGITS = 1 << 25
"""The most logits of an evaluation, which stay in memory while layers are measured."""


@dataclass(frozen=True)
class CacheUnit:
    """An attention, and the formats that its cache can have.

    Attributes:
        attention: the call of ``ew.attention``.
        names: the formats, by their names in recipes.
        stored: the same as stored: a short window may have that of another name.
        values_in_keys: True if values are the first channels of keys, and only keys are stored.
    """

    attention: Node
    names: tuple[str, ...]
    stored: tuple[CacheDtype, ...]
    values_in_keys: bool

    @property
    def path(self) -> str:
        """The path of the attention."""
        return join_where(self.attention.meta[WHERE])


class KvFormatSearch(Search[KvFormatsReport]):
    """The search for a recipe whose ``kv_cache.dtype`` is auto. Sizes are the bytes of the cache for a token."""

    stage: ClassVar[str] = "caches"
    section: ClassVar[str] = "kv_cache"
    passes: ClassVar[tuple[str, ...]] = ("fuse_qkv", "fuse_gate_up", "sink_take_rows", "fuse_add_norm", "lower_experts")

    @property
    def most(self) -> int:
        """The budget in bytes per token."""
        assert self.recipe.kv_cache.max_bytes_per_token is not None
        return self.recipe.kv_cache.max_bytes_per_token

    def find_units(self) -> None:
        names = tuple(dict.fromkeys(self.recipe.kv_cache.candidates))
        self.units, sizes = list[CacheUnit](), list[tuple[int, ...]]()
        for node in self.program.nodes_of(ew.attention.default):
            unit, of_unit = self._unit(node, names)
            self.units.append(unit)
            sizes.append(of_unit)
        if not self.units:
            raise NothingToChooseError(
                f"recipe {self.recipe.name}: kv_cache.dtype: the model has no attention, and no keys and values",
                hint="Leave [kv_cache] out.",
            )
        affordable = max(FEWEST_TOKENS, affordable_tokens(len(self.units), self.task.parameters))
        longest = min(self.recipe.kv_cache.tokens, affordable, self.task.context_length or affordable)
        vocabulary = int(self.program.value(self.program.logits).shape[-1])
        rows = max(1, MOST_LOGITS // vocabulary)
        seen = [torch.cat(list(self.task.sequences))[:longest]]
        held_out = [torch.cat(self.context.calibration[1::2])[:longest]]
        self.tokens = len(seen[0])
        costs = measure_layers(self.program, self.units, seen, rows, self.on_progress, self.context.memory_budget)
        self.options = [Options(s, c) for s, c in zip(sizes, costs, strict=True)]
        kinds = {"held-out calibration tokens": held_out}
        self.check = Check(self.program, [LowerAttention(), RoundKvCache()], self.context, kinds, most_rows=rows)

    def _unit(self, node: Node, names: Sequence[str]) -> tuple[CacheUnit, tuple[int, ...]]:
        """Returns an attention with the formats that its heads fit, and the bytes of each."""
        arguments = bound_arguments(node)
        k, v = (self.program.value(arguments[name]) for name in ("k", "v"))
        heads, key_size, value_size = int(k.shape[1]), int(k.shape[2]), int(v.shape[2])
        latent = self.context.latent_caches and begins(arguments["k"], arguments["v"])
        formats: dict[CacheDtype, str] = {}
        for name in names:
            if heads_fit(CACHES[name], key_size, value_size):
                formats.setdefault(stored_format(CACHES[name], arguments["window"]), name)
        unit = CacheUnit(node, tuple(formats.values()), tuple(formats), latent)
        if not formats:
            raise NothingToChooseError(
                f"recipe {self.recipe.name}: kv_cache.candidates: none has heads of {key_size} channels for keys and "
                f"{value_size} for values, as {unit.path} has",
                hint="Add int8 or bf16.",
            )
        values = [0 if latent else head_bytes(stored, 1, value_size) for stored in unit.stored]
        keys = [head_bytes(stored, 0, key_size) for stored in unit.stored]
        return unit, tuple(heads * (a + b) for a, b in zip(keys, values, strict=True))

    def choose(self) -> Tried:
        choice = self.least_kl(self.most)
        if choice is None:
            raise NothingWithinError(
                f"recipe {self.recipe.name}: no formats are within kv_cache.max_bytes_per_token = {self.most:,}: the "
                f"smallest of the candidates take {self.curve[-1].size:,} bytes a token",
                hint="Allow more with max_bytes_per_token in [kv_cache], or add a smaller one to candidates.",
            )
        return choice

    def fewest(self, most_kl: float) -> Assignment:
        return fewest_bytes(self.options, most_kl) or self.curve[0]

    def applied(self, choice: Assignment) -> Recipe:
        """Returns the recipe with the format of most layers as the default, and the others as overrides."""
        names = self._names(choice)
        default = Counter(names).most_common(1)[0][0]  # of equal counts the first in the program
        overrides = tuple(
            CacheOverride(layers=glob.escape(unit.path), dtype=name)
            for unit, name in zip(self.units, names, strict=True)
            if name != default
        )
        return self.recipe.model_copy(update={"kv_cache": CacheOptions(dtype=default, overrides=overrides)})

    def label(self, choice: Assignment) -> str:
        return f"{choice.size:,} bytes a token"

    def report(self, taken: Tried, seconds: float) -> KvFormatsReport:
        return KvFormatsReport(
            max_kl=None,
            max_bytes_per_token=self.most,
            tokens=self.tokens,
            chosen=CachePoint(taken.choice.size, taken.choice.cost, taken.kl),
            measured_kl=taken.measured,
            curve=tuple(CachePoint(a.size, a.cost) for a in some_of(self.curve)),
            layers=tuple(
                UnitChoice(unit.path, name, tuple(map(FormatOption, unit.names, options.sizes, options.costs)))
                for unit, options, name in zip(self.units, self.options, self._names(taken.choice), strict=True)
            ),
            seconds=seconds,
        )

    def _names(self, choice: Assignment) -> list[str]:
        return [unit.names[o] for unit, o in zip(self.units, choice.chosen, strict=True)]


def measure_layers(
    program: Program,
    units: Sequence[CacheUnit],
    sequences: Sequence[torch.Tensor],
    most_rows: int,
    on_progress: Callable[[int, int, str], None],
    memory_budget: int | None = None,
) -> list[tuple[float, ...]]:
    """Returns the predicted KL, in nats per token, of each format of each layer.

    Args:
        program: a normalised program in 32-bit floats.
        units: the attentions of that program.
        sequences: token ids, [S] each.
        most_rows: the most tokens whose logits are compared.
        on_progress: called with the number of measured layers, the number of all, and the path of the next one.
        memory_budget: bytes of memory that may be used; see ``PassContext``.
    """
    run = StepwiseEvaluation(program, sequences, cache_bytes(memory_budget), most_rows)
    unit_of = {unit.attention: unit for unit in units}
    values = run.start()
    reference = run.finish(dict(values))
    costs: list[tuple[float, ...]] = []
    for at, node in enumerate(run.calls):
        unit = unit_of.get(node)
        if unit is not None:
            on_progress(len(costs), len(units), unit.path)
            args, kwargs = run.arguments(node, values)
            exact = run.fast.compute(node, args, kwargs)
            arguments = {**bound_arguments(node), **dict(zip(bound_arguments(node), args, strict=False)), **kwargs}
            results = [cached_attention(arguments, stored, unit.values_in_keys) for stored in unit.stored]
            errors = [float((result - exact).square().mean()) for result in results]
            worst = max(range(len(errors)), key=errors.__getitem__)
            replaced = {node: _always(results[worst])}
            share = share_of(mean_kl(reference, run.finish(dict(values), at, replaced)), errors[worst])
            costs.append(tuple(share * error for error in errors))
        run.step(node, values)
    on_progress(len(units), len(units), "")
    return costs


def cached_attention(arguments: Mapping[str, Any], dtype: CacheDtype, values_in_keys: bool = False) -> torch.Tensor:
    """Returns the result of ``ew.attention`` with keys and values as a cache of ``dtype`` stores them.

    Args:
        arguments: the values of the op's arguments, by name.
        dtype: the format, which may have ends (``KvFormat.ends``).
        values_in_keys: True if values are the first channels of keys, and only keys are stored.
    """
    ends, results = KV_FORMATS[dtype].ends, []
    for start, stop in request_spans(arguments):
        one = of_one_request(arguments, start, stop)
        blocks = -(-(stop - start) // KV_BLOCK_SIZE)
        table = torch.arange(blocks)[None]
        k_ends, v_ends = (None, None) if ends is None else _caches(one, ends, values_in_keys)
        results.append(
            ew.paged_attention.default(
                one["q"],
                *_caches(one, dtype, values_in_keys),
                table,
                one["q_start"],
                torch.tensor([stop - start]),
                *(one[name] for name in ("scale", "window", "softcap", "sinks", "slopes")),
                None,
                k_ends,
                v_ends,
                None if ends is None else table,
            )
        )
    return torch.cat(results)


def _caches(one: Mapping[str, Any], dtype: CacheDtype, values_in_keys: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a request's keys and values [P, K, Nkv, D] as a cache of ``dtype`` gives them back."""
    keys = rounded_heads(one["k"], dtype, 0)
    values = keys[..., : one["v"].shape[-1]] if values_in_keys else rounded_heads(one["v"], dtype, 1)
    missing = -len(keys) % KV_BLOCK_SIZE
    padded = [torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) for x in (keys, values)]
    k, v = (x.unflatten(0, (-1, KV_BLOCK_SIZE)) for x in padded)
    return k, v


def _always(value: torch.Tensor) -> Callable[[object], torch.Tensor]:
    return lambda _: value
