"""Reads folders with quantized weights: their configurations, and the layouts of their tensors."""
