"""Functional graphs as Python files that rebuild them: `text` writes, `file` decides where, `rebuild` reads."""
