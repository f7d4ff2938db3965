"""Static-shape buckets: which sizes to pad steps to, from how long requests are."""
