"""The process of each model's engine, and the front end's side of it."""
