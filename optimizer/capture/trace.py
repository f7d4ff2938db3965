"""Traces a model of transformers into a Program, with packed tokens and symbolic T, B, M and R."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any

import sympy
import torch
import torch.fx.config
from torch._dynamo.exc import TorchDynamoException, UserError
from transformers import PreTrainedModel

from enginewright.passes.ir.program import Program, from_exported
from enginewright.passes.ir.provenance import WHERE, join_where
from enginewright.passes.ir.weights import COMPUTED, Source, WeightExpr
from enginewright.runtime.shared.errors import UnsupportedModelError
from enginewright.runtime.shared.step_schema import CLASSES, POOLED, PORTS, POSITIONS, TYPES

from .attention_interface import AttentionCapture, AttentionMask, begin_forward, capturing
from .build_model import architecture
from .freeze_rope import own_context_length
from .functional_graph import make_functional
from .gradient_mode import without_gradient_mode
from .known_values import drop_masks_of_all, drop_whole_selections, read_given_positions
from .pooled_source import PooledSource
from .pooled_step import PooledStep, layers_of
from .recurrence_interface import replaced_recurrences
from .text_inputs import text_inputs
from .token_count import watching
from .token_independence import check_token_independence
from .written_out_attention import replace_written_out_attention

_PREFIX = "model_."

# Sizes of the example step; all different and none 0 or 1, which torch.export would take for constants.
_TOKENS, _REQUESTS, _BLOCKS, _ROWS = 13, 3, 5, 7
_LEAST_LONGEST = 64

_CHECKS = (
    torch.ops.aten._assert_tensor_metadata.default,
    torch.ops.aten._assert_scalar.default,
    torch.ops.aten._assert_async.msg,
    torch.ops.aten.sym_constrain_range_for_size.default,
    torch.ops.aten.sym_constrain_range.default,
)


class _Step(torch.nn.Module):
    """A model as a function of a step's inputs. It ignores some inputs, which later passes need."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model_ = model

    @without_gradient_mode
    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        q_start: torch.Tensor,
        kv_len: torch.Tensor,
        block_table: torch.Tensor,
        slots: torch.Tensor,
        rows: torch.Tensor,
    ) -> torch.Tensor:
        begin_forward(q_start, ids.shape[0])
        # A mask of ones, for without one transformers tries to find the packing in the positions.
        result = self.model_(
            input_ids=ids[None],  # [1, T]
            attention_mask=torch.ones_like(ids, dtype=torch.bool)[None],
            position_ids=positions[None],
            use_cache=False,
        )
        logits: torch.Tensor = torch.ops.ew.take_rows(result.logits[0], rows)  # [R, V]
        return logits


def trace(model: PreTrainedModel, weights: Mapping[str, WeightExpr]) -> Program:
    """Traces ``model`` (from ``build_model``) to a program with logits [R, V] of the requested rows.

    Args:
        model: its parameters need no values.
        weights: the source of each parameter and persistent buffer, by its name in the model's state dict. Buffers that
            the model computes itself are read from ``model``.

    Raises:
        UnsupportedModelError: torch.export can't trace it, a layer's attention bypassed the interface, it calls an op
            that is neither ATen's nor ours, or an op other than attention may combine tokens.
    """
    return _trace(_Step(model), model, model, weights)


def trace_pooled(model: PreTrainedModel, source: PooledSource, weights: Mapping[str, WeightExpr]) -> Program:
    """Traces ``model`` (from ``build_pooled``) to a program with a row [B, E] for each text, or [R, C] for tokens.

    Args:
        model: its parameters need no values. A classifier's head gets random ones.
        source: the model's description.
        weights: as for ``trace``, with those of the modules after the pooling.

    Raises the errors of ``trace``; UnsupportedModelError also for a head that can't run on pooled rows.
    """
    layers = layers_of(model, source)
    program = _trace(PooledStep(model, source, text_inputs(layers, model)), model, layers, weights)
    program.output_name = CLASSES if source.task == "token_classify" else POOLED
    if not (types := program.inputs[TYPES]).users:
        program.graph.erase_node(types)
    return program


