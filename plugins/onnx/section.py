"""The section of an onnx target's manifest: the linear form of its steps."""

from collections.abc import Iterator

from enginewright.runtime.bundle.manifest import TargetManifest

from ..steps.linear_io import LinearIo

SECTIONS = {"io": LinearIo}
ANY_SIZE = True


def made_with(target: TargetManifest) -> Iterator[tuple[str, str]]:
    if (io := target.section(LinearIo)) is not None:
        yield "onnxruntime", io.onnxruntime
