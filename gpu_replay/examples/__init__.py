"""Programs to copy and change: each is one file that runs as it is, `python -m gpu_replay.examples.NAME`."""
