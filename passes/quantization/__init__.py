"""Passes that convert weights, and the activations they are multiplied with, to the recipe's formats."""
