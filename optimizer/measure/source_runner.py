"""Runs the source model in transformers: its own ``forward``, eager attention, masks and experts, in float32.

Files are read as for an export: nothing is downloaded, and no code of the model's folder runs. The computation shares
no code with capture or with passes.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from enginewright.optimizer.capture import build_from_source, module
from enginewright.optimizer.capture.freeze_rope import freeze_rope
from enginewright.optimizer.capture.model_source import AnySource, ModelSource
from enginewright.optimizer.shared.export_records import SourceSpeed
from enginewright.passes.ir.weights import Cast, WeightExpr
from enginewright.runtime.shared.contracts import FloatArray
from enginewright.runtime.shared.errors import UnsupportedModelError
from enginewright.runtime.shared.progress import Progress, ProgressEvent, silent

from .lazy_weights import bring_weights_lazily, held, load_weights, placeholder

KEEP_BYTES = 1 << 30
"""The most bytes of a model's weights, as float32, that are read once and kept in memory.

They include the logits of ``ROWS`` tokens, of the source and of the model that is compared with it. Weights of larger
models are read at each use.
"""

ROWS = 64
"""The number of tokens whose logits are compared at a time."""

_TIMED_CONTEXT, _TIMED_SECONDS = 32, 0.4
"""The tokens in the cache of timed decode steps, and the seconds of timing with each number of threads."""
_LEAST_TIMED = 20_000_000
"""The fewest parameters of a model that is timed. Smaller models are for tests."""


class SourceRunner:
    """A source model that computes logits: a Hugging Face directory or GGUF file, with adapters, or a transformers
    model.

    If the weights and logits take more than ``keep_bytes``, only the weights of the running module are in memory. A
    model object isn't changed: a copy of its modules runs in eval mode, on the same parameters.

    With ``context_length``, rotary frequencies that depend on the context's length are computed for that length.

    Attributes:
        model: the transformers model that runs; callers read its configuration.
        keeps_weights: True if the weights are in memory, False if each step reads them.

    Raises:
        SourceError, UnsupportedModelError: as for an export.
    """

    def __init__(self, source: AnySource, *, context_length: int | None = None, keep_bytes: int = KEEP_BYTES) -> None:
        self.model, weights = _read(ModelSource.of(source))
        if context_length is not None:
            freeze_rope(self.model, context_length)
        self.model.eval()
        self._kept: Mapping[str, WeightExpr] = {}
        self.keeps_weights = weight_bytes(self.model) + logit_bytes(self.model) <= keep_bytes
        if self.keeps_weights:
            load_weights(self.model, weights)
            self._kept = weights
        else:
            bring_weights_lazily(self.model, weights)

    def logits(self, ids: torch.Tensor, progress: Progress = silent, detail: str = "") -> FloatArray:
        """Returns the logits after every token of B sequences of S tokens: [B, S] -> [B, S, V] float32.

        ``progress`` is called with the stage "measure" and ``detail`` after each module that has weights.
        """
        with torch.inference_mode(), _reported(self.model, progress, detail):
            logits: torch.Tensor = self.model(input_ids=ids, use_cache=False).logits
        result: FloatArray = logits.float().numpy()
        return result

    @contextmanager
    def logits_of_rows(self, ids: torch.Tensor) -> Iterator[Callable[[slice], FloatArray]]:
        """Yields a function that computes the logits [n, V], float32, of a slice of the rows of one sequence ``ids``
        [1, S].

        The layers run once, and the output projection once per slice. For a model whose ``forward`` has no
        ``logits_to_keep``, the logits of all rows are computed at once.
        """
        base = self.model.base_model
        head = self.model.get_output_embeddings()
        parameters = inspect.signature(self.model.forward).parameters
        if base is self.model or head is None or "logits_to_keep" not in parameters:
            whole = self.logits(ids)[0]
            yield lambda rows: whole[rows]
            return
        forward, override = base.forward, vars(base).get("forward")  # own: somebody has given this model another one
        outputs: list[Any] = []

        def once(*args: Any, **options: Any) -> Any:
            if not outputs:
                outputs.append(forward(*args, **options))
            return outputs[0]

        def of_rows(rows: slice) -> FloatArray:
            positions = torch.arange(*rows.indices(ids.shape[1]))
            with torch.inference_mode():
                logits: torch.Tensor = self.model(input_ids=ids, use_cache=False, logits_to_keep=positions).logits
            result: FloatArray = logits[0].float().numpy()
            return result

        base.forward = once
        try:
            with held(head):
                yield of_rows
        finally:
            del base.forward
            if override is not None:
                base.forward = override

    def speed(self, context_length: int) -> SourceSpeed | None:
        """Measures the decode speed with all threads and with one thread, for about a second, and returns the faster.

        On a busy machine one thread may be faster. Returns None if the weights aren't in memory (reading them would be
        timed too), if the model has no KV cache, if the context is too short, or if the model is tiny.
        """
        if not self.keeps_weights or weight_bytes(self.model) < 4 * _LEAST_TIMED or context_length <= _TIMED_CONTEXT:
            return None
        ids = torch.ones(1, _TIMED_CONTEXT, dtype=torch.long)
        with torch.inference_mode():
            cache = getattr(self.model(input_ids=ids, use_cache=True), "past_key_values", None)
            if cache is None:
                return None
            threads, timings = torch.get_num_threads(), list[tuple[float, int]]()
            try:
                for count in sorted({threads, 1}):
                    torch.set_num_threads(count)
                    begin, times = time.perf_counter(), list[float]()
                    while not times or time.perf_counter() - begin < _TIMED_SECONDS:
                        start = time.perf_counter()
                        self.model(input_ids=ids[:, :1], past_key_values=cache, use_cache=True)
                        times.append(time.perf_counter() - start)
                    timings.append((min(times), count))
            finally:
                torch.set_num_threads(threads)
        seconds, count = min(timings)
        return SourceSpeed(count, _TIMED_CONTEXT, round(1 / seconds, 3))

    def kept_weights(self) -> Iterator[tuple[WeightExpr, torch.Tensor]]:
        """Yields the expression and the value of each weight that is kept in memory."""
        for name, parameter in self.model.named_parameters():
            if name in self._kept:
                yield self._kept[name], parameter.data


def has_interface(model: PreTrainedModel) -> bool:
    """Returns True if the model calls attention through transformers' interface, which allows to replace it."""
    return bool(model._can_set_attn_implementation())


