"""The cache folder: files are sealed, so that only what was written is read, and as many as the limit allows."""
