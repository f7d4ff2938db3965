"""The settings of recipes for stored weights: a section's rules, and one format."""
