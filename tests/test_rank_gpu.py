"""What only a GPU shows of draws by rank: how PyTorch sorts there, what it takes, and what graphs leave behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_gpu import FIELDS, SAMPLERS, check_drawn, check_same, graph_of, numbered, pair, powers

from gpu_replay import RankBased, ReplayBuffer

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("capacity", [4_000, 100_003, 3_000_001])
def test_a_sort_of_any_size_ranks_as_the_host_does(capacity: int) -> None:
    """Small sorts are other code than large ones; most codes here are equal, and the oldest of those come first."""
    for sampler in (SAMPLERS["rank"], SAMPLERS["rank-outdated"]):
        gpu, host = pair(capacity, sampler, {"n": FIELDS["n"]})
        for rows in (capacity // 3, capacity, 17):
            for buffer in (gpu, host):
                n = torch.arange(rows, device=buffer.device) + buffer.added
                buffer.add(n=n, priority=powers(n))
            for _ in range(4):
                found, expected = gpu.sample(4096), host.sample(4096)
                assert found.key.tolist() == expected.key.tolist()
                for buffer in (gpu, host):
                    buffer.update_priorities(expected.key.to(buffer.device), powers(expected.key + 1).to(buffer.device))
        check_same(gpu, host)


def test_what_a_sort_takes_is_given_back_and_stays_below_what_is_said() -> None:
    capacity = 1_000_003
    buffer = ReplayBuffer(capacity, {"n": FIELDS["n"]}, sampler=RankBased(), device="cuda")
    buffer.add(n=torch.arange(capacity, device="cuda"))
    # kernels are compiled, and memory of the sort is found, by the first draw
    buffer.sample(64)
    buffer.add(n=torch.arange(1, device="cuda"))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    batch = buffer.sample(64)
    assert torch.cuda.max_memory_allocated() - before < 56 * capacity
    assert torch.cuda.memory_allocated() - before < 64 * 1024
    assert batch.n.shape == (64,)


@pytest.mark.parametrize("every", [1, 3])
def test_calls_and_replays_in_turn_draw_what_the_host_draws(every: int) -> None:
    """Neither sees the other: an order must be made anew by whichever comes when it is time."""
    gpu, host = pair(500, RankBased(resort_every=every))
    for buffer in (gpu, host):
        buffer.add(**numbered(0, 620, buffer.device))
    # each call is made once before it is captured
    drawn, batch = graph_of(lambda: gpu.sample(65))
    host.sample(65)
    keys = torch.arange(200, 260, device="cuda")
    priorities = powers(keys)
    changed, _ = graph_of(lambda: gpu.update_priorities(keys, priorities))
    host.update_priorities(keys.cpu(), powers(keys).cpu())
    for time in range(40):
        call = (time * 7919 + 5) % 6
        if call == 0:
            priorities.copy_(powers(keys + time))
            changed.replay()
            host.update_priorities(keys.cpu(), powers(keys + time).cpu())
        elif call in (1, 2):
            drawn.replay()
            check_drawn(batch, host.sample(65))
        elif call == 3:
            check_drawn(gpu.sample(33), host.sample(33))
        elif call == 4:
            for buffer in (gpu, host):
                rows: dict[str, Any] = numbered(buffer.added, 5, buffer.device)
                buffer.add(**rows, priority=powers(rows["n"]))
        else:
            for buffer in (gpu, host):
                own = torch.arange(buffer.added - 40, buffer.added, device=buffer.device)
                buffer.update_priorities(own, powers(own + time))
    check_same(gpu, host)
