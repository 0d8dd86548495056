"""Shrinks a repro file: `trial` runs one, `worker` and `judge` isolate it in a process, `shrink` searches."""
