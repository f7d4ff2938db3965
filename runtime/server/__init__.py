"""The HTTP server: a front end in this process, and an engine's process for each model."""
