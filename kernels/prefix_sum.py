"""Block sums and inclusive scans of int64 numbers."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["length", "count"])
def block_sums_kernel(values_ptr, sums_ptr, length, count, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """sums[i] = sum of values[i * BLOCK : (i + 1) * BLOCK]; each program makes ROWS of them."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    place = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    # values past the end add nothing
    values = tl.load(values_ptr + place, mask=place < length, other=0)  # [ROWS, BLOCK]
    tl.store(sums_ptr + row, tl.sum(values, axis=1), mask=row < count)


@triton.jit(do_not_specialize=["length"])
def scan_kernel(values_ptr, before_ptr, out_ptr, length, BLOCK: tl.constexpr, FIRST: tl.constexpr):
    """out[i] = values[0] + ... + values[i]; before[p] is the sum of all blocks up to and including block p."""
    program = tl.program_id(0).to(tl.int64)
    place = program * BLOCK + tl.arange(0, BLOCK)
    live = place < length
    # values past the end add nothing
    values = tl.load(values_ptr + place, mask=live, other=0)  # [BLOCK]
    sums = tl.cumsum(values, axis=0)
    if not FIRST:
        # the first block has none before it
        sums += tl.load(before_ptr + program - 1, mask=program > 0, other=0)
    tl.store(out_ptr + place, sums, mask=live)
