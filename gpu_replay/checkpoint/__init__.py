"""Checkpoints on disk: the format, its shards, atomic replacement, and the state of a buffer."""
