"""Kinds of cache: a class says what the blocks of a cache group hold, and for how long. ``table.KINDS`` lists them."""
