"""Tools to measure a model: it runs the source model, cuts texts into windows and compares logits. ``optimize verify``,
``eval`` and ``bisect`` use it.
"""
