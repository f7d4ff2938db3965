"""A ``tensorrt`` that builds: TensorRT's own bindings, whose networks are computed in numpy.

Types, enumerations and plugins are those of the bindings (tensorrt-cu13-bindings); builders and engines, which need the
library, are here, and networks in numpy_network.py.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import numpy as np

from tests.plugins.engines.fake_tensorrt import MODELS, SCRATCH_BYTES, Model, fake_tensorrt
from tests.plugins.gpu.fake_driver import FakeCuda
from tests.plugins.tensorrt.compile.numpy_network import NUMPY, Network, PluginLayer, Tensor, ints
from tests.plugins.tensorrt.symbolic import Expression

BUILT: list[Network] = []
"""Networks that engines were built of, in order."""


class _Profile:
    def __init__(self) -> None:
        self.shapes: dict[str, list[list[int]]] = {}

    def set_shape(self, name: str, least: Any, best: Any, most: Any) -> None:
        assert name not in self.shapes
        self.shapes[name] = [list(ints(dims)) for dims in (least, best, most)]


class _Config:
    def __init__(self) -> None:
        self.profiles: list[_Profile] = []
        self.features: set[Any] = set()

    def set_preview_feature(self, feature: Any, on: bool) -> None:
        assert on
        self.features.add(feature)

    def add_optimization_profile(self, profile: _Profile) -> int:
        ordered = all(a <= b <= c for s in profile.shapes.values() for a, b, c in zip(*s, strict=True))
        if not ordered:
            return -1
        self.profiles.append(profile)
        return len(self.profiles) - 1


class _Builder:
    """``copies``: whether it puts copies of what is aliased into the engines' own memory."""

    def __init__(self, trt: Any, cuda: FakeCuda, copies: bool, log: Any) -> None:
        assert isinstance(log, trt.ILogger)
        self.trt, self.cuda, self.copies, self.log = trt, cuda, copies, log

    def create_network(self, flags: int) -> Network:
        assert flags == 1 << int(self.trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
        return Network(self.trt, self.cuda)

    def create_builder_config(self) -> _Config:
        return _Config()

    def create_optimization_profile(self) -> _Profile:
        return _Profile()

    def build_serialized_network(self, network: Network, config: _Config) -> bytes | None:
        network.settle()
        (profile,) = config.profiles
        plugins = [layer for layer in network.layers if isinstance(layer, PluginLayer)]
        feature = self.trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03
        if any(max(layer.aliased) >= 0 for layer in plugins) and feature not in config.features:
            self.log.log(self.log.Severity.ERROR, "aliased plugin I/O without its preview feature")
            return None
        free = {t.name for t in network.inputs if any(isinstance(n, str) for n in t.letters)}
        assert free == set(profile.shapes), "sizes of every input that has free ones"
        for layer in plugins:
            layer.choose()
        scratch = SCRATCH_BYTES
        if self.copies:
            of = [t for t in network.inputs if t.name.startswith(("k_cache", "v_cache"))]
            scratch += sum(int(np.prod(profile.shapes[t.name][2])) * NUMPY[t.dtype.name]().itemsize for t in of)
        key = f"built {len(BUILT)}".encode()
        BUILT.append(network)

        def described(tensor: Tensor, letters: Sequence[int | str]) -> Any:
            return tensor.dtype.name, tuple("B + 1" if n == "B+1" else n for n in letters)

        inputs = {t.name: described(t, t.letters) for t in network.inputs}
        outputs = {t.name: described(t, [n if n >= 0 else "?" for n in ints(t.shape)]) for t in network.outputs}
        aliases = {t.name: network.alias_of(t) for t in network.outputs}
        MODELS[key] = Model(inputs, outputs, network.compute, scratch, {k: v for k, v in aliases.items() if v})
        return b"numpy".ljust(64, b" ") + key


class _Registry:
    def __init__(self) -> None:
        self.creators: dict[tuple[str, str], Any] = {}

    def register_creator(self, creator: Any, namespace: str) -> bool:
        self.creators[creator.name, namespace] = creator
        return True

    def get_creator(self, name: str, version: str, namespace: str) -> Any:
        assert version == "1"
        return self.creators[name, namespace]


def install(cuda: FakeCuda, profiles: Mapping[int, Any], *, copies: bool = False) -> Any:
    """Makes it what ``import tensorrt`` gives in this process, and gives it. ``profiles``: of engines as they load."""
    import tensorrt_bindings as real

    if isinstance(trt := sys.modules.get("tensorrt"), ModuleType) and hasattr(trt, "made_of_numpy"):
        module = trt  # plugins keep to the first
    else:
        module = ModuleType("tensorrt")
        module.__dict__.update({k: v for k, v in vars(real).items() if k not in ("__spec__", "__name__")})
        module.__spec__ = ModuleSpec("tensorrt", None, is_package=True)
        module.__path__ = real.__path__
        registry = _Registry()
        names = {
            "made_of_numpy": True,
            "ITensor": Tensor,
            "Weights": lambda dtype, address, count: (dtype, address, count),
            "IDimensionExpr": Expression,
            "DimsExprs": lambda rank: [None] * rank,
            "get_plugin_registry": lambda: registry,
        }
        module.__dict__.update(names)
        sys.modules["tensorrt"] = module
        from tensorrt.plugin._tensor import SymInt32

        SymInt32.__call__ = lambda self: self._expr
    runs = fake_tensorrt(cuda, dict(profiles), name="tensorrt", version=str(real.__version__))
    for name in ("Runtime", "TensorIOMode", "ExecutionContextAllocationStrategy"):
        setattr(module, name, getattr(runs, name))
    module.Builder = lambda log: _Builder(module, cuda, copies, log)
    return module
