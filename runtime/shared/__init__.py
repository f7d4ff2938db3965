"""What all parts share: contracts between them, errors, records in files, the lowered program, costs of its steps."""
