"""The buffers of all ranks of a `torch.distributed` process group as one memory."""
