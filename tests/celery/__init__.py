"""Celery under failure, with real brokers, real workers, and a file in which every process records its events."""
