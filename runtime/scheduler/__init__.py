"""Which requests run in which step. Knows neither torch nor an executor."""
