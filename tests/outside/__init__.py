"""A small project of a stranger. `tests/test_installed.py` copies it to a place where only the wheel is installed."""
