"""What every command of `gpu-replay` shares: arguments, errors, versions, progress bars, files, tables."""
