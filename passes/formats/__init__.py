"""What recipes say of stored weights: a section's rules, and one format."""
