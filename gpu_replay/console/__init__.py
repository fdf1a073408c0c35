"""What all commands of `gpu-replay` share: arguments, errors, versions, progress bars, files, tables."""
