"""onnxruntime missing, too old, without a provider; options that numbers hang on."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from enginewright.plugins.onnx.kernels.library import operators_library
from enginewright.plugins.onnx.serve import session as onnx_session
from enginewright.plugins.onnx.serve.session import (
    PROVIDERS,
    find_provider,
    load_onnxruntime,
    open_session,
    run_session,
)
from enginewright.runtime.shared.errors import BundleError, CapacityError, MissingDependencyError, RequestError


@pytest.fixture
def module() -> Any:
    return load_onnxruntime()


def test_onnxruntime_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingDependencyError, match=r"can't be loaded: .*\n.*enginewright\[onnx\]"):
        load_onnxruntime()


@pytest.mark.parametrize(
    ("found", "smallest", "fits"),
    [
        ("1.23.2", "1.24.0", False),
        ("1.9.0", "1.24.0", False),
        ("1.24.0", "1.24.0", True),
        ("1.24", "1.24.0", False),
        ("1.31.1+cu13", "1.31.1", True),
        ("1.32.0.dev20261101", "1.31.1", True),
        ("2.0.0", "1.24.0", True),
    ],
)
def test_versions(monkeypatch: pytest.MonkeyPatch, found: str, smallest: str, fits: bool) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", SimpleNamespace(__version__=found))
    if fits:
        assert load_onnxruntime(smallest).__version__ == found
        return
    with pytest.raises(MissingDependencyError, match=f"needs onnxruntime {smallest} or newer.*{found} is installed"):
        load_onnxruntime(smallest)


def test_a_provider_that_there_is_none_of(module: Any) -> None:
    with pytest.raises(RequestError, match=r"there is no 'rocket'\n.*cpu, cuda, tensorrt-rtx, directml, openvino"):
        find_provider("rocket", module)


def test_a_provider_that_is_not_installed() -> None:
    plain = SimpleNamespace(__version__="1.31.1", get_available_providers=lambda: ["CPUExecutionProvider"])
    assert find_provider("cpu", plain) is PROVIDERS["cpu"]  # type: ignore[arg-type]
    message = r"no CUDAExecutionProvider; it has CPUExecutionProvider\n.*onnxruntime-gpu .*take provider cpu"
    with pytest.raises(MissingDependencyError, match=message):
        find_provider("cuda", plain)  # type: ignore[arg-type]


def _fake(module: Any, session: Any) -> Any:
    """onnxruntime with another way to open a session."""
    names = ("SessionOptions", "ExecutionMode", "GraphOptimizationLevel", "__version__")
    return SimpleNamespace(
        __name__="onnxruntime", InferenceSession=session, **{name: getattr(module, name) for name in names}
    )


def test_a_provider_that_does_not_start(module: Any) -> None:
    def fall_back(path: str, options: object, providers: list[str]) -> object:
        assert providers == ["CUDAExecutionProvider", "CPUExecutionProvider"]
        return SimpleNamespace(get_providers=lambda: ["CPUExecutionProvider"])

    with pytest.raises(MissingDependencyError, match="CUDAExecutionProvider is installed and doesn't start"):
        open_session(Path("model.onnx"), PROVIDERS["cuda"], 1, _fake(module, fall_back))


def test_what_numbers_hang_on_is_said(module: Any) -> None:
    seen = {}

    def keep(path: str, options: Any, providers: list[str]) -> object:
        seen["options"] = options
        return SimpleNamespace(get_providers=lambda: providers)

    open_session(Path("model.onnx"), PROVIDERS["cpu"], 3, _fake(module, keep))
    options = seen["options"]
    assert options.intra_op_num_threads == 3
    assert options.inter_op_num_threads == 1
    assert options.get_session_config_entry("session.qdq_matmulnbits_accuracy_level") == "1"
    assert not options.enable_mem_pattern


@pytest.mark.parametrize("opening", [True, False])
def test_memory_runs_out(module: Any, opening: bool) -> None:
    from onnxruntime.capi.onnxruntime_pybind11_state import RuntimeException

    def fail(*_: object, **__: object) -> None:
        raise RuntimeException("Failed to allocate memory for requested buffer of size 123\nmore")

    with pytest.raises(CapacityError, match="Failed to allocate memory for requested buffer of size 123\n"):
        if opening:
            open_session(Path("model.onnx"), PROVIDERS["cpu"], 1, _fake(module, fail))
        else:
            run_session(SimpleNamespace(run_with_iobinding=fail), None, None, module)


def test_operators_that_do_not_load(module: Any, tmp_path: Path) -> None:
    operators = tmp_path / "operators.so"
    message = r"operators\.so: onnxruntime .* can't load these operators: .*\n.*--force-reinstall enginewright"
    for data in (None, b"no library"):
        if data is not None:
            operators.write_bytes(data)
        with pytest.raises(MissingDependencyError, match=message):
            open_session(tmp_path / "none.onnx", PROVIDERS["cpu"], 1, module, operators=operators)


def test_operators_run_on_the_sessions_threads(module: Any) -> None:
    def keep(path: str, options: Any, providers: list[str]) -> object:
        assert options.get_session_config_entry("enginewright.threads") == str(options.intra_op_num_threads) == "3"
        return SimpleNamespace(get_providers=lambda: providers)

    open_session(Path("model.onnx"), PROVIDERS["cpu"], 3, _fake(module, keep), operators=operators_library())


def test_a_file_that_is_not_there(module: Any, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"none\.onnx: onnxruntime .* can't load it"):
        open_session(tmp_path / "none.onnx", PROVIDERS["cpu"], 1, module)


def test_nothing_else_loads_it() -> None:
    """A machine without onnxruntime can thus run the cpu target."""
    assert "onnxruntime" not in vars(onnx_session)
