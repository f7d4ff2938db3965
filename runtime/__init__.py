"""Loads a bundle and runs it. Imports neither torch nor the optimizer nor the passes."""
