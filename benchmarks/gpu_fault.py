"""A planted illegal access: what a process with a model says after it has lost its GPU.

    python benchmarks/gpu_fault.py BUNDLE            # a child of gpu_truth.py; prints a line of JSON

``plant`` writes to an address that no process has. On a GPU that costs the process its context, as a defect of a kernel
or of the card would. In a rehearsal steps raise what torch raises then, and the GPU doesn't answer.

In a server's engine ``watch_for`` plants it when a file appears: ``SITE`` is the ``sitecustomize`` that starts it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

FILE_VARIABLE = "ENGINEWRIGHT_PLANTED_FAULT"
"""The environment variable with the path of the file that ``watch_for`` waits for."""

SITE = f"""
import os, sys
if os.environ.get({FILE_VARIABLE!r}) and any("engine_process" in word for word in sys.orig_argv):
    sys.path.insert(0, {str(Path(__file__).parent)!r})
    import gpu_fault
    gpu_fault.watch_for(os.environ[{FILE_VARIABLE!r}])
"""

PTX = """
.version 7.0
.target sm_70
.address_size 64
.visible .entry planted() {
    .reg .u64 %address;
    .reg .u32 %value;
    mov.u64 %address, 64;
    mov.u32 %value, 1;
    st.global.u32 [%address], %value;
    ret;
}
"""
"""A store to address 64, which the driver translates."""


def plant() -> None:
    """Costs this process its GPU; in a rehearsal, what stands for it."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        _rehearse()
        return
    from enginewright.plugins.gpu.cuda_driver import load_cuda

    cuda = load_cuda()
    device = cuda.open(cuda.gpus[0])
    device.launch(device.load_kernel(PTX.encode() + b"\0", "planted", 0), (1, 1, 1), 32, 0, ())


def _rehearse() -> None:
    from enginewright.plugins.cuda.serve import executor, steps

    def lost(*given: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered (rehearsed)")

    steps.CudaSteps.start = lost  # type: ignore[assignment, method-assign]
    executor._Interpreted.probe = lost  # type: ignore[method-assign]


def watch_for(path: str) -> None:
    """Plants the fault once, on a thread of its own, when the file ``path`` appears; it is renamed before."""

    def wait() -> None:
        while True:
            try:
                os.rename(path, path + ".planted")
                break
            except OSError:
                time.sleep(0.02)
        plant()

    threading.Thread(target=wait, daemon=True).start()


def ask(llm: Any) -> dict[str, Any]:
    """One request: its tokens, or how it fails; and whether the model counts as lost then."""
    from enginewright import EnginewrightError, SamplingParams

    begin = time.perf_counter()
    try:
        tokens = llm.generate([[5, 6, 7, 8]], SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True))
        record: dict[str, Any] = {"tokens": list(tokens[0].token_ids)}
        if tokens[0].error is not None:
            record = {"error": type(tokens[0].error).__name__, "message": str(tokens[0].error)[:500]}
    except EnginewrightError as e:
        record = {"error": type(e).__name__, "message": str(e)[:500]}
    except RuntimeError as e:
        record = {"error": f"untyped {type(e).__name__}", "message": str(e)[:500]}
    return {**record, "seconds": round(time.perf_counter() - begin, 3), "lost": llm.lost}


def main(bundle: str) -> None:
    """Records a model's answers before a fault, after it, once more, and when it is closed."""
    from enginewright import LLM

    llm = LLM(bundle, target="cuda", trust="code", context=128, max_requests=2, memory="64MiB", speculate=None)
    record = {"before": ask(llm)}
    plant()
    record |= {"behind it": ask(llm), "once more": ask(llm)}
    try:
        llm.close()
        record["closed"] = {}
    except Exception as e:  # noqa: BLE001  whatever it is, that is the finding
        record["closed"] = {"error": type(e).__name__, "message": str(e)[:500]}
    print(json.dumps(record), flush=True)
    os._exit(0)  # a context that is lost may end the process at its own time


if __name__ == "__main__":
    main(sys.argv[1])
