"""The tables of recipes that describe stored weights, the format of a weight, and rounding to each format."""
