"""A small shop: the example project of django_mongolock, its demo, and the project of its tests.

python -m testproject.demo            everything, until Ctrl-C
python -m testproject.manage check    Django's own commands, on MONGODB_URI
"""

from testproject.celery import app as celery_app

__all__ = ["celery_app"]
