"""Tests of the documentation: its examples, its reference, its links."""
