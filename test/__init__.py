"""Tests of altbackend; the folders mirror the package's rooms."""
