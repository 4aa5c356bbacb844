"""Measurements on real servers. `python3 dev.py bench` compares locks, and the other modules run by themselves."""
