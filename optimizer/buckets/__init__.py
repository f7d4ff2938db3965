"""Static-shape buckets: the choice of the sizes to which steps are padded, from the lengths of requests."""
