"""The demo: MongoDB, web server, Celery workers, beat and traffic in one command."""
