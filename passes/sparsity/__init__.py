"""Passes that remove what a model computes the least with: layers, heads, channels, and weights two by four."""
