"""Makes what a peer loads of the models that ``make_models`` left: python -m peers.convert ENGINE FORMAT FOLDER TARGET

Runs with the Python of the peers. ``TARGET`` is there only when it is whole.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from peers.engines import FORMATS, GGUF, Format


def openvino(folder: Path, kind: Format, target: Path) -> None:
    """OpenVINO's own reader of GGUF, which can save what it read."""
    import openvino_genai

    source = folder / f"{GGUF[kind]}.gguf"
    link = target / "model.gguf"
    os.link(source, link)
    openvino_genai.LLMPipeline(str(link), "CPU", enable_save_ov_model=True)
    link.unlink()


def onnxruntime_genai(folder: Path, kind: Format, target: Path) -> None:
    """The model builder: symmetric groups of 32, products of 8-bit integers (accuracy level 4), the head in 8 bits."""
    options = ["accuracy_level=4", "block_size=32", "is_symmetric=true"]
    if kind == "int4":
        options += ["algo_config=rtn_last"]
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(folder / "hf"), "-o", str(target)]
    command += ["-p", kind, "-e", "cpu", "-c", str(folder / "cache"), "--extra_options", *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def ctranslate2(folder: Path, kind: Format, target: Path) -> None:
    """Its converter for Hugging Face folders: 8 bits with a scale for each row."""
    from ctranslate2.converters import TransformersConverter

    TransformersConverter(str(folder / "hf")).convert(str(target), quantization=kind, force=True)


CONVERTERS: dict[str, Callable[[Path, Format, Path], None]] = {
    "openvino": openvino,
    "onnxruntime-genai": onnxruntime_genai,
    "ctranslate2": ctranslate2,
}


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=CONVERTERS)
    parser.add_argument("format", choices=FORMATS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("target", type=Path)
    options = parser.parse_args(arguments)
    if options.target.exists():
        return 0
    unfinished = options.target.with_name(options.target.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    CONVERTERS[options.engine](options.folder, options.format, unfinished)
    os.replace(unfinished, options.target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
