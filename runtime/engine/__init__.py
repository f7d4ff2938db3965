"""A bundle served: ``LLM``, the engine and its thread, and what makes requests of what a caller passes."""
