"""`python -m gpu_replay` is `gpu-replay`."""

from __future__ import annotations

import sys

from gpu_replay.cli import main

sys.exit(main())