@contextmanager
def _no_stack_traces() -> Iterator[None]:
    """Has torch.export not look up the Python stack of each node, an eighth of its time: nobody reads them here."""
    before = torch.fx.config.do_not_emit_stack_traces
    torch.fx.config.do_not_emit_stack_traces = True
    try:
        yield
    finally:
        torch.fx.config.do_not_emit_stack_traces = before


def _trace(
    step: torch.nn.Module, model: PreTrainedModel, layers: torch.nn.Module, weights: Mapping[str, WeightExpr]
) -> Program:
    """Traces a step of ``model``, whose module ``layers`` gets the token ids."""
    name, whole_texts = architecture(model.config), isinstance(step, PooledStep)
    captured = tuple(signature(step.forward).parameters)
    # A model is only asked for sequences that it is made for. Of its longest one the table of positions may be used up,
    # which some ask about. The program is for any number of tokens all the same, as no op but attention looks at more
    # than one.
    longest = max(own_context_length(model.config) - 1, _LEAST_LONGEST)
    try:
        with (
            torch.no_grad(),
            _no_stack_traces(),
            capturing(model, whole_texts=whole_texts) as attention,
            replaced_recurrences(model),
            watching(layers, longest) as token_count,
            warnings.catch_warnings(),
        ):
            # torch copies tree specs in a way that it has deprecated itself; nobody exporting a model can change that.
            warnings.filterwarnings("ignore", message=".*treespec, LeafSpec", category=FutureWarning)
            shapes = _dynamic_shapes(captured, longest)
            exported = torch.export.export(step, _example(captured), dynamic_shapes=shapes, strict=False)
            exported = make_functional(exported)
    except UnsupportedModelError:
        raise
    except (UserError, TorchDynamoException, RuntimeError, ValueError, TypeError, AttributeError, LookupError) as e:
        where = _module_of(e, model)
        if culprit := token_count.culprit():
            raise UnsupportedModelError(
                f"{name}: {culprit}, which can be any",
                hint="Chunks, tables of positions, and recurrences without a kernel function can't be compiled.",
            ) from e
        if AttentionMask.__name__ in str(e):
            raise UnsupportedModelError(
                f"{name}: {where} applies the mask itself, outside transformers' attention interface",
                hint="Only models that attend through that interface can be compiled.",
            ) from e
        raise UnsupportedModelError(
            f"{name}: {where} can't be traced with packed tokens and any number of them: "
            f"{type(e).__name__}: {_first_line(e)}",
            hint="Models whose operations depend on token values or lengths can't be compiled.",
        ) from e
    program = from_exported(
        exported,
        {**_computed(exported), **weights},
        module_prefix=_PREFIX,
        symbols=_symbols(exported, captured),
    )
    _remove_checks(program)
    replace_written_out_attention(program, attention, longest)
    read_given_positions(program, longest)
    if whole_texts:
        drop_masks_of_all(program, longest)
        drop_whole_selections(program)
    _check_ops(program)
    check_token_independence(program)
    _check_every_layer_attends(model, attention)
    return program


def _example(captured: Sequence[str]) -> tuple[torch.Tensor, ...]:
    """Returns arrays of a small step with which the model is traced: one for each name in ``captured``, in that order.

    An array of cache groups occurs once, because layers are divided into groups later.
    """
    sizes = (_TOKENS, _REQUESTS, _ROWS, _BLOCKS)
    arrays = {name: torch.zeros(PORTS[name].sizes(*sizes), dtype=torch.int32) for name in captured}
    arrays[POSITIONS] = torch.arange(_TOKENS, dtype=torch.int32)
    return tuple(arrays.values())


def _dynamic_shapes(captured: Sequence[str], longest: int) -> dict[str, Any]:
    """Returns the dynamic sizes of arrays for torch.export. ``longest``: the maximum number of tokens."""
    B, M, R = (torch.export.Dim(n, min=1, max=2**20) for n in ("B", "M", "R"))
    sizes = {"T": torch.export.Dim("T", min=1, max=longest), "B": B, "B+1": B + 1, "M": M, "R": R}
    return {name: {i: sizes[str(of)] for i, of in enumerate(PORTS[name].shape)} for name in captured}


