"""Other libraries' programs on buffers of this package; each module imports its library, and nothing imports it."""
