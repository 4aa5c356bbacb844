"""A small project of somebody else: `tests/test_installed.py` copies it to where only the wheel is installed."""
