"""Folders whose weights are quantized already: what their configuration says, and the layouts of their tensors."""
