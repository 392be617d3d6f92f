"""Slow, obviously right loops that the tests compare with."""