def _symbols(exported: torch.export.ExportedProgram, captured: Sequence[str]) -> dict[sympy.Symbol, str]:
    """Returns symbol of a size in the traced graph -> the size's letter: T, B, M or R.

    ``captured``: the names of the graph's input arrays. Raises UnsupportedModelError if the model works for one size
    only.
    """
    sizes = {n.name: n.meta["val"].shape for n in exported.graph.nodes if n.op == "placeholder"}
    symbols: dict[sympy.Symbol, str] = {}
    for name in captured:
        for letter, size in zip(PORTS[name].shape, sizes[name], strict=True):
            if letter not in ("T", "B", "M", "R"):
                continue
            if isinstance(size, int) or not isinstance(size.node.expr, sympy.Symbol):
                raise UnsupportedModelError(f"the model works for one size of {letter} only ({size})")
            symbols[size.node.expr] = letter
    return symbols


def _computed(exported: torch.export.ExportedProgram) -> dict[str, WeightExpr]:
    """Returns buffers and constants that the model computes itself and no checkpoint has."""
    of_graph = exported.graph_signature
    names = [
        *of_graph.inputs_to_lifted_tensor_constants.values(),
        *of_graph.inputs_to_buffers.values(),
    ]
    weights: dict[str, WeightExpr] = {}
    for name in names:
        value = exported.constants[name] if name in exported.constants else exported.state_dict[name]
        assert isinstance(value, torch.Tensor)
        short = name.removeprefix(_PREFIX)
        weights[short] = Source(f"{COMPUTED}{short}", tuple(value.shape), value.dtype, value.detach)
    return weights


def _check_every_layer_attends(model: PreTrainedModel, capture: AttentionCapture) -> None:
    """Raises UnsupportedModelError unless attention was called through the interface as often as there are layers.

    It finds layers that were never called; other checks ensure that nothing else combines tokens. Layers that are run
    several times under one number count as often as they attend.
    """
    layers = capture.model_layers
    missing = sorted(set(range(layers)) - set(capture.layers) - capture.called)
    if layers and (not missing or len(capture.layers) >= layers):
        return
    if not layers:
        raise UnsupportedModelError(
            f"{architecture(model.config)} doesn't say how many layers it has (num_hidden_layers)",
            hint="Only decoders that do can be compiled: each layer must be seen to attend.",
        )
    where = f"layer {missing[0]}"
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == layers:
            inner = (n for n, m in module[missing[0]].named_modules() if getattr(m, "layer_idx", None) is not None)
            where = ".".join(p for p in (path, str(missing[0]), next((n for n in inner if n), "")) if p)
            break
    raise UnsupportedModelError(
        f"{architecture(model.config)}: {where} mixes tokens without calling transformers' attention interface",
        hint="Only models all of whose layers attend through that interface can be compiled.",
    )


def _remove_checks(program: Program) -> None:
    for node in reversed(list(program.graph.nodes)):
        if node.op == "call_function" and node.target in _CHECKS:
            program.graph.erase_node(node)
    program.remove_dead_code()


def _check_ops(program: Program) -> None:
    """Raises UnsupportedModelError, naming op and module, for an op of another library, whose meaning isn't known."""
    for node in program.graph.nodes:
        target = node.target
        if isinstance(target, torch._ops.OpOverload) and target.namespace not in ("aten", "ew"):
            raise UnsupportedModelError(
                f"{join_where(w for w in node.meta[WHERE] if w) or 'the model'}: {target} isn't an op of torch",
                hint="Models with ops of their own can't be compiled.",
            )


def _module_of(error: BaseException, model: torch.nn.Module) -> str:
    """Returns the path of the innermost module that was running when ``error`` was raised."""
    paths = {id(module): path for path, module in model.named_modules()}
    module_path, frame = "", error.__traceback__
    while frame is not None:
        module_path = paths.get(id(frame.tb_frame.f_locals.get("self")), "") or module_path
        frame = frame.tb_next
    return module_path or "the model"


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), "")
