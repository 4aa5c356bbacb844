"""Locks on real servers and queues of Django projects: `python3 dev.py platforms`."""
