"""A process with TensorRT's Python bindings over empty libraries: enough to register plugins, not to build.

The bindings (tensorrt-cu13-bindings) are what TensorRT's own wheel holds; the libraries need a download that this
repository does without. They export the functions that the bindings look for as they are imported.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest

from tests.plugins.tensorrt import symbolic

LIBRARIES = ("libnvinfer.so.11", "libnvinfer_plugin.so.11", "libnvonnxparser.so.11")
SYMBOLS = (
    *("createInferBuilder_INTERNAL", "createInferRefitter_INTERNAL", "createInferRuntime_INTERNAL"),
    *("createNvOnnxParserRefitter_INTERNAL", "createNvOnnxParser_INTERNAL", "getBuilderPluginRegistry"),
    *("getNvOnnxParserVersion", "getPluginRegistry", "initLibNvInferPlugins"),
)
PACKAGE = "import sys\n\nimport tensorrt_bindings\n\nsys.modules[__name__] = tensorrt_bindings\n"


def make_libraries(folder: Path) -> None:
    """Empty ones, which the bindings find where ``folder`` is in LD_LIBRARY_PATH."""
    source = folder / "empty.c"
    source.write_text("".join(f"void *{name}(void) {{ return 0; }}\n" for name in SYMBOLS))
    for name in LIBRARIES:
        command = ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", str(folder / name), str(source)]
        subprocess.run(command, check=True)


def make_package(folder: Path) -> None:
    """A package ``tensorrt`` in ``folder``, with its libraries. Skips where something is missing."""
    pytest.importorskip("triton", reason="Triton is not installed: pip install 'enginewright[triton]'")
    if importlib.util.find_spec("tensorrt_bindings") is None:
        pytest.skip("TensorRT's bindings are not installed: pip install tensorrt-cu13-bindings")
    if shutil.which("gcc") is None:
        pytest.skip("there is no gcc to build empty libraries with")
    make_libraries(folder)
    (folder / "tensorrt").mkdir()
    (folder / "tensorrt" / "__init__.py").write_text(PACKAGE)


@contextmanager
def bindings_process(folder: Path) -> Iterator[ProcessPoolExecutor]:
    """The process; ``folder`` takes the libraries. Skips where something is missing."""
    make_package(folder)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        with patch.dict(os.environ, LD_LIBRARY_PATH=str(folder)):
            assert pool.submit(os.getenv, "LD_LIBRARY_PATH").result() == str(folder)
        pool.submit(symbolic.find_packages_in, str(folder)).result()
        yield pool
