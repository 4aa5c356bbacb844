"""A replica set under faults, processes that lock and write down what they believed, and a checker that reads it.

python3 dev.py faults [--seed N] [--seconds S] [--fault NAME ...]
"""
