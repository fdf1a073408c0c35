"""One replay buffer over the ranks of a `torch.distributed` process group: each rank's device stores one shard."""
