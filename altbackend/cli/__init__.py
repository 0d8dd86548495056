"""The command line: `python -m altbackend demo | doctor | cache | minify | config`."""
