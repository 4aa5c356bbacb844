"""Callables that run under a lock: `mongo_locked`, `once_per`, `LockedCommand`."""
