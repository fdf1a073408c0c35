"""The engines behind the buffers: they store, sample and update, on CPU tensors or through Triton kernels."""
