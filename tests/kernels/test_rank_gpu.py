"""What only a GPU shows of draws by rank: how PyTorch sorts there, what it takes, and what graphs leave behind."""

from __future__ import annotations

import pytest
import torch
from gpu_twins import NUMBER, SAMPLERS, OnGpu, graph_of, powers
from twins import check_batches

from gpu_replay import RankBased, ReplayBuffer

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("capacity", [4_000, 100_003, 3_000_001])
def test_a_sort_of_any_size_ranks_as_the_host_does(capacity: int) -> None:
    """Small sorts are other code than large ones; most codes here are equal, and the oldest of those come first."""
    for name in ("rank", "rank-everything"):
        both = OnGpu(capacity, 1, SAMPLERS[name], fields=NUMBER)
        for rows in (capacity // 3, capacity, 17):
            both.add(rows=rows)
            for _ in range(4):
                keys = both.draw(4096).key
                both.update(keys, powers(keys + 1))
        both.check()


def test_what_a_sort_takes_is_given_back_and_stays_below_what_is_said() -> None:
    capacity = 1_000_003
    buffer = ReplayBuffer(capacity, NUMBER, sampler=RankBased(), device="cuda")
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


def test_calls_and_replays_in_turn_draw_what_the_host_draws() -> None:
    """Neither sees the other: an order must be made anew by whichever comes after a change."""
    both = OnGpu(500, 5, RankBased())
    both.add(124, own=False)
    # each call is made once before it is captured
    drawn, batch = graph_of(lambda: both.gpu.sample(65))
    both.host.sample(65)
    keys = torch.arange(200, 260, device="cuda")
    priorities = powers(keys)
    changed, _ = graph_of(lambda: both.gpu.update_priorities(keys, priorities))
    both.update_drawn(keys.cpu())
    for time in range(40):
        call = (time * 7919 + 5) % 6
        if call == 0:
            priorities.copy_(powers(keys + time))
            changed.replay()
            both.host.update_priorities(keys.cpu(), powers(keys + time).cpu())
        elif call in (1, 2):
            drawn.replay()
            check_batches(batch, both.host.sample(65))
        elif call == 3:
            both.draw(33)
        elif call == 4:
            both.add()
        else:
            own = torch.arange(both.host.added - 40, both.host.added)
            both.update(own, powers(own + time))
    both.check()
