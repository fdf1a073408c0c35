"""Shared by both buffers: the base class, saving, copying and plotting it, and the checks of steps."""
