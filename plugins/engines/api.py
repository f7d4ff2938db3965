"""The Python interface that TensorRT and TensorRT-RTX have in common, as protocols. Neither library is imported."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import tensorrt


class ContextApi(Protocol):
    """The methods of the library's ``IExecutionContext`` that we use."""

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool: ...

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool: ...

    def set_tensor_address(self, name: str, memory: int) -> bool: ...

    def set_device_memory(self, memory: int, size: int) -> None: ...

    def infer_shapes(self) -> list[str]: ...

    def execute_async_v3(self, stream_handle: int) -> bool: ...


class Sizes(Protocol):
    """The sizes of a tensor: the library's ``Dims``, or a list."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class EngineApi(Protocol):
    """The methods of the library's ``ICudaEngine`` that we use."""

    @property
    def num_io_tensors(self) -> int: ...

    @property
    def num_optimization_profiles(self) -> int: ...

    @property
    def device_memory_size_v2(self) -> int: ...

    def get_tensor_name(self, index: int) -> str: ...

    def get_tensor_mode(self, name: str) -> Any: ...

    def get_tensor_dtype(self, name: str) -> Any: ...

    def get_tensor_shape(self, name: str) -> Sizes: ...

    def create_runtime_config(self) -> Any: ...

    def create_execution_context(self, runtime_config: Any) -> Any: ...


if TYPE_CHECKING:

    def _protocols_hold(engine: tensorrt.ICudaEngine, context: tensorrt.IExecutionContext) -> None:
        """Checked by mypy against the stubs of the real bindings; never called."""
        _engine: EngineApi = engine
        _context: ContextApi = context
