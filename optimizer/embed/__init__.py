"""``optimize embed``: the vectors of the texts of a file."""
