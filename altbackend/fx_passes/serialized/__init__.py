"""Patterns that `python -m altbackend patterns --write` has written, one file a family."""
