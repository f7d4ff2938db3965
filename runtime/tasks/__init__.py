"""Types of tasks, one file each: what a caller requests, and how its requests and its result are made."""
