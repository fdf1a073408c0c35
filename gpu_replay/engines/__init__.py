"""What stores, draws and updates for a buffer: on CPU tensors, or through Triton kernels."""
