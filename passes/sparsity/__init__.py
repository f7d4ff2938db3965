"""Passes that prune a model: layers, heads, channels, and two of every four weights."""
