"""The process of each model's engine, and the front end's code that controls it."""
