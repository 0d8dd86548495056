"""A search for programs that run slower than with TorchInductor: drawn from a grammar, measured, and shrunk."""
