"""Copies between the ring and a batch: `gather` reads rows, and can weigh them; `write_rows` stores consecutive ones.

One launch serves all fields. Tensors come as tuples, one pointer a field; differences between fields are known at
compile time, so that a field whose rows are multiples of 16 bytes is moved in 16-byte words.
"""

import triton
import triton.language as tl

from .constants import ADDED, FIRST, NO_MASS, RANDOM, STEP, is_last
from .random import divided


@triton.jit
def count_sample(sample, counted, counters_ptr, program, batch, minima, blocks_drawn, beta, DRAWS: tl.constexpr):
    """weight = (lowest / mass) ** beta, 1 where the mass is 0; counts the rows and moves schedule and stream on.

    Part of the last launch of a sample, so that what is interrupted before it has changed nothing: the first programs
    finish DRAWS draws each, and no other one of that launch may read the counters that move. Returns the program's
    number among those others, below 0 for one that finishes.

    sample:  slots, masses and weights of the rows, and `minima` masses, of which the smallest has the largest weight. A
             mass below 0 says that the row is none: its weight is 0, and it is not counted.
    counted: how often each slot was sampled and, with a schedule, its start, change and steps, used instead of beta.
    """
    programs = (batch + (DRAWS - 1)) // DRAWS
    if program < programs:
        slots_ptr, masses_ptr, weights_ptr, lowest_ptr = sample
        draw = program * DRAWS + tl.arange(0, DRAWS)
        live = draw < batch
        # before the barrier, as all that the last program changes
        step, block = tl.load(counters_ptr + STEP), tl.load(counters_ptr + RANDOM)
        smallest = tl.full([DRAWS], NO_MASS, tl.int64)
        for begin in range(0, minima, DRAWS):
            place = begin + tl.arange(0, DRAWS)
            smallest = tl.minimum(smallest, tl.load(lowest_ptr + place, mask=place < minima, other=NO_MASS))
        lowest = tl.min(smallest, axis=0).to(tl.float64)
        # rows that were not drawn have mass 0 and weight 1
        mass = tl.load(masses_ptr + draw, mask=live, other=0)
        drawn = mass > 0
        ratio = tl.where(drawn, lowest / tl.where(drawn, mass, 1).to(tl.float64), 1.0)
        exponent = tl.full([], 0.0, tl.float64) + beta
        if len(counted) > 1:
            schedule_ptr = counted[1]
            steps = tl.load(schedule_ptr + 2)
            done = tl.minimum(step.to(tl.float64), steps)
            exponent = tl.load(schedule_ptr) + tl.load(schedule_ptr + 1) * done / steps
        weight = tl.exp2(tl.log2(ratio) * exponent)
        found = mass >= 0
        tl.store(weights_ptr + draw, tl.where(found, weight, 0.0).to(tl.float32), mask=live)
        slot = tl.load(slots_ptr + draw, mask=live, other=0)
        tl.atomic_add(counted[0] + slot, tl.full(slot.shape, 1, tl.int32), mask=live & found, sem="relaxed")
        if is_last(counters_ptr, programs):
            tl.store(counters_ptr + STEP, step + 1)
            tl.store(counters_ptr + RANDOM, block + blocks_drawn)
    return program - programs


@triton.jit
def as_sampled(values, output, SCALE: tl.constexpr, WIDE: tl.constexpr):
    """Convert stored values for the output pointer: scale in float32, or float64 if WIDE, then cast."""
    raw: tl.constexpr = values.dtype
    if SCALE is not None:
        if WIDE:
            values = values.to(tl.float64) * tl.full([], SCALE, tl.float64)
        else:
            values = values.to(tl.float32) * tl.full([], SCALE, tl.float32)
    if output.dtype.element_ty == tl.bfloat16 and raw != tl.bfloat16:
        # as torch does; the interpreter has no other way there
        values = values.to(tl.float32)
    return values.to(output.dtype.element_ty)


@triton.jit
def programs_of(rows, f: tl.constexpr, LAYOUT: tl.constexpr):
    """Number of programs that move these rows of field f."""
    return (rows + (LAYOUT.rows[f] - 1)) // LAYOUT.rows[f] * LAYOUT.chunks[f]


@triton.jit
def tile_at(program, f: tl.constexpr, LAYOUT: tl.constexpr):
    """Rows and columns that one of the programs of field f moves: (ROWS,) and (COLUMNS,) int64."""
    row = program // LAYOUT.chunks[f] * LAYOUT.rows[f] + tl.arange(0, LAYOUT.rows[f])
    return row, program % LAYOUT.chunks[f] * LAYOUT.columns[f] + tl.arange(0, LAYOUT.columns[f])


