"""Functional graphs as Python files that rebuild them: `text` writes them, `file` places them, `rebuild` reads them."""
