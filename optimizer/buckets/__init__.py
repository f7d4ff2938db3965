"""Static-shape buckets: which sizes of steps to build programs for, from how long requests are."""
