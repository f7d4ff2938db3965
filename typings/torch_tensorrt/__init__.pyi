# What is called of torch_tensorrt, with the signatures of its version 2.14; it comes with CUDA alone.
from collections.abc import Sequence
from typing import Any, Literal

import torch

from . import dynamo as dynamo

__version__: str

class Input:
    def __init__(
        self,
        *,
        min_shape: tuple[int, ...],
        opt_shape: tuple[int, ...],
        max_shape: tuple[int, ...],
        dtype: torch.dtype = ...,
        name: str = ...,
    ) -> None: ...

def save(
    module: Any,
    file_path: str = "",
    *,
    output_format: Literal["exported_program", "torchscript", "aot_inductor", "executorch"] = "exported_program",
    arg_inputs: Sequence[torch.Tensor | Input] | None = None,
    retrace: bool = True,
    dynamic_shapes: dict[str, Any] | tuple[Any, ...] | None = None,
) -> None: ...
