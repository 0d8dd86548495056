"""Tests of altbackend; the folders mirror the package's rooms."""

import os

# OpenMP reads it when torch is loaded. A thread that spins at a barrier takes its core from the thread it waits for, if
# more of them run than there are cores, as they do when tests run side by side.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
