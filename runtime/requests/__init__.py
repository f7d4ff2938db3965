"""A request and its result: sampling parameters, state, outputs."""
