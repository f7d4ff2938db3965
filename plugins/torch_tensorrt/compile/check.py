"""Runs the step of the torch-tensorrt target in PyTorch, only to check it: nothing else in Enginewright runs it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch_tensorrt

import enginewright.passes.ops  # noqa: F401  # the ops that PyTorch runs
from enginewright.runtime.bundle.manifest import target_folder
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.shared.contracts import FloatArray, StepInput
from enginewright.runtime.shared.targets import MEASURED

from . import compile_step
from .emitter import STEP_FILE, read_inputs


class Opened:
    """Runs requests on the target's step for a check. Implements ``plugins.doctor.engine.Runs``.

    A step always has two requests or more.

    Args:
        bundle: a bundle with the target and the cpu target, whose caches have the same groups.
        target: the target's name.
        context: the most tokens of a request.
        tokens: the tokens of each answer.
    """

    def __init__(self, bundle: Bundle, target: str, context: int, tokens: int) -> None:
        folder = bundle.path / target_folder(target)
        loaded = torch.export.load(str(folder / STEP_FILE))
        self._module, self._inputs = loaded.module(), read_inputs(folder)
        nodes = [node for node in loaded.graph.nodes if node.name in loaded.graph_signature.user_inputs]
        self._values = dict(zip(self._inputs, (node.meta["val"] for node in nodes), strict=True))
        self._caches = [name for name in self._inputs if "_cache:" in name]
        self._groups = bundle.program(MEASURED).cache_groups
        self._context, self._tokens = context, tokens

    def logits(self, ids: Sequence[int]) -> FloatArray:
        return self._step([ids] * 2, [0, 0], self._empty(2))[0][: len(ids)]

    def tokens(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        answers: list[list[int]] = [[] for _ in prompts]
        chunks, done, caches = list(prompts), [0] * len(prompts), self._empty(len(prompts))
        for _ in range(self._tokens):
            logits, caches = self._step(chunks, done, caches)
            done = [before + len(chunk) for before, chunk in zip(done, chunks, strict=True)]
            lasts = np.cumsum([len(chunk) for chunk in chunks]) - 1
            chunks = [[int(logits[row].argmax())] for row in lasts]
            for answer, chunk in zip(answers, chunks, strict=True):
                answer += chunk
        return answers

    def info(self) -> dict[str, Any]:
        return {"library": f"torch_tensorrt {torch_tensorrt.__version__}"}

    def _width(self, block_size: int) -> int:
        """Returns the number of blocks in a request's table; at least two, as every size of the step must be."""
        return max(2, -(-self._context // block_size))

    def _empty(self, requests: int) -> list[torch.Tensor]:
        blocks = requests * max(self._width(group.block_size) for group in self._groups)
        shapes = [(blocks, *map(int, self._values[name].shape[1:])) for name in self._caches]
        return [
            torch.zeros(shape, dtype=self._values[name].dtype, device=compile_step.DEVICE)
            for shape, name in zip(shapes, self._caches, strict=True)
        ]

    def _step(
        self, chunks: Sequence[Sequence[int]], done: Sequence[int], caches: Sequence[torch.Tensor]
    ) -> tuple[FloatArray, list[torch.Tensor]]:
        """Runs a step. Returns the logits of all tokens of ``chunks``, [T, V], and the written caches.

        ``chunks`` has the new tokens of each request, ``done`` the number of tokens that its cache has.
        """
        widths = {group.name: self._width(group.block_size) for group in self._groups}
        count = sum(map(len, chunks))
        step = StepInput.packed(
            ids=np.concatenate([np.asarray(chunk, np.int32) for chunk in chunks]),
            counts=[len(chunk) for chunk in chunks],
            kv_len=[before + len(chunk) for before, chunk in zip(done, chunks, strict=True)],
            tables={
                name: np.arange(len(chunks) * width, dtype=np.int32).reshape(-1, width)
                for name, width in widths.items()
            },
            groups=self._groups,
            rows=np.arange(count),
        )
        arrays = {name: torch.from_numpy(np.array(array)) for name, array in step.arrays.items()}
        arrays |= dict(zip(self._caches, caches, strict=True))
        inputs = [arrays[name].to(compile_step.DEVICE, self._values[name].dtype) for name in self._inputs]
        with torch.no_grad():
            logits, *written = self._module(*inputs)
        return logits.float().cpu().numpy(), written
