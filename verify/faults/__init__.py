"""A replica set under faults, processes that lock and record their beliefs, and a checker that reads the records.

python3 dev.py faults [--seed N] [--seconds S] [--fault NAME ...]
"""
