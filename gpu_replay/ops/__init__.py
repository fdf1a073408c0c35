"""The operations: one file each, with the contract, the host implementation and the launcher of the kernel."""
