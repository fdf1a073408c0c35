"""Copies between the ring and a batch: `gather` takes rows out, weighed if need be; `write` puts consecutive ones in.

One launch serves all fields. Tensors come as tuples, one pointer a field; what differs between fields is known at
compile time, so that a field whose rows are multiples of 16 bytes is moved in 16-byte words.
"""

import triton
import triton.language as tl

from .weights import weigh


@triton.jit
def as_sampled(values, output, SCALE: tl.constexpr, WIDE: tl.constexpr):
    """Stored values as they go to the output pointer: scaled in float32, or float64 if WIDE, then cast."""
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
def gather_rows(
    source,
    output,
    slots_ptr,
    batch,
    program,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNKS: tl.constexpr,
    SCALE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """A program's part of output[i] = source[slots[i]]: ROWS x COLUMNS values, of which CHUNKS make up a row."""
    row = program // CHUNKS * ROWS + tl.arange(0, ROWS)
    column = program % CHUNKS * COLUMNS + tl.arange(0, COLUMNS)
    named = row < batch
    live = named[:, None] & (column < WIDTH)[None, :]
    # rows past the batch read slot 0 under a mask
    slot = tl.load(slots_ptr + row, mask=named, other=0)
    values = tl.load(source + slot[:, None] * WIDTH + column[None, :], mask=live, other=0)
    place = row[:, None] * WIDTH + column[None, :]
    tl.store(output + place, as_sampled(values, output, SCALE, WIDE), mask=live)


@triton.jit(do_not_specialize=["batch", "blocks_drawn"])
def gather_kernel(
    sources,
    outputs,
    weighing,
    slots_ptr,
    counters_ptr,
    batch,
    blocks_drawn,
    beta,
    beta_rest,
    FIELDS: tl.constexpr,
    WIDTHS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNKS: tl.constexpr,
    SCALES: tl.constexpr,
    WIDE: tl.constexpr,
    DRAWS: tl.constexpr = 0,
    SCHEDULED: tl.constexpr = False,
    RANDOM: tl.constexpr = 0,
    STEP: tl.constexpr = 0,
    TICKET: tl.constexpr = 0,
    EDGE_LOW: tl.constexpr = 0,
):
    """outputs[f][i] = sources[f][slots[i]], scaled and cast; a program moves ROWS[f] x COLUMNS[f] values of a field.

    With DRAWS the first programs make the weights of as many draws each: see `weigh`.
    """
    batch = batch.to(tl.int64)
    # the program's number among those of the weights, then among those of the field in turn
    local = tl.program_id(0).to(tl.int64)
    if DRAWS > 0:
        programs = (batch + (DRAWS - 1)) // DRAWS
        if local < programs:
            weigh(
                weighing,
                counters_ptr,
                local,
                programs,
                batch,
                blocks_drawn,
                beta,
                beta_rest,
                DRAWS,
                SCHEDULED,
                RANDOM,
                STEP,
                TICKET,
                EDGE_LOW,
            )
        local -= programs
    for f in tl.static_range(FIELDS):
        programs = (batch + (ROWS[f] - 1)) // ROWS[f] * CHUNKS[f]
        if (local >= 0) & (local < programs):
            gather_rows(
                sources[f],
                outputs[f],
                slots_ptr,
                batch,
                local,
                WIDTHS[f],
                ROWS[f],
                COLUMNS[f],
                CHUNKS[f],
                SCALES[f],
                WIDE[f],
            )
        local -= programs


@triton.jit(do_not_specialize=["rows", "skipped", "capacity", "blocks"])
def write_kernel(
    inputs,
    stores,
    counters_ptr,
    high_ptr,
    masses_ptr,
    rows,
    skipped,
    capacity,
    blocks,
    FIELDS: tl.constexpr,
    WIDTHS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNKS: tl.constexpr,
    ADDED: tl.constexpr,
    EDGE_HIGH: tl.constexpr,
    HIGHEST: tl.constexpr,
    FANOUT: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """stores[f][(added + i) % capacity] = inputs[f][i] for skipped <= i < rows.

    With HIGHEST, further programs look up the largest stored mass for the launch that follows.
    """
    skipped = skipped.to(tl.int64)
    kept = rows - skipped
    start = (tl.load(counters_ptr + ADDED) + skipped) % capacity
    # the program's number among those of the field in turn
    local = tl.program_id(0).to(tl.int64)
    for f in tl.static_range(FIELDS):
        programs = (kept + (ROWS[f] - 1)) // ROWS[f] * CHUNKS[f]
        if (local >= 0) & (local < programs):
            row = local // CHUNKS[f] * ROWS[f] + tl.arange(0, ROWS[f])
            column = local % CHUNKS[f] * COLUMNS[f] + tl.arange(0, COLUMNS[f])
            live = (row < kept)[:, None] & (column < WIDTHS[f])[None, :]
            place = (skipped + row)[:, None] * WIDTHS[f] + column[None, :]
            values = tl.load(inputs[f] + place, mask=live, other=0)
            # no more rows than slots: the ring is passed at most once
            slot = start + row
            slot = tl.where(slot >= capacity, slot - capacity, slot)
            place = slot[:, None] * WIDTHS[f] + column[None, :]
            tl.store(stores[f] + place, values.to(stores[f].dtype.element_ty), mask=live)
        local -= programs
    if HIGHEST:
        if local >= 0:
            block = local * BLOCKS + tl.arange(0, BLOCKS)
            # blocks past the end hold no mass
            high = tl.load(high_ptr + block, mask=block < blocks, other=0)
            stale = high < 0
            place = block[:, None] * FANOUT + tl.arange(0, FANOUT)[None, :]
            # only blocks that changed are looked at again
            masses = tl.load(masses_ptr + place, mask=stale[:, None], other=0)  # [BLOCKS, FANOUT]
            high = tl.where(stale, tl.max(masses, axis=1), high)
            # copies of a thread's block in other threads have been read before it changes
            tl.debug_barrier()
            tl.store(high_ptr + block, high, mask=stale)
            tl.atomic_max(counters_ptr + EDGE_HIGH, tl.max(high, axis=0), sem="relaxed")
