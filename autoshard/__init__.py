"""autoshard: one line shards a PyTorch model."""
