"""altbackend: a torch.compile backend that one person can read."""

__version__ = "0.1.0"
