"""Shared by all commands of `gpu-replay`: arguments, errors, versions, progress bars, files, tables."""
