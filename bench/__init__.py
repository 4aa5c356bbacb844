"""Measurements on real servers. `python3 dev.py bench` compares locks; the other modules run by themselves."""
