"""How much one program does is chosen by plain functions of the host, which need no GPU to be looked at.

On a GPU they answer the same for every batch, since another size is another kernel to compile, but for the keys of one
update; all kernels but it and the scan have four warps, 128 threads of NVIDIA's or 256 of AMD's data centre GPUs.
"""

from __future__ import annotations

import math

import pytest
import torch
from kernel_cases import FRAMES, ODD, WHOLE_WORDS

from gpu_replay import Field
from gpu_replay.ops.draw import per_program
from gpu_replay.ops.eligibility import envs_per_program, steps_at_once
from gpu_replay.ops.frame_tiles import frame_tile, pieces_together
from gpu_replay.ops.mass_tree import edge_for, fanout_for, level_sizes, root_limit_for
from gpu_replay.ops.priorities import blocks_per_program, keys_together, update_warps
from gpu_replay.ops.ring import tile_for

SIZES = (1, 2, 3, 127, 128, 129, 4095, 65_536, 100_003)
# what a block can have of any of them
MOST_THREADS = 1024
FIELDS = {**ODD, **{f"{name}, rows": fields["x"] for name, fields in WHOLE_WORDS.items()}}
PICTURES = {name: fields["obs"] for name, fields in FRAMES.items()}


def is_power(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


@pytest.mark.parametrize("gpu", [4, 8, 32, 128, 1024])
def test_a_program_takes_a_power_of_two_and_on_a_gpu_always_the_same(gpu: int) -> None:
    assert {per_program(gpu, size, False) for size in SIZES} == {gpu}
    assert gpu <= MOST_THREADS
    chosen = [per_program(gpu, size, True) for size in SIZES]
    assert all(is_power(each) for each in chosen)
    # interpreted, no more than twice what there is
    assert all(each <= 2 * size for each, size in zip(chosen, SIZES, strict=True))


def test_one_program_updates_few_keys_or_a_thousand_and_no_more() -> None:
    few = {1: 256, 2: 256, 255: 256, 256: 256, 257: 512, 512: 512}
    sizes = {**few, 513: 1024, 1023: 1024, 1024: 1024, 1025: 0, 65_536: 0}
    assert {batch: keys_together(batch, False) for batch in sizes} == sizes
    # 64 threads are the wide warps of AMD
    assert {keys: update_warps(keys) for keys in (0, 256, 512, 1024)} == {0: 4, 256: 8, 512: 16, 1024: 16}
    assert update_warps(1024) * 64 <= MOST_THREADS
    assert [keys_together(batch, True) for batch in (1, 2, 3, 1000, 1024, 1025)] == [1, 2, 4, 1024, 1024, 0]


def test_blocks_that_one_program_inserts_do_not_depend_on_the_rows() -> None:
    assert {blocks_per_program(rows, 32, False) for rows in SIZES} == {32}


@pytest.mark.parametrize("name", [*FIELDS, *PICTURES])
@pytest.mark.parametrize("shifted", [False, True])
def test_a_tile_holds_a_row_in_pieces_of_a_few_words_a_thread(name: str, shifted: bool) -> None:
    field = {**FIELDS, **PICTURES}[name]
    for chosen in (lambda rows: tile_for(field, rows, False), lambda rows: frame_tile(field, rows, shifted, False)):
        tiles = {chosen(rows) for rows in SIZES}
        assert len(tiles) == 1
        (tile,) = tiles
        assert is_power(tile.rows)
        assert is_power(tile.columns)
        assert (tile.chunks - 1) * tile.columns < field.elements <= tile.chunks * tile.columns
        values = tile.rows * tile.columns
        # of 256 threads each has something to do, of 128 none has more than 16 words of 4 bytes in or out
        assert 256 <= values <= 8192
        assert values * max(field.dtype.itemsize, field.output_dtype.itemsize) <= 128 * 128


SHAPES = [
    (84, 84),
    (42, 42),
    (64, 64),
    (96, 96, 3),
    (210, 160, 3),
    (84, 84, 1),
    (17,),
    (65,),
    (376,),
    (33, 47),
    (7, 7, 3),
]
KINDS = [
    (torch.uint8, None),
    (torch.uint8, torch.bfloat16),
    (torch.uint8, torch.float32),
    (torch.bfloat16, None),
    (torch.float16, torch.float32),
    (torch.float32, None),
]


def filled(elements: int, columns: int) -> float:
    """The share of a program's lanes that have something to move, where a row is moved in such pieces."""
    return elements / (-(-elements // columns) * columns)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("stored, output", KINDS, ids=str)
def test_no_other_pieces_of_frames_and_rows_fill_more_lanes(
    shape: tuple[int, ...], stored: torch.dtype, output: torch.dtype | None
) -> None:
    field = Field(shape, stored) if output is None else Field(shape, stored, output)
    # pieces of so many whole words, at most 16 bytes each, are moved by whole warps
    words = 32 * math.gcd(field.row_bytes, 16) // stored.itemsize
    for tile in (frame_tile(field, 1000, False, False), tile_for(field, 1000, False)):
        most = tile.rows * tile.columns
        widths = [1 << power for power in range(20) if words <= 1 << power <= most] or [tile.columns]
        assert filled(field.elements, tile.columns) >= max(filled(field.elements, width) for width in widths) - 1 / 64
        # long rows always can: what is left over is less than one piece
        if field.elements >= 32 * words:
            assert filled(field.elements, tile.columns) > 0.95


@pytest.mark.parametrize(
    "stored, output, frames, rows",
    [
        (torch.uint8, torch.uint8, 8, 4),
        (torch.uint8, torch.bfloat16, 4, 4),
        (torch.uint8, torch.float32, 2, 2),
        (torch.float32, torch.float32, 2, 2),
    ],
    ids=str,
)
def test_the_tiles_of_84x84(stored: torch.dtype, output: torch.dtype, frames: int, rows: int) -> None:
    field = Field((84, 84), stored, output)
    assert frame_tile(field, 1000, False, False) == (frames, 1024, 7)
    assert tile_for(field, 1000, False) == (rows, 1024, 7)


def test_a_program_moves_more_pieces_of_a_frame_the_more_programs_there_are() -> None:
    """Where a window lies is looked up once for all of them, but a small batch needs all programs that it can have."""
    found = {blocks: pieces_together(blocks, 7, False) for blocks in (1, 64, 512, 877, 878, 1024, 4096, 10**6)}
    assert found == {1: 1, 64: 1, 512: 1, 877: 2, 878: 3, 1024: 3, 4096: 7, 10**6: 7}
    for blocks in (1, 300, 5_000, 10**6):
        for chunks in (1, 2, 25, 197):
            together = pieces_together(blocks, chunks, False)
            parts = -(-chunks // together)
            assert 1 <= together <= chunks
            assert blocks * parts >= min(blocks * chunks, 2048)
            # dealt out evenly: with one piece less each, more programs would be needed
            assert together == 1 or -(-chunks // (together - 1)) > parts


@pytest.mark.parametrize("n_step", [1, 3, 8, 40, 300])
def test_environments_of_one_program_and_the_steps_it_looks_at_make_a_small_tile(n_step: int) -> None:
    ages = steps_at_once(n_step + 1)
    assert is_power(ages)
    assert ages > n_step
    envs = {envs_per_program(num_envs, ages, False) for num_envs in SIZES}
    assert len(envs) == 1
    assert is_power(max(envs))
    assert max(envs) * ages <= max(256, ages)


@pytest.mark.parametrize(
    "slots, levels, above, upper", [(10**6, 4, 2**18, 2**14), (10**7, 5, 2**22, 2**17), (5 * 10**7, 6, 2**24, 2**19)]
)
def test_most_of_a_tree_but_its_leaves_fits_a_cache(slots: int, levels: int, above: int, upper: int) -> None:
    """50 MB is the L2 of an H200, 4 MB that of one part of an MI300X.

    Of what does not fit a draw reads one block a level, of leaves and, where it is small, of the level above.
    """
    sizes = level_sizes(slots, fanout_for("triton"), root_limit_for("triton"), edge_for("triton"))
    assert len(sizes) == levels
    assert 8 * sum(sizes[1:]) <= above
    assert 8 * sum(sizes[2:]) <= upper
    # no more than a block of 128 leaves was
    assert 2 * 8 * fanout_for("triton") <= 1024
