"""Measuring: the source model, texts in windows, and distances between logits. Verify, eval and bisect stand on it."""
