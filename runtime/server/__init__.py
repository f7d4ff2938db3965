"""The HTTP server: a front end, and behind it an engine process for each model."""