@triton.jit
def slot_of(slots_ptr, item, named, sequence):
    """The slots of items, and how many steps each lies after the first of its row.

    sequence: (), where each item has a slot of its own, and the other numbers mean nothing; or the items of a row,
              which are steps from its slot on, with their reciprocal, environments and the slots of the ring.
    """
    row = item
    ahead = item
    if len(sequence) > 0:
        span, per_span, num_envs, slots = sequence
        row, ahead = divided(item, span, per_span)
    slot = tl.load(slots_ptr + row, mask=named, other=0)
    if len(sequence) > 0:
        slot += ahead * num_envs
        slot = tl.where(slot >= slots, slot - slots, slot)
    return slot, ahead


@triton.jit
def gather_rows(sources, outputs, slots_ptr, batch, local, FROM: tl.constexpr, LAYOUT: tl.constexpr, sequence):
    """outputs[f][i] = sources[f][slots[i]] for the fields from FROM on; a program moves one tile of one field.

    sequence: as in `slot_of`.

    local: the program's number, from 0 on. Returns it among the programs that come after those.
    """
    for f in tl.static_range(FROM, len(LAYOUT.widths)):
        programs = programs_of(batch, f, LAYOUT)
        if (local >= 0) & (local < programs):
            row, column = tile_at(local, f, LAYOUT)
            named = row < batch
            live = named[:, None] & (column < LAYOUT.widths[f])[None, :]
            # rows past the batch read slot 0 under a mask
            slot = slot_of(slots_ptr, row, named, sequence)[0]
            values = tl.load(sources[f] + slot[:, None] * LAYOUT.widths[f] + column[None, :], mask=live, other=0)
            place = row[:, None] * LAYOUT.widths[f] + column[None, :]
            tl.store(outputs[f] + place, as_sampled(values, outputs[f], LAYOUT.scales[f], LAYOUT.wide[f]), mask=live)
        local -= programs
    return local


@triton.jit(do_not_specialize=["batch", "minima", "blocks_drawn"])
def gather_kernel(
    sources,
    counters_ptr,
    counted,
    batch,
    minima,
    blocks_drawn,
    outputs,
    slots_ptr,
    sample,
    beta: tl.float64,
    LAYOUT: tl.constexpr,
    DRAWS: tl.constexpr,
):
    """outputs[f][i] = sources[f][slots[i]], scaled and cast; see `ops/ring.py` for LAYOUT.

    With DRAWS the first programs finish as many draws of `sample` each: see `count_sample`.
    """
    batch = batch.to(tl.int64)
    local = tl.program_id(0).to(tl.int64)
    if DRAWS > 0:
        local = count_sample(sample, counted, counters_ptr, local, batch, minima, blocks_drawn, beta, DRAWS)
    gather_rows(sources, outputs, slots_ptr, batch, local, 0, LAYOUT, ())


@triton.jit
def write_rows(inputs, stores, added, local, rows, skipped, capacity, LAYOUT: tl.constexpr):
    """stores[f][(added + i) % capacity] = inputs[f][i] for skipped <= i < rows; a program moves a tile of one field.

    local: the program's number, from 0 on. Returns it among the programs that come after those.
    """
    kept = rows - skipped
    start = (added + skipped) % capacity
    for f in tl.static_range(len(LAYOUT.widths)):
        programs = programs_of(kept, f, LAYOUT)
        if (local >= 0) & (local < programs):
            row, column = tile_at(local, f, LAYOUT)
            live = (row < kept)[:, None] & (column < LAYOUT.widths[f])[None, :]
            place = (skipped + row)[:, None] * LAYOUT.widths[f] + column[None, :]
            values = tl.load(inputs[f] + place, mask=live, other=0)
            # no more rows than slots: the ring is passed at most once
            slot = start + row
            slot = tl.where(slot >= capacity, slot - capacity, slot)
            place = slot[:, None] * LAYOUT.widths[f] + column[None, :]
            tl.store(stores[f] + place, values.to(stores[f].dtype.element_ty), mask=live)
        local -= programs
    return local


@triton.jit
def is_live(key, counters_ptr, capacity):
    """Whether keys are live: their transitions are stored."""
    added = tl.load(counters_ptr + ADDED)
    oldest = tl.maximum(added - capacity, tl.load(counters_ptr + FIRST))
    return (key >= oldest) & (key < added)
