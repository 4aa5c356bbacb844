"""Attacks from outside, each over everything that it can reach: see the table in docs/evidence/threats.md."""
