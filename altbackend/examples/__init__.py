"""Models in plain torch, with random weights, for the demo and the tests."""
