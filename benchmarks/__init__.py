"""Side-by-side measurements of torch.compile backends: see benchmarks/README.md."""
