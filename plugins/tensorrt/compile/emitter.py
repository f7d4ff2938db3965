"""The emitter of the tensorrt target: it writes everything from which engines are built on a machine with TensorRT and
a GPU.
"""

from __future__ import annotations

from enginewright.passes.ir.program import Program
from enginewright.plugins.gpu.recipe import MOST_BLOCKS, EnginesSection
from enginewright.runtime.bundle.manifest import TargetManifest, target_folder
from enginewright.runtime.shared.contracts import KV_BLOCK_SIZE
from enginewright.runtime.shared.progress import Progress, ProgressEvent

from ...emit.base import EmitOptions
from ...emit.bundle_writer import BundleWriter
from ...engines.emit_kernels import emit_attention_kernels, emit_sampling_kernels
from ...engines.emitter import EnginesEmitter
from ...engines.gpus import KERNELS_FOR, check_kernels
from ...engines.section import TensorRtSection
from ...gpu.formats import check_formats
from ...gpu.tiles import SPLIT_KEYS, number_of
from ...steps.paged_section import (
    KERNELS_FOLDER,
    NETWORK_FILE,
    PagedProfile,
    PagedSection,
)

LIBRARY = "11.4"
"""The smallest version of TensorRT. It is the version of the bindings with which the plugins were checked."""

_REQUESTS, _PROMPTS, _CHUNK = 16, 4, 512
_USUAL_REQUESTS, _USUAL_CHUNK, _USUAL_POOL = 4, 128, 1024


class TensorRtEmitter(EnginesEmitter):
    """Writes the network's description, its weights, and the kernels of the plugins for each kind of GPU."""

    name = "tensorrt"

    def emit(
        self, program: Program, writer: BundleWriter, progress: Progress, options: EmitOptions = EmitOptions()
    ) -> TargetManifest:
        """Writes the network, its weights and kernels. Implements `Emitter.emit`.

        It also raises MissingDependencyError if onnx or triton is missing.
        """
        capabilities, floats = options.engines.gpus or KERNELS_FOR, options.engines.dtype or "f16"
        check_kernels(capabilities)
        check_formats(capabilities, (floats,))
        profiles = profiles_of(options.engines, options.context_length)
        self.check_packages(
            ("onnx", "triton"),
            "writing it",
            "Install it with: pip install {} (or 'enginewright[tensorrt]', with TensorRT itself)",
        )
        from ...graphs.emit_model import summed_products
        from ...graphs.weights import ExternalWeights
        from .describe_network import describe_network  # only this target, and the onnx target, need the package

        total, folder = len(program.weights), target_folder(self.name)
        progress(ProgressEvent("emit", 0, total))
        network = describe_network(program, ExternalWeights(writer, progress, total, suffix=self.name), floats)
        writer.write_text(f"{folder}/{NETWORK_FILE}", network.to_json())
        numbers = [number_of(name) for name in capabilities]
        kernels = f"{folder}/{KERNELS_FOLDER}"
        large = options.engines.large_tiles
        emit_attention_kernels(program, numbers, floats, kernels, writer, progress, for_plugins=True, large_tiles=large)
        emit_sampling_kernels(program, capabilities, kernels, writer, progress)
        return TargetManifest(
            state="needs-build",
            needs=f"TensorRT {LIBRARY} or newer and a GPU of compute capability {' or '.join(capabilities)}",
            sections={
                "tensorrt": TensorRtSection(
                    flavour="tensorrt",
                    compute_capabilities=capabilities,
                    dtype=floats,
                    paged=PagedSection(
                        library=LIBRARY,
                        cache_groups=tuple(group.stored_as(floats) for group in program.cache_groups),
                        profiles=profiles,
                        kernel_capabilities=capabilities,
                        split_keys=SPLIT_KEYS,
                        summed_products=summed_products(program),
                        caches=options.engines.caches,
                    ),
                )
            },
        )


def profiles_of(engines: EnginesSection, context_length: int) -> tuple[PagedProfile, PagedProfile]:
    """Returns the profiles of decode steps, and of prompts together with decodes.

    Raises RecipeError if the recipe's requests are longer than the model's context.
    """
    blocks = -(-(engines.context_within(context_length) or KV_BLOCK_SIZE) // KV_BLOCK_SIZE)
    requests = engines.requests or _REQUESTS
    tokens = max(engines.chunk or _CHUNK, requests)
    prompts = min(max(engines.prompts or _PROMPTS, requests), tokens)
    usual = min(_USUAL_REQUESTS, requests)
    most = engines.blocks or MOST_BLOCKS
    tables, pool = (1, blocks, blocks), (1, min(_USUAL_POOL, most), most)
    return (
        PagedProfile(
            phase="decode", T=(1, usual, requests), B=(1, usual, requests), R=(1, usual, requests), M=tables, P=pool
        ),
        PagedProfile(
            phase="prefill",
            T=(1, min(_USUAL_CHUNK, tokens), tokens),
            B=(1, 1, prompts),
            R=(1, 1, tokens),
            M=tables,
            P=pool,
        ),
    )
