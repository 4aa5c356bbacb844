"""`mongo_locked` and `once_per`: callables that run under a lock."""
