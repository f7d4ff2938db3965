"""jaxlib's private interface, which this pins down: what is in place, what is shared, which versions, which plugins."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from enginewright.plugins.stablehlo.serve import pjrt_library
from enginewright.plugins.stablehlo.serve.pjrt_library import Pjrt, is_tested, load_jaxlib, plugins
from enginewright.plugins.steps.host_arrays import aligned, in_place
from enginewright.runtime.shared.errors import BundleError, MissingDependencyError, TargetError

pytest.importorskip("jaxlib", reason="jaxlib is not installed: pip install 'enginewright[stablehlo]'")

WRITES = """module @step {
  func.func public @main(%a: tensor<2x16xf32> {tf.aliasing_output = 1 : i32}, %b: tensor<16xf32>) -> (tensor<f32>, tensor<2x16xf32>) {
    %0 = stablehlo.broadcast_in_dim %b, dims = [1] : (tensor<16xf32>) -> tensor<2x16xf32>
    %1 = stablehlo.add %a, %0 : tensor<2x16xf32>
    %2 = stablehlo.constant dense<3.0> : tensor<f32>
    return %2, %1 : tensor<f32>, tensor<2x16xf32>
  }
}"""  # noqa: E501


@pytest.fixture(scope="module")
def pjrt() -> Pjrt:
    return Pjrt("cpu", 1)


def test_a_donated_part_of_an_array_is_written_in_place_again_and_again(pjrt: Pjrt) -> None:
    """Caches work like this: one array, of which a run takes some rows, and its results are the next run's input."""
    executable = pjrt.compile(WRITES.encode(), "test")
    memory, added = aligned((5, 16), np.float32), in_place(np.arange(16, dtype=np.float32))
    other = pjrt.view(added)
    views = [pjrt.view(memory[2:4], donated=True)]
    for _ in range(50):
        number, *views = pjrt.run(executable, [*views, other])
        assert views[0].unsafe_buffer_pointer() == memory[2:].ctypes.data
    assert float(pjrt.array(number)) == 3
    # The same rows by another view, while the results of the first are still there.
    pjrt.run(executable, [pjrt.view(memory[3:5], donated=True), other])
    del views
    expected = np.zeros((5, 16)) + np.asarray([0, 0, 50, 51, 1])[:, None] * np.arange(16)
    np.testing.assert_array_equal(memory, expected)
    np.testing.assert_array_equal(added, np.arange(16))


def test_what_is_not_donated_is_left_alone(pjrt: Pjrt) -> None:
    executable = pjrt.compile(WRITES.encode(), "test")
    memory = aligned((2, 16), np.float32)
    _, result = pjrt.run(executable, [pjrt.view(memory), pjrt.view(in_place(np.ones(16, np.float32)))])
    assert result.unsafe_buffer_pointer() != memory.ctypes.data
    assert not memory.any() and pjrt.array(result).all()


def test_memory_that_is_read_only_is_shared(pjrt: Pjrt) -> None:
    array = aligned((4, 16), np.float32)
    array.flags.writeable = False
    assert in_place(array) is array
    assert pjrt.view(array).unsafe_buffer_pointer() == array.ctypes.data
    odd = np.zeros(65, np.uint8)[1:]
    assert in_place(odd).ctypes.data % 64 == 0


def test_what_is_no_module(pjrt: Pjrt) -> None:
    for content in (b"", b"garbage", WRITES[:200].encode()):
        with pytest.raises(BundleError, match=r"^a file: jaxlib 0\.10\.\d+ can't compile it: \S"):
            pjrt.compile(content, "a file")


def test_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_tested("0.10.2") and is_tested("0.10.0.dev1") and not is_tested("0.1.0") and not is_tested("0.11.0")
    monkeypatch.setattr(pjrt_library.metadata, "version", lambda name: "0.11.0")
    with pytest.raises(MissingDependencyError, match=r"tested with, and 0\.11\.0 is installed") as raised:
        load_jaxlib()
    assert "pip install 'jaxlib==0.10.*'" in str(raised.value.hint)

    def missing(name: str) -> str:
        raise pjrt_library.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(pjrt_library.metadata, "version", missing)
    with pytest.raises(MissingDependencyError, match="is not installed"):
        load_jaxlib()


def test_plugins_are_found_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TargetError, match=r"there is no PJRT plugin 'rocket' installed; there is cpu"):
        Pjrt("rocket", 1)
    folder = tmp_path / "jax_plugins" / "rocket"
    folder.mkdir(parents=True)
    (folder / "pjrt_rocket.so").write_bytes(b"no library")
    (tmp_path / "jax_plugins" / "python_only").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert plugins() == {"rocket": folder / "pjrt_rocket.so"}
    with pytest.raises(TargetError, match=r"PJRT plugin 'rocket' \(pjrt_rocket\.so\) doesn't start"):
        Pjrt("rocket", 1)


def test_neither_jax_nor_torch_is_imported_and_the_environment_is_left_alone() -> None:
    probe = (
        "import os, sys\nbefore = dict(os.environ)\n"
        "from enginewright.plugins.stablehlo.serve.pjrt_library import Pjrt\nPjrt('cpu', 1)\n"
        "assert dict(os.environ) == before\nprint({'jax', 'torch', 'scipy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", probe], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "set()"
    assert "Device" not in done.stderr  # nothing of XLA's log
