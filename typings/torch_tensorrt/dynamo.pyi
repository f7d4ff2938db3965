from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram

def compile(  # noqa: A001  its name there
    exported_program: ExportedProgram,
    inputs: Sequence[Sequence[Any]] | None = None,
    *,
    arg_inputs: Sequence[Any] | None = None,
    device: torch.device | str | None = None,
    disable_tf32: bool = False,
    torch_executed_ops: Collection[Any] | None = None,
) -> torch.fx.GraphModule: ...
