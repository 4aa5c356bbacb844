"""The lock engine. Nothing in this package imports Django."""
