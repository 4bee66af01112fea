"""Balance of samples over ranks, on real sequence lengths."""
