"""Celery under failure: real brokers, real workers, and a file in which every process writes what happens."""
