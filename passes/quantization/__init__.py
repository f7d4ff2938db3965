"""Passes that give weights, and what they are multiplied with, the formats that the recipe asks for."""
