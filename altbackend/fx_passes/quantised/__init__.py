"""Passes over quantised graphs."""
