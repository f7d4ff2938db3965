"""Passes that remove parts of a model: layers, heads, channels, and two of every four weights."""
