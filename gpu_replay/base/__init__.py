"""What both buffers share: their base class, how it is saved, copied and drawn, and how steps are checked."""
