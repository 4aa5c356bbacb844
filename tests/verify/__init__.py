"""Tests of the programs in verify/ and bench/."""
