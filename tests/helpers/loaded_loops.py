"""Compiles or loads the loops of buffers of transitions: imported once, by a process from which ranks are forked."""

from __future__ import annotations

import torch
from programs import SAMPLERS

from gpu_replay import Field, ReplayBuffer

torch.set_num_threads(1)
for sampler in SAMPLERS.values():
    buffer = ReplayBuffer(300, {"n": Field((), torch.int64)}, sampler=sampler, device="cpu")
    buffer.add(n=torch.arange(2))
    buffer.add(n=torch.arange(400))
    batch = buffer.sample(3)
    buffer.update_priorities(batch.key, [1.0, 2.0, 3.0])
    buffer.load_state_dict(buffer.state_dict())
    buffer.stats()
    buffer.clear()
