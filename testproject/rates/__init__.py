"""The latest rate and the history of rates: two tables that several processes write at once.

python -m testproject.rates --database default --runs 100      without versions, then with them
"""
