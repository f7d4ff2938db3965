"""A pass: counts the products with a weight, for the report. A real one would rewrite them."""

from __future__ import annotations

import torch

from enginewright.passes.framework.base import Pass, PassContext, PassResult
from enginewright.passes.ir.program import Program


class CountLinears(Pass):
    """Counts linears; changes nothing."""

    name = "count_linears"
    after = "fuse_gate_up"  # which pass of the pipeline it follows
    exact = True  # nothing but rounding may differ after it; the export measures that

    def call(self, program: Program, context: PassContext) -> PassResult:
        return PassResult(matched=len(list(program.nodes_of(torch.ops.ew.linear.default))))