def weight_bytes(model: torch.nn.Module) -> int:
    """Returns the size in bytes of a model's parameters as float32; tied parameters count once."""
    return sum(4 * math.prod(p.shape) for p in model.parameters())


def logit_bytes(model: PreTrainedModel) -> int:
    """Returns the size in bytes of the float32 logits of ``ROWS`` tokens, twice: the source's and the compared
    program's.
    """
    return 2 * 4 * ROWS * int(getattr(model.config.get_text_config(), "vocab_size", 0))


@contextmanager
def _reported(model: torch.nn.Module, progress: Progress, detail: str) -> Iterator[None]:
    """Calls ``progress`` after each run of a module with weights, as ``SourceRunner.logits`` says.

    A module may run several times, and an expert not at all: the number of modules that ran is at most that of modules.
    """
    modules = [module for module in model.modules() if next(module.parameters(recurse=False), None) is not None]
    count = itertools.count(1)

    def ran(*_: object) -> None:
        progress(ProgressEvent("measure", min(next(count), len(modules)), len(modules), detail))

    hooks = [module.register_forward_hook(ran) for module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _read(source: ModelSource) -> tuple[PreTrainedModel, Mapping[str, WeightExpr]]:
    return _copy(source.model_object) if source.path is None else build_from_source(source, eager=True)


def _copy(model: PreTrainedModel) -> tuple[PreTrainedModel, Mapping[str, WeightExpr]]:
    """Returns a copy of a model's modules, with copied buffers and placeholders for parameters, and the weights by
    name.

    The modules are copied, not built anew from the configuration, because a caller may have changed some of them.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    memo: dict[int, object] = {id(p): placeholder(p) for p in parameters.values()}
    try:
        twin = copy.deepcopy(model, memo)
    except (TypeError, RuntimeError, NotImplementedError) as e:
        raise UnsupportedModelError(
            f"{type(model).__name__}: its modules can't be copied: {e}",
            hint="Save the model with save_pretrained(), and export the directory.",
        ) from e
    if has_interface(twin):
        twin.set_attn_implementation("eager")
    twin.set_experts_implementation("eager")
    for buffer in twin.buffers():
        buffer.data = buffer.data.cpu().float() if buffer.is_floating_point() else buffer.data.cpu()
    tensors = module.read_module_tensors(model)
    weights = {name: tensors[name] for name in parameters}
    return twin, {name: e if e.dtype == torch.float32 else Cast(e, torch.float32) for name, e in weights.items()}
