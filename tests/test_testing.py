"""For our users' tests: the memory backend by `mongolock`, `override_locks` and `LockTestMixin`."""
