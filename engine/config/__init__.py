"""Configuration: typed schema, checks, and building a task from it."""
