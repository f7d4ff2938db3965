"""What a recipe searches for, put together under one budget: what goes of a model, its heads, its formats."""
