"""The loops over arrays that run on the host; `kernels/` has the device code under the same file names."""
