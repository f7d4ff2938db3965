"""Every spelling of an op becomes the one ``ew`` op, and every value gets its [T, ...] form."""
