"""The list of passes that an export runs, and the context that a recipe gives them."""
