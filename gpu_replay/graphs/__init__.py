"""CUDA graphs and `torch.compile`: one learning step as one call, and the buffer's calls as custom operators."""
