"""The command line: `python -m altbackend demo | doctor | config`."""
