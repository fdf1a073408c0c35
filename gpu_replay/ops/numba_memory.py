# mypy: ignore-errors
# (types are what Numba infers)
"""Memory by its address, for compiled loops that take the arrays of any schema without being compiled for each.

Numba compiles a function anew for every combination of argument types, which takes seconds. So what differs between
buffers, the arrays of their fields, comes as one tuple by its address; the loops read from it what C extensions read
through the macros of `ndarrayobject.h`, whose layout is NumPy's binary interface. `SUPPORTED` says whether this
interpreter and this NumPy have that layout; it is found by looking at an array, and without it nothing here is used.
"""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

# where objects keep what, in bytes from their beginning
_TYPE = object.__basicsize__ - 8
_DATA = object.__basicsize__
_DIMENSIONS, _SHAPE, _DTYPE, _FLAGS = _DATA + 8, _DATA + 16, _DATA + 40, _DATA + 48
_ITEMS = tuple.__basicsize__
# a list: how many items, and where they are; a float: its number
_COUNT, _LISTED, _NUMBER = object.__basicsize__, object.__basicsize__ + 8, object.__basicsize__
# numbers of a row that is searched and changed as one vector
ROW_WIDTH = 32
# contiguous in C's order, and aligned
_PLAIN = 0x101


def _layout_is_known() -> bool:
    """Whether arrays and tuples lie in memory as they are read here."""
    with_lock = getattr(sys, "_is_gil_enabled", lambda: True)()
    if sys.implementation.name != "cpython" or not with_lock or ctypes.sizeof(ctypes.c_void_p) != 8:
        return False
    if np.ndarray.__basicsize__ < _FLAGS + 4:
        return False
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    held = (array,)

    def at(place, kind=ctypes.c_int64):
        return kind.from_address(place).value

    place = at(id(held) + _ITEMS)
    if place != id(array):
        return False
    flags = at(place + _FLAGS, ctypes.c_int32)
    found = at(place + _TYPE), at(place + _DATA), at(place + _DIMENSIONS, ctypes.c_int32), at(place + _DTYPE), flags
    if found != (id(np.ndarray), array.ctypes.data, 2, id(array.dtype), array.flags.num):
        return False
    shape = at(place + _SHAPE)
    if (at(shape), at(shape + 8)) != array.shape:
        return False
    listed = [0.5]
    number = at(at(id(listed) + _LISTED))
    if (at(id(listed) + _TYPE), at(id(listed) + _COUNT), number) != (id(list), 1, id(listed[0])):
        return False
    return (at(number + _TYPE), at(number + _NUMBER, ctypes.c_double)) == (id(float), 0.5)


SUPPORTED = _layout_is_known()


def places_of(*arrays: np.ndarray) -> list[int]:
    """Addresses and sizes of contiguous arrays, one after the other, for `array_at`."""
    return [number for each in arrays for number in (each.__array_interface__["data"][0], each.size)]


def compiled(function: Any, *, nogil: bool = False) -> Any:
    """The function compiled, and the result kept for other processes where there is a place for it.

    nogil: whether other threads run Python meanwhile.
    """
    try:
        return njit(cache=True, error_model="numpy", nogil=nogil)(function)
    except RuntimeError:
        # nowhere to keep compiled code: it is made anew in each process
        return njit(error_model="numpy", nogil=nogil)(function)


# only called by other loops: what Python would need to call them is not compiled
inlined = njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)


@intrinsic
def load(typingctx, address, like):
    """The number of the type of `like` at an address, aligned or not."""

    def codegen(context, builder, signature, args):
        kind = context.get_data_type(signature.return_type)
        return builder.load(builder.inttoptr(args[0], kind.as_pointer()), align=1)

    return like(address, like), codegen


@intrinsic
def _pointer(typingctx, address, like):
    """An address as a pointer to numbers of the type of `like`."""

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(like)(address, like), codegen


@intrinsic
def array_from(typingctx, address, count, like):
    """The array of so many numbers of the type of `like` from an address on; nothing is compiled for it alone."""

    def codegen(context, builder, signature, args):
        kind = signature.return_type
        array, number = context.make_array(kind)(context, builder), context.get_data_type(kind.dtype)
        size, integer = context.get_abi_sizeof(number), context.get_value_type(types.intp)
        data = builder.inttoptr(args[0], number.as_pointer())
        populate_array(array, data, [args[1]], [ir.Constant(integer, size)], ir.Constant(integer, size), meminfo=None)
        return array._getvalue()

    return types.Array(like, 1, "C")(types.int64, types.int64, like), codegen


@inlined
def array_at(place, like):
    """The array whose address and size are the two numbers of `place`: a call takes one array faster than many."""
    return carray(_pointer(place[0], like), (place[1],))


