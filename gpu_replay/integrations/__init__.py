"""Adapters for other libraries; each module imports its library, and nothing else in the package imports the module."""
