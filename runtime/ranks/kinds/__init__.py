"""The kinds of partition, a module each; ``table`` lists them."""
