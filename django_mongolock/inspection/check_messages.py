"""The messages of the checks."""

from __future__ import annotations

from django.core import checks


def error(number: str, message: str, hint: str) -> checks.Error:
    return checks.Error(message, hint=hint, id=f"mongolock.{number}")


def info(number: str, message: str) -> checks.Info:
    return checks.Info(message, id=f"mongolock.{number}")


def warning(number: str, message: str, hint: str) -> checks.Warning:
    return checks.Warning(message, hint=hint, id=f"mongolock.{number}")
