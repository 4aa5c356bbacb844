"""Locks on the servers and queues that Django projects run on, each for real: `python3 dev.py platforms`."""
