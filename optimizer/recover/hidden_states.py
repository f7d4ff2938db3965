"""The residual stream of the source and of the program at the inputs of norms, which a recovery can compare.

Norms are matched by provenance: a norm of the program belongs to a module of the source, also if layers between were
removed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx.node import Node, Target
from transformers import PreTrainedModel

from enginewright.passes.framework.match import bound_arguments
from enginewright.passes.ir.program import Program
from enginewright.passes.ir.provenance import WHERE
from enginewright.runtime.shared.errors import RequestError

ew = torch.ops.ew

_NORMS: tuple[Target, ...] = (ew.rms_norm.default, ew.layer_norm.default)
_ADDED: tuple[Target, ...] = (ew.add_rms_norm.default, ew.add_layer_norm.default)
"""Norms of a sum, which is their second result."""


class HiddenStates:
    """The inputs of norms in the source and in the program under training, and the distance between the two.

    Args:
        program: the program; its norms over [T, H] with a weight are compared.
        model: the transformers model of the source.

    Raises:
        RequestError: the two have no such norm in common.
    """

    def __init__(self, program: Program, model: PreTrainedModel) -> None:
        modules = dict(model.named_modules())
        self._places = {node: path for node, path in _norms(program) if path in modules}
        if not self._places:
            raise RequestError(
                "hidden: no norm of this model is one of its source's, so no hidden states can be compared",
                hint="Leave hidden out: logits are always compared.",
            )
        self._modules = {path: modules[path] for path in self._places.values()}
        self._source: dict[str, torch.Tensor] = {}
        self._program: dict[str, torch.Tensor] = {}

    @contextmanager
    def of_source(self, sequences: Sequence[torch.Tensor]) -> Iterator[None]:
        """Records the inputs of the source's norms, for ``loss``, in place of earlier ones.

        Within the context the caller runs the source on ``sequences``, padded to the longest.
        """
        self._source.clear()
        self._program.clear()

        def hook(path: str) -> Any:
            def keep(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                x = args[0] if args else next(iter(kwargs.values()))  # [B, S, H]
                self._source[path] = torch.cat([rows[: len(s)] for rows, s in zip(x, sequences, strict=True)])

            return keep

        handles = [m.register_forward_pre_hook(hook(p), with_kwargs=True) for p, m in self._modules.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def observe(self, node: Node, args: Sequence[Any], value: Any) -> None:
        """Records the input of a call if the call is one of the compared norms. It is called for every call of the
        program.
        """
        path = self._places.get(node)
        if path is not None:
            self._program[path] = value[1] if node.target in _ADDED else args[0]

    def loss(self) -> torch.Tensor:
        """Returns the loss of the hidden states: for each norm, the squared errors of its input, summed over tokens
        and divided by the mean square of the source's input; then the mean over norms.
        """
        terms = []
        for path, computed in self._program.items():
            expected = self._source[path].detach()
            error = (computed - expected).square().mean(-1).sum()
            terms.append(error / expected.square().mean().clamp(min=torch.finfo(torch.float32).tiny))
        return torch.stack(terms).mean()


def _norms(program: Program) -> Iterator[tuple[Node, str]]:
    """Yields the norms over the hidden dimension, with the path of the module of their weight."""
    for node in program.nodes_of(*_NORMS, *_ADDED):
        weight = bound_arguments(node).get("weight")
        x = node.args[0]
        assert isinstance(x, Node)
        if isinstance(weight, Node) and weight.op == "get_attr" and len(program.value(x).shape) == 2:
            yield node, weight.meta[WHERE][0]
