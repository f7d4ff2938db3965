"""The base of all parts: contracts, errors, records of files, the lowered program, and costs of its steps."""
