"""Shrinks a file that rebuilds a graph: `trial` runs one, `worker` and `judge` survive it, `shrink` searches."""
