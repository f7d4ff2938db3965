"""The base of all parts: contracts between them, errors, records in files, the lowered program, costs of its steps."""
