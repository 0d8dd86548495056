"""Adapters to names of other packages that a program may use beside this backend."""