@intrinsic
def store(typingctx, address, number):
    """Put a number at an address, aligned or not."""

    def codegen(context, builder, signature, args):
        kind = context.get_data_type(signature.args[1])
        builder.store(args[1], builder.inttoptr(args[0], kind.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(address, number), codegen


@intrinsic
def copy(typingctx, target, source, count):
    """Copy so many bytes from one address to another."""

    def codegen(context, builder, signature, args):
        byte = ir.IntType(8).as_pointer()
        to, origin = (builder.inttoptr(each, byte) for each in args[:2])
        cgutils.raw_memcpy(builder, to, origin, args[2], 1, align=1)
        return context.get_dummy_value()

    return types.void(target, source, count), codegen


@intrinsic
def shift(typingctx, array, target, origin, count):
    """Move so many numbers of a contiguous array of one dimension to another place in it."""

    def codegen(context, builder, signature, args):
        kind, numbers = signature.args[0], args[1:]
        data = context.make_array(kind)(context, builder, args[0]).data
        places = [
            context.cast(builder, number, of, types.int64)
            for number, of in zip(numbers, signature.args[1:], strict=True)
        ]
        to, origin = (builder.gep(data, [place]) for place in places[:2])
        cgutils.raw_memmove(builder, to, origin, places[2], context.get_abi_sizeof(context.get_data_type(kind.dtype)))
        return context.get_dummy_value()

    return types.void(array, target, origin, count), codegen


def _row_at(builder, address, kind):
    """Where a short row of numbers lies, all of them as one vector, and their places in it."""
    row, integer = ir.VectorType(kind, ROW_WIDTH), ir.IntType(32)
    where = builder.inttoptr(address, row.as_pointer())
    places = ir.Constant(ir.VectorType(integer, ROW_WIDTH), [ir.Constant(integer, place) for place in range(ROW_WIDTH)])
    return where, builder.load(where, align=kind.width // 8), places


def _all_of(builder, number):
    """A vector whose numbers are all the same."""
    first = ir.IntType(32)(0)
    row = builder.insert_element(ir.Constant(ir.VectorType(number.type, ROW_WIDTH), ir.Undefined), number, first)
    return builder.shuffle_vector(row, row, ir.Constant(ir.VectorType(ir.IntType(32), ROW_WIDTH), [first] * ROW_WIDTH))


def _bits_of(builder, chosen):
    """Which places of a row are chosen, as a number of one bit each."""
    return builder.bitcast(chosen, ir.IntType(ROW_WIDTH))


@intrinsic
def place_in_row(typingctx, address, number):
    """The first place of a number in the row of `ROW_WIDTH` at an address; `ROW_WIDTH` without it."""

    def codegen(context, builder, signature, args):
        _, row, _ = _row_at(builder, args[0], args[1].type)
        bits = _bits_of(builder, builder.icmp_signed("==", row, _all_of(builder, args[1])))
        return builder.zext(builder.cttz(bits, ir.IntType(1)(0)), ir.IntType(64))

    return types.int64(address, number), codegen


@intrinsic
def before_in_row(typingctx, address, others, code, number, head, wrap):
    """How many entries of two rows of `ROW_WIDTH` are before one: of larger codes, or equal ones and smaller numbers.

    address, others: of int64 codes and of int32 numbers, which count from `head` on, below `wrap`, and then from 0.
    """

    def codegen(context, builder, signature, args):
        _, codes, _ = _row_at(builder, args[0], args[2].type)
        _, numbers, _ = _row_at(builder, args[1], args[3].type)
        code, number, head, wrap = (_all_of(builder, each) for each in args[2:])

        def counted(each):
            return builder.select(builder.icmp_signed(">=", each, head), builder.sub(each, wrap), each)

        earlier = builder.icmp_signed("<", counted(numbers), counted(number))
        tied = builder.and_(builder.icmp_signed("==", codes, code), earlier)
        bits = _bits_of(builder, builder.or_(builder.icmp_signed(">", codes, code), tied))
        return builder.zext(builder.ctpop(bits), ir.IntType(64))

    small = types.int32
    return types.int64(types.int64, types.int64, types.int64, small, small, small), codegen


def _moved(builder, row, steps):
    """A row whose numbers come from so many places further on; 0 comes in at the end, and any at the beginning."""
    integer = ir.IntType(32)
    origins = [ir.Constant(integer, max(place + steps, 0)) for place in range(ROW_WIDTH)]
    none = ir.Constant(row.type, None)
    return builder.shuffle_vector(row, none, ir.Constant(ir.VectorType(integer, ROW_WIDTH), origins))


@intrinsic
def put_in_row(typingctx, address, place, number):
    """Put a number in the row of `ROW_WIDTH` at an address: those from its place on move up, and the last goes."""

    def codegen(context, builder, signature, args):
        where, row, places = _row_at(builder, args[0], args[2].type)
        place = _all_of(builder, builder.trunc(args[1], ir.IntType(32)))
        later = builder.select(builder.icmp_signed(">", places, place), _moved(builder, row, -1), row)
        found = builder.select(builder.icmp_signed("==", places, place), _all_of(builder, args[2]), later)
        builder.store(found, where, align=args[2].type.width // 8)
        return context.get_dummy_value()

    return types.void(address, types.int64, number), codegen


@intrinsic
def take_from_row(typingctx, address, place, like):
    """Take a number out of the row of `ROW_WIDTH` at an address: later ones move down, and the last becomes 0."""

    def codegen(context, builder, signature, args):
        where, row, places = _row_at(builder, args[0], args[2].type)
        place = _all_of(builder, builder.trunc(args[1], ir.IntType(32)))
        found = builder.select(builder.icmp_signed(">=", places, place), _moved(builder, row, 1), row)
        builder.store(found, where, align=args[2].type.width // 8)
        return context.get_dummy_value()

    return types.void(address, types.int64, like), codegen


@intrinsic
def prefetch(typingctx, address):
    """Begin to load the cache line at an address."""

    def codegen(context, builder, signature, args):
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch")
        # for reading, data, to all levels
        builder.call(function, [builder.inttoptr(args[0], byte), *(number(each) for each in (0, 3, 1))])
        return context.get_dummy_value()

    return types.void(address), codegen


@intrinsic
def high_product(typingctx, one, two):
    """The upper 64 bits of the product of two uint64."""

    def codegen(context, builder, signature, args):
        wide = ir.IntType(128)
        product = builder.mul(*(builder.zext(each, wide) for each in args))
        return builder.trunc(builder.lshr(product, ir.Constant(wide, 64)), ir.IntType(64))

    return types.uint64(types.uint64, types.uint64), codegen


@inlined
def item(address, place):
    """The address of an item of a tuple."""
    return load(address + _ITEMS + 8 * place, np.int64(0))


@inlined
def data_of(array):
    """The address of the data of an array."""
    return load(array + _DATA, np.int64(0))


@inlined
def dtype_of(array):
    """The address of the dtype of an array."""
    return load(array + _DTYPE, np.int64(0))


@inlined
def type_of(value):
    """The address of the type of an object."""
    return load(value + _TYPE, np.int64(0))


@inlined
def numbers_of(array):
    """An array of int64, of one dimension and contiguous, by its address."""
    size = load(load(array + _SHAPE, np.int64(0)), np.int64(0))
    return carray(_pointer(data_of(array), np.int64(0)), (size,))


@inlined
def only_item(listed):
    """The address of the item of a list of one, 0 for other lists."""
    if load(listed + _COUNT, np.int64(0)) != 1:
        return np.int64(0)
    return load(load(listed + _LISTED, np.int64(0)), np.int64(0))


@inlined
def number_of(value):
    """The address of the float64 of a float."""
    return value + _NUMBER


@inlined
def rows_of(array, shape):
    """The rows of an array that is [rows, *shape], contiguous and aligned; else -1."""
    if load(array + _FLAGS, np.int32(0)) & _PLAIN != _PLAIN:
        return np.int64(-1)
    if load(array + _DIMENSIONS, np.int32(0)) != shape.size + 1:
        return np.int64(-1)
    sides = load(array + _SHAPE, np.int64(0))
    for axis in range(shape.size):
        if load(sides + 8 * (axis + 1), np.int64(0)) != shape[axis]:
            return np.int64(-1)
    return load(sides, np.int64(0))


@inlined
def move(target, source, count):
    """Copy the bytes of a row: the few of a scalar without a call."""
    if count == 4:
        store(target, load(source, np.int32(0)))
    elif count == 8:
        store(target, load(source, np.int64(0)))
    elif count == 16:
        store(target, load(source, np.int64(0)))
        store(target + 8, load(source + 8, np.int64(0)))
    elif count == 1:
        store(target, load(source, np.int8(0)))
    else:
        copy(target, source, count)


def forget_older_code(compiled: Any, *modules: ModuleType) -> None:
    """Let what is kept of a file's functions be compiled again if one of these modules, whose loops and numbers they
    contain, is newer: Numba itself looks only at the file.
    """
    if not compiled.stats.cache_path:
        return
    newest = max(Path(module.__file__ or "").stat().st_mtime for module in modules)
    kept = f"{Path(compiled.py_func.__code__.co_filename).stem}.*.nbi"
    for index in Path(compiled.stats.cache_path).glob(kept):
        # another process may be doing the same
        with suppress(FileNotFoundError):
            if index.stat().st_mtime < newest:
                index.unlink()
