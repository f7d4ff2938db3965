"""Types of tasks, one file each: a caller's input, and the functions that make its requests and its result."""
