"""What the host does with arrays, as plain loops; `kernels/` has the same for the device under the same file names."""
