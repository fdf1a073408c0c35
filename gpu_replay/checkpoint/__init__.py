"""Checkpoints on disk: the format, its shards, atomic replacement, and the state of a buffer.

The one exception of this package is of these; everything else is a built-in error with a message for people.
"""


class CheckpointError(RuntimeError):
    """A checkpoint on disk is damaged, incomplete, foreign or does not fit; the message names the part."""
