from __future__ import annotations

from collections import Counter
from pathlib import Path

import onnx

from tests.acceptance.tiny_configs import tiny_family
from tests.plugins.graphs.linear_session import emit, lowered


def test_layers_reshape_nothing(tmp_path: Path) -> None:
    """Reshapes are only at the ends: token ids, their rows of the table, and the selection of rows."""
    counts = []
    for layers in (2, 3):
        folder = tmp_path / str(layers)
        folder.mkdir()
        emit(lowered(tiny_family("llama", num_hidden_layers=layers)), folder, contrib=40)
        graphs = [
            onnx.load(folder / name, load_external_data=False).graph for name in ("model.onnx", "model.contrib.onnx")
        ]
        standard, contrib = (Counter(node.op_type for node in graph.node) for graph in graphs)
        assert contrib["GroupQueryAttention"] == layers and not contrib["Slice"] + contrib["Transpose"]
        assert standard["Reshape"] > 5 * layers
        counts.append(contrib["Reshape"])
    assert counts[0] == counts[1] < 6
