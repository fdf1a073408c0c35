"""The one exception of this package; everything else is a built-in error with a message for people."""


class CheckpointError(RuntimeError):
    """A checkpoint on disk is damaged, incomplete, foreign or does not fit; the message names the part."""
