"""What rewriting leaves behind: no-ops, constants, repeated and unused calls."""
