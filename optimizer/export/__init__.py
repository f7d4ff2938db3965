"""``optimize export``: a model becomes a bundle, stage by stage."""

from importlib.util import find_spec

from .run import export, export_to_keep, find_kept

__all__ = ["export", "export_to_keep", "find_kept"]

for _package in ("torch", "transformers", "safetensors", "gguf"):
    if find_spec(_package) is None:  # told before arguments are looked at: no export can work
        raise ModuleNotFoundError(f"No module named {_package!r}", name=_package)
