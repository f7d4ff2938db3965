"""The engines: what is installed of each, which formats it has, and what it loads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Format = Literal["int8", "int4", "q4_k_m", "q6_k", "iq4_xs", "q3_k_m", "q2_k", "bf16"]
FORMATS: tuple[Format, ...] = ("int8", "int4", "q4_k_m", "q6_k", "iq4_xs", "q3_k_m", "q2_k", "bf16")
STORED: tuple[Format, ...] = ("q4_k_m", "q6_k", "iq4_xs", "q3_k_m", "q2_k")
"""Types of GGUF files, which engines take as they are stored."""
OURS = "enginewright"
GGUF: Mapping[Format, str] = {"int8": "q8_0", "int4": "q4_0", "bf16": "f16", **{kind: kind for kind in STORED}}
"""The files of a model that llama.cpp loads and OpenVINO converts."""
_AS_STORED: Mapping[Format, str] = dict.fromkeys(STORED, "the file's own blocks")


@dataclass(frozen=True)
class Engine:
    """An engine.

    Attributes:
        name: on the command line and in results.
        title: in tables and charts.
        packages: what pip installs into the peers' environment; ours is in the one that runs.
        module: what can be imported if it is there.
        worker: the module in ``peers.workers``.
        formats: what it has of ours with as many bits a weight, and how the engine calls it.
        model: file or folder in the model's folder, with ``{format}`` and ``{gguf}`` filled in.
        made_by: "make_models", "convert" or "export".
        lacks: tasks that its worker doesn't have.
        limited: the part that ``--isa`` limits to an instruction set: all of it, its products, or nothing.
        built: True if pip compiles it here, where ``CAPS`` can limit its instruction set.
    """

    name: str
    title: str
    packages: tuple[str, ...]
    module: str
    worker: str
    formats: Mapping[Format, str]
    model: str
    made_by: Literal["make_models", "convert", "export"]
    lacks: tuple[str, ...] = ()
    limited: Literal["whole", "products", ""] = ""
    built: bool = False

    def path(self, kind: Format) -> str:
        """The path of the file that it loads, in the model's folder."""
        return self.model.format(format=kind, gguf=GGUF[kind])


ENGINES = {
    engine.name: engine
    for engine in (
        Engine(
            OURS,
            title="Enginewright",
            packages=(),
            module="enginewright",
            worker="ours",
            formats={
                "int8": "recipe int8",
                "int4": "recipe int4",
                "bf16": "recipe bf16",
                **dict.fromkeys(STORED, "recipe gguf"),
            },
            model="{format}.bundle",
            made_by="export",
            limited="whole",
        ),
        Engine(
            "llama.cpp",
            title="llama.cpp",
            packages=("llama-cpp-python==0.3.36",),
            module="llama_cpp",
            worker="llama_cpp",
            formats={"int8": "Q8_0", "int4": "Q4_0, head Q8_0", "bf16": "F16", **_AS_STORED},
            model="{gguf}.gguf",
            made_by="make_models",
            limited="whole",
            built=True,
        ),
        Engine(
            "ik_llama.cpp",
            title="ik_llama.cpp",
            packages=("ik-llama-cpp-python==0.1.5", "llama-cpp-python==0.3.36"),
            module="ik_llama_cpp",
            worker="ik_llama_cpp",
            formats={"int8": "Q8_0", "int4": "Q4_0, head Q8_0", **_AS_STORED},
            model="{gguf}.gguf",
            made_by="make_models",
            limited="whole",  # its wheel has AVX2 alone
        ),
        Engine(
            "mistral.rs",
            title="mistral.rs",
            packages=("mistralrs==0.9.5",),
            module="mistralrs",
            worker="mistral_rs_cpu",
            formats=_AS_STORED,
            model="{gguf}.gguf",
            made_by="make_models",
            lacks=("long", "far"),  # a prompt of 4,096 takes it a quarter of an hour
        ),
        Engine(
            "openvino",
            title="OpenVINO GenAI",
            packages=("openvino-genai==2026.4.1.0",),
            module="openvino_genai",
            worker="openvino_cpu",
            formats={"int8": "Q8_0", "int4": "Q4_0, head Q8_0", "bf16": "F16"},
            model="openvino-{format}",
            made_by="convert",
            limited="products",
        ),
        Engine(
            "onnxruntime-genai",
            title="onnxruntime-genai",
            packages=("onnxruntime-genai==0.18.0", "onnx_ir"),
            module="onnxruntime_genai",
            worker="onnxruntime_genai_cpu",
            formats={"int8": "int8, level 4", "int4": "int4, level 4, head int8"},
            model="onnxruntime-genai-{format}",
            made_by="convert",
            lacks=("far",),
        ),
        Engine(
            "ctranslate2",
            title="CTranslate2",
            packages=("ctranslate2==4.8.5",),
            module="ctranslate2",
            worker="ctranslate2_cpu",
            formats={"int8": "int8"},
            model="ctranslate2-{format}",
            made_by="convert",
            lacks=("far",),
            limited="whole",
        ),
    )
}
CAPS: Mapping[str, Mapping[str, str]] = {
    "avx2": {
        "CMAKE_ARGS": "-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON",
        "CT2_FORCE_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
    }
}
"""The environment that limits engines to an instruction set, when they are built and when they run."""
TITLES = {engine.name: engine.title for engine in ENGINES.values()}
