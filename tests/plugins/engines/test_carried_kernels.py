"""Kernels are read by their names, and refused where these don't say what is in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from enginewright.plugins.engines.carried_kernels import read_by_stem
from enginewright.plugins.gpu.compile_ahead import write_kernels
from enginewright.runtime.shared.errors import BundleError
from tests.plugins.engines import tiny_paged as paged


@pytest.mark.parametrize("capability", [80, 120])
def test_a_kernel_is_read_back(tmp_path: Path, capability: int) -> None:
    kernels = paged.compiled(capability, paged.GROUPS[1])
    write_kernels(tmp_path, kernels)
    for kernel in kernels:
        assert read_by_stem(tmp_path, kernel.spec.stem) == kernel


def test_kernels_that_are_not_what_they_say(tmp_path: Path) -> None:
    kernel = paged.compiled(89, paged.GROUPS[0])[0]
    stem = kernel.spec.stem
    with pytest.raises(BundleError, match=rf"{stem}.json: the kernel can't be read: .*No such file"):
        read_by_stem(tmp_path, stem)
    write_kernels(tmp_path, [kernel])
    path = tmp_path / f"{stem}.json"
    text = path.read_text()
    for wrong, message in (
        (text.replace('"warps": 4', '"warps": 8'), "for something else than its name says"),
        (text[:-20], "can't be read"),
        ("[]", "can't be read"),
        ("{}", "can't be read: 'kernel'"),
    ):
        path.write_text(wrong)
        with pytest.raises(BundleError, match=message):
            read_by_stem(tmp_path, stem)
    path.write_text(text)
    path.with_suffix(".cubin").unlink()
    with pytest.raises(BundleError, match="cubin"):
        read_by_stem(tmp_path, stem)
