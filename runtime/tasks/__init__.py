"""Types of requests, a file each: what a task is, and how its requests and its result are made."""
