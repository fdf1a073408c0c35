"""One replay buffer over the ranks of a `torch.distributed` process group, a shard on the device of each."""
