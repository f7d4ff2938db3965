"""Passes that convert weights, and the inputs of products with them, to the recipe's formats."""
