"""The cache folder on disk: sealed files, limited in total size."""
