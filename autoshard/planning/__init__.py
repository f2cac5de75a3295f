"""What to shard: operator strategies, their cost, and the exact solver. Imports no pass."""
