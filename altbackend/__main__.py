"""`python -m altbackend`."""

import sys

from altbackend.cli.main import main

sys.exit(main(sys.argv[1:]))
