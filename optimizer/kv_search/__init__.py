"""Key/value heads layer by layer, so that a KL budget is met with the smallest cache, or a size with the least KL."""
