"""How much one program does is chosen by plain functions of the host, which need no GPU to be looked at.

On a GPU they answer the same for every batch, since another size is another kernel to compile, but for the keys of one
update; every answer is a power of two, and no block has more threads than a GPU allows.
"""

from __future__ import annotations

import pytest
from kernel_cases import FRAMES, ODD, WHOLE_WORDS

from gpu_replay.ops.draw import per_program
from gpu_replay.ops.eligibility import envs_per_program, steps_at_once
from gpu_replay.ops.frame_tiles import frame_tile, pieces_together
from gpu_replay.ops.prefix_sum import scan_block
from gpu_replay.ops.priorities import blocks_per_program, keys_together, update_warps
from gpu_replay.ops.ring import tile_for

SIZES = (1, 2, 3, 127, 128, 129, 4095, 65_536, 100_003)
MOST_THREADS = 1024
FIELDS = {**ODD, **{f"{name}, rows": fields["x"] for name, fields in WHOLE_WORDS.items()}}
FIELDS |= {name: fields["obs"] for name, fields in FRAMES.items()}


def is_power(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


@pytest.mark.parametrize("gpu", [4, 8, 32, 128, 1024])
def test_a_program_takes_a_power_of_two_and_on_a_gpu_always_the_same(gpu: int) -> None:
    assert {per_program(gpu, size, False) for size in SIZES} == {gpu}
    chosen = [per_program(gpu, size, True) for size in SIZES]
    assert all(is_power(each) for each in chosen)
    # interpreted, no more than twice what there is
    assert all(each <= 2 * size for each, size in zip(chosen, SIZES, strict=True))


def test_one_program_updates_few_keys_or_many_programs_a_part_of_them() -> None:
    for interpreted in (False, True):
        chosen = {batch: keys_together(batch, interpreted) for batch in SIZES}
        assert all(keys == 0 or (is_power(keys) and keys >= batch) for batch, keys in chosen.items())
        # 64 threads are the wide warps of AMD
        assert all(update_warps(keys) * 64 <= MOST_THREADS for keys in chosen.values())
    assert len({blocks_per_program(rows, 32, False) for rows in SIZES}) == 1


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("shifted", [False, True])
def test_a_tile_holds_a_row_in_pieces_of_a_few_words_a_thread(name: str, shifted: bool) -> None:
    field = FIELDS[name]
    for chosen in (lambda rows: tile_for(field, rows, False), lambda rows: frame_tile(field, rows, shifted, False)):
        tiles = {chosen(rows) for rows in SIZES}
        assert len(tiles) == 1
        (tile,) = tiles
        assert is_power(tile.rows)
        assert is_power(tile.columns)
        assert (tile.chunks - 1) * tile.columns < field.elements <= tile.chunks * tile.columns
        values = tile.rows * tile.columns
        # of 128 threads none has more than 16 words of 4 bytes in or out
        assert values * max(field.dtype.itemsize, field.output_dtype.itemsize) <= 128 * 128


@pytest.mark.parametrize("blocks", [1, 300, 5_000, 10**6])
def test_a_program_moves_pieces_of_a_frame_and_leaves_none(blocks: int) -> None:
    for chunks in (1, 2, 25, 197):
        together = pieces_together(blocks, chunks, False)
        assert 1 <= together <= chunks
        # dealt out evenly: with one piece less each, more programs would be needed
        assert together == 1 or -(-chunks // (together - 1)) > -(-chunks // together)


@pytest.mark.parametrize("n_step", [1, 3, 8, 40, 300])
def test_environments_of_one_program_do_not_depend_on_their_number(n_step: int) -> None:
    ages = steps_at_once(n_step + 1)
    assert is_power(ages)
    assert ages > n_step
    (envs,) = {envs_per_program(num_envs, ages, False) for num_envs in SIZES}
    assert is_power(envs)


def test_a_scan_takes_a_power_of_two() -> None:
    for length in (1, 100, 4096, 100_003, 10**8):
        block = scan_block(length)
        assert is_power(block)
        # 8 values a thread
        assert block // 8 <= MOST_THREADS
