"""Checks the values that users pass in, and converts them to the dtype and the device of the buffer.

Nothing here stores anything: a call that raises leaves the buffer as it was. Values already on a CUDA device are never
looked at, since that would stall it; there whole numbers are not narrowed, and floats that are too large become
infinite. References to inputs may be dropped immediately: memory of another CUDA stream is not reused before the
current stream has read it.
"""

from __future__ import annotations

import math
import os
import reprlib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_replay.fields import ALIGNMENT, DICTIONARIES, STORABLE, TORCH_OF, Field, as_numpy

_DENSE = (Tensor, torch.nn.Parameter)
# largest batch size; no memory holds more rows
_MOST_ROWS = 2**48
# largest alpha, beta and eps of a sampler: products and sums with them stay finite
MOST_EXPONENT = 1e100
_NUMPY_OF = {each: name for name, each in TORCH_OF.items()}
_INT64 = np.dtype(np.int64)
# of no number
_NO_DTYPE = np.dtype("V1")
_NUMBERS = (bool, int, float)
# kinds of single numbers that are stored as they are, if they are smaller than this
_FLOATS = (float, np.float32, np.float64)
_SINGLE: dict[np.dtype[Any], tuple[type, ...]] = {
    **dict.fromkeys(map(np.dtype, (np.float32, np.float64)), _FLOATS),
    _INT64: (int, np.int64),
    np.dtype(bool): (bool, np.bool_),
}
_SMALL = 2.0**62
_REAL = (np.dtype(np.float32), np.dtype(np.float64))
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
# unsigned numbers of torch that int64 can hold whatever they are
_UNSIGNED = (torch.uint16, torch.uint32)


def record_stream(tensor: Tensor, stream: torch.cuda.Stream | None = None) -> Tensor:
    """Keep the memory of a CUDA tensor from being reused before this stream, or the current one, has read it.

    Nothing changes for a tensor that was made on that stream, or on a CPU. Returns the tensor.
    """
    if tensor.is_cuda:
        tensor.record_stream(stream or torch.cuda.current_stream(tensor.device))
    return tensor


def same_device(actual: torch.device, asked: torch.device) -> bool:
    """Whether two devices are one, "cuda" without an index being the current one."""
    return actual.type == asked.type and (asked.index is None or actual.index in (None, asked.index))


def as_tensor(name: str, value: Any, device: torch.device) -> Tensor:
    """The value as a detached tensor on the CPU or on `device`, uint16 and uint32 as int64, others unchanged.

    Raises TypeError for what is no array of plain numbers, ValueError for a tensor on a third device.
    """
    if isinstance(value, Tensor):
        if type(value) not in _DENSE or value.layout is not torch.strided or value.is_nested:
            kind = "nested" if value.is_nested else f"{value.layout} {type(value).__name__}"
            raise TypeError(f"{name!r} must be a dense torch.Tensor or an array; found a {kind} one: convert it first.")
        if not value.is_cpu and not same_device(value.device, device):
            raise ValueError(
                f"{name!r} is on device {str(value.device)!r}, the buffer on {str(device)!r}; "
                f"move it with .to({str(device)!r})."
            )
        if not value.is_cpu:
            record_stream(value)
        if value.dtype in _UNSIGNED:
            return value.to(torch.int64)
        return value.detach() if value.requires_grad else value
    array = _array_from(name, value)
    # torch takes neither negative strides nor those of a packed record
    if not array.flags.writeable or any(stride < 0 or stride % array.itemsize for stride in array.strides):
        array = array.copy()
    return torch.from_numpy(array)


# name, field, the NumPy dtype that is stored as it is, and shape
Checks = list[tuple[str, Field, "np.dtype[Any]", tuple[int, ...]]]


def checks_of(fields: Mapping[str, Field], *, on_host: bool) -> Checks:
    """What the values of these fields are compared with; on a device no array is stored as it is."""
    dtypes = _NUMPY_OF if on_host else {}
    return [(name, field, dtypes.get(field.dtype, _NO_DTYPE), field.shape) for name, field in fields.items()]


def ready_rows(values: Mapping[str, Any], checks: Checks, rows: int | None, device: torch.device) -> int:
    """How many rows of these values a kernel can read as they are, 0 if it cannot.

    Each must be a dense tensor of its field's dtype and shape on the device, whose numbers lie end to end in memory
    that begins as torch's own does.

    rows: how many there must be; None: as many as the first value has.
    """
    try:
        for name, field, _, shape in checks:
            value = values[name]
            if type(value) is not Tensor or value.dtype is not field.dtype:
                return 0
            if rows is None:
                rows = value.shape[0] if value.dim() else 0
            if (
                value.shape != (rows, *shape)
                or value.device != device
                or not value.is_contiguous()
                or value.is_neg()
                or (address := value.data_ptr()) % ALIGNMENT
                # what has no rows, and zeros without memory, have no address
                or not address
            ):
                return 0
    except RuntimeError:
        # sparse, nested, or within torch.func
        return 0
    return rows or 0


def numpy_view(name: str, tensor: Tensor) -> np.ndarray:
    """A dense CPU tensor as `as_numpy` shows it; a lazy one is computed.

    Raises TypeError for a tensor without memory, as there are within torch.func.
    """
    try:
        return as_numpy(tensor)
    except (RuntimeError, TypeError) as error:
        if (computed := materialized(tensor)) is not tensor:
            return as_numpy(computed)
        raise TypeError(
            f"{name!r} must be a tensor with its numbers in memory; NumPy cannot read this one: "
            f"{str(error).splitlines()[0]} Within torch.func.grad or vmap return it, and call the buffer with the "
            "result."
        ) from None


def materialized(tensor: Tensor) -> Tensor:
    """The tensor with its values in memory; lazy negations, and zeros without memory, are materialized."""
    return tensor.resolve_neg().clone() if tensor.is_neg() or tensor._is_zerotensor() else tensor


def _masked(value: Any) -> bool:
    """Whether an array, or an array in a list, has a mask, which the conversion would lose."""
    if isinstance(value, (list, tuple)):
        return any(map(_masked, value))
    return isinstance(value, np.ma.MaskedArray)


def _array_from(name: str, value: Any) -> np.ndarray:
    """What is no tensor as an array of a dtype that torch has: unsigned and byte-swapped numbers are converted.

    Raises TypeError for what is no array of plain numbers.
    """
    array = value
    if type(value) is not np.ndarray:
        if _masked(value):
            raise TypeError(
                f"{name!r} must be an array without a mask; found a masked one: fill it with .filled(number)."
            )
        if not isinstance(value, (list, tuple)) and isinstance(value, DICTIONARIES):
            parts = ", ".join(map(repr, value.keys()))
            raise TypeError(f"{name!r} must be a tensor or an array; found a dictionary of {parts}.")
        try:
            array = np.asarray(value)
        except (ValueError, TypeError, RuntimeError) as error:
            raise TypeError(f"{name!r} must be a tensor or an array; found {type(value).__name__}: {error}") from None
    if array.dtype in TORCH_OF:
        return array
    native = array.astype(array.dtype.newbyteorder("="))
    if native.dtype in TORCH_OF:
        return native
    if native.dtype.kind == "u" and (not native.size or native.max() <= np.iinfo(np.int64).max):
        return native.astype(np.int64)
    raise TypeError(f"{name!r} must hold booleans, integers or floating numbers; found NumPy dtype {array.dtype}.")


def as_array(name: str, value: Any, device: torch.device) -> np.ndarray | Tensor:
    """The value on the CPU as an array of numbers that can be stored; a tensor of other numbers, or of bfloat16, which
    NumPy lacks, as it is.
    """
    if not isinstance(value, Tensor):
        return _array_from(name, value)
    tensor = as_tensor(name, value, device)
    return numpy_view(name, tensor) if tensor.dtype in _NUMPY_OF else tensor


def as_stored(name: str, value: np.ndarray | Tensor, dtype: torch.dtype) -> np.ndarray:
    """Convert a result of `as_array` to the dtype of a field, as `as_numpy` shows it; raises as `cast` does."""
    if isinstance(value, Tensor) or dtype is torch.bfloat16:
        tensor = value if isinstance(value, Tensor) else as_tensor(name, value, torch.device("cpu"))
        return numpy_view(name, cast(name, tensor, dtype))
    target = _NUMPY_OF[dtype]
    if value.dtype == target:
        return value
    rule = _cast_rule(TORCH_OF[value.dtype], dtype)
    # the square of the largest float32 is no larger; a sum that is not a number is looked at again
    if rule == "lossless" or (rule == "same kind" and target == np.float32 and np.vdot(value, value) < 1e76):
        return value.astype(target)
    return cast(name, as_tensor(name, value, torch.device("cpu")), dtype).numpy()


def as_rows(
    given: dict[str, Any], checks: Checks, envs: int | None, device: torch.device, *, on_host: bool, bare: bool = False
) -> tuple[dict[str, Any], int, bool, bool]:
    """The values of all fields, in any form that `add` takes, as the engine stores them: by name in the order of the
    fields, each `[rows, *shape]`, arrays as `as_numpy` shows them for the host's engine, tensors for another; the
    number of rows; whether a kernel can read all of them as they are; and whether they came as one row without its
    axis.

    envs: environments, one step of each of which is given; None where every value has as many rows as the first.
    bare: whether a single row stays without its axis: as an array of the field's shape, or a number.
    Raises TypeError or ValueError that names the field; values and the buffer stay as they were.
    """
    values: dict[str, Any] = {}
    count, single = envs, False
    if not on_host and (rows := ready_rows(given, checks, envs, device)):
        return given, rows, True, False
    for name, field, dtype, shape in checks:
        value = given[name]
        # fast path: what can be stored as it is
        try:
            array = value.numpy() if type(value) is Tensor and on_host else value
            if type(array) is np.ndarray and array.dtype == dtype:
                sides = array.shape
                if sides and sides[1:] == shape and (sides[0] == count or count is None):
                    values[name], count = array, sides[0]
                    continue
        except (RuntimeError, TypeError):
            # elsewhere, not dense, with a gradient, or lazy
            array = None
        if not values and envs in (None, 1) and _lack_axis(given, checks):
            count, single = 1, True
        if single and type(array) is np.ndarray and array.dtype == dtype and array.shape == shape:
            values[name] = array if bare else array[None]
        elif (
            single
            and not shape
            and type(value) in _SINGLE.get(dtype, ())
            # numbers of NumPy that are no Python numbers fit, and take long to compare
            and (not isinstance(value, (int, float)) or -_SMALL < value < _SMALL)
        ):
            values[name] = value if bare else np.array((value,), dtype)
        else:
            one = with_axis(value) if single else value
            rows = as_field(name, one, field, count, device, on_host=on_host, steps=envs is not None)
            values[name], count = rows[0] if bare and single else rows, rows.shape[0]
    return values, count or 0, False, single


def with_axis(value: Any) -> Any:
    """A value of one row with the axis of rows."""
    return value[None] if isinstance(value, (Tensor, np.ndarray)) else [value]


def _lack_axis(given: Mapping[str, Any], checks: Checks) -> bool:
    """Whether all values come as a single environment gives them: one row, without the axis of rows."""
    for name, _, _, shape in checks:
        value = given[name]
        try:
            sides = getattr(value, "shape", None)
        except RuntimeError:
            # a nested tensor has none, and is refused later
            return False
        if sides is None:
            sides = () if type(value) in _NUMBERS else _array_from(name, value).shape
        # what is empty, such as [], is no row
        if len(sides) != len(shape) or 0 in sides:
            return False
    return True


def as_field(
    name: str, value: Any, field: Field, rows: int | None, device: torch.device, *, on_host: bool, steps: bool = False
) -> Any:
    """The value as `[m, *field.shape]` of the field's dtype, of a scalar also given as `[m, 1]`, of no rows as `[0]`: a
    tensor on the CPU or on `device`, or, for the host's engine, an array as `as_numpy` shows it.

    rows:  the `m` that the other fields of this call have, or None. steps: whether it is the number of environments.
    Raises TypeError or ValueError that names the field; values and the buffer stay as they were.
    """
    array: Any = as_array(name, value, device) if on_host else as_tensor(name, value, device)
    if not field.shape and array.ndim == 2 and array.shape[1] == 1:
        array = array.reshape(-1)
    sides, shape = field.shape, tuple(array.shape)
    if shape == (0,) and not steps:
        # no rows, such as [], have no sides
        array = array.reshape(0, *sides)
        shape = (0, *sides)
    if steps and shape != (rows, *sides):
        raise ValueError(
            f"field {name!r} needs shape {[rows, *sides]}, one step of each of the {rows} environments; found "
            f"{list(shape)}."
        )
    if not shape or shape[1:] != sides:
        expected = f"[m, {', '.join(map(str, sides))}]" if sides else "[m]"
        hint = " Add the leading batch dimension, value[None], or give no value with it." if shape == sides else ""
        raise ValueError(f"field {name!r} needs shape {expected}; found {list(shape)}.{hint}")
    if rows is not None and shape[0] != rows:
        raise ValueError(f"field {name!r} has {shape[0]} rows where the others of this add have {rows}.")
    return (as_stored if on_host else cast)(name, array, field.dtype)


@cache
def _cast_rule(source: torch.dtype, dtype: torch.dtype) -> str:
    """Whether numbers of one dtype can become those of another: "never", "lossless", or, looked at, "same kind", or
    "flags" where they are 0 or 1.
    """
    if dtype == torch.bool and source in STORABLE:
        return "lossless" if source == dtype else "flags"
    if source not in STORABLE or (source.is_floating_point and not dtype.is_floating_point):
        return "never"
    # integers up to 2**63 fit every floating dtype but the half floats
    roomy = source == torch.bool or dtype != torch.float16
    return "lossless" if roomy and torch.promote_types(source, dtype) == dtype else "same kind"


def cast(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in another dtype, refusing what would lose a value by kind or by range."""
    source = tensor.dtype
    rule = _cast_rule(source, dtype)
    if rule == "lossless" or not tensor.numel():
        return tensor.to(dtype)
    refusal = f"field {name!r} is stored as {dtype}; found {source}, which cannot be cast without loss."
    if rule == "never":
        raise TypeError(f"{refusal} Convert it yourself first, if that is what you mean.")
    if rule == "flags":
        result = tensor != 0
        if tensor.is_cpu and not torch.equal(result.to(source), tensor):
            raise ValueError(f"{refusal} Flags may be 0 and 1 of any dtype; found other numbers.")
        return result
    if tensor.device.type != "cpu":
        if source.is_floating_point or dtype.is_floating_point:
            return tensor.to(dtype)
        raise TypeError(f"{refusal} Its range cannot be checked on the device without a stall: cast it yourself.")
    result = tensor.to(dtype)
    if dtype.is_floating_point:
        # a sum is finite only of finite numbers
        if not result.sum(dtype=torch.float32).isfinite() and bool((result.isinf() & tensor.isfinite()).any()):
            raise ValueError(f"{refusal} The largest value does not fit {dtype}.")
    elif not torch.equal(result.to(source), tensor) or bool(((result < 0) != (tensor < 0)).any()):
        raise ValueError(f"{refusal} Values from {tensor.min().item()} to {tensor.max().item()} do not fit {dtype}.")
    return result


def as_keys(value: Any, device: torch.device, name: str = "keys") -> Tensor:
    """Keys, or other integers of this name, as (m,) int64: a tensor or array of integers, a list of ints, or one int.

    Raises TypeError for other dtypes, ValueError for more than one dimension or a third device.
    """
    # fast path: what `sample` and `add` returned
    is_dense = type(value) is Tensor and value.dtype is torch.int64 and value.layout is torch.strided
    if is_dense and value.device == device and value.dim() == 1:
        return value if value.is_cpu else record_stream(value)
    try:
        tensor = as_tensor(name, value, device)
    except TypeError:
        found = f"{value.layout} {type(value).__name__}" if isinstance(value, Tensor) else reprlib.repr(value)
        raise TypeError(
            f"{name} must be integers of 64 bits, as add and sample return them: a dense tensor, an array, a list or "
            f"one int; found {found}."
        ) from None
    # an empty list has no type of its own
    untyped = tensor.numel() == 0 and not isinstance(value, (Tensor, np.ndarray))
    if tensor.dtype not in _INTEGERS and not untyped:
        raise TypeError(f"{name} must be integers, as add and sample return them; found {tensor.dtype}.")
    tensor = tensor.to(torch.int64)
    if tensor.dim() == 0:
        tensor = tensor.reshape(1)
    if tensor.dim() != 1:
        raise ValueError(
            f"{name} must have one dimension [m]; found shape {list(tensor.shape)}. Flatten them, as keys.flatten() "
            "does, and the values that belong to them."
        )
    return tensor


_UPDATE = checks_of({"keys": Field((), torch.int64), "priorities": Field((), torch.float32)}, on_host=False)


def as_update(keys: Any, priorities: Any, device: torch.device, *, as_array: bool) -> tuple[Any, Any, bool]:
    """The keys as `as_keys` gives them, and the priorities of them as `as_priorities` does, both as arrays if asked;
    and whether a kernel can read both as they are.
    """
    if as_array:
        # fast path: what `sample` returned and a learner has computed; a sum that overflows is looked at again (`dot`
        # would warn of it)
        try:
            array = keys.numpy() if type(keys) is Tensor else keys
            numbers = priorities.numpy() if type(priorities) is Tensor else priorities
            if (
                type(array) is type(numbers) is np.ndarray
                and array.dtype == _INT64
                and array.ndim == 1
                and numbers.dtype in _REAL
                and numbers.shape == array.shape
                and np.vdot(numbers, numbers) < math.inf
            ):
                return array, numbers, False
        except (RuntimeError, TypeError):
            # elsewhere, not dense, with a gradient, or lazy
            pass
    # fast path: a kernel can read both
    elif device.type != "cpu" and ready_rows({"keys": keys, "priorities": priorities}, _UPDATE, None, device):
        return keys, priorities, True
    keys = as_keys(keys, device)
    priorities = as_priorities("priorities", priorities, keys.shape[0], device, as_array=as_array)
    return numpy_view("keys", keys) if as_array else keys, priorities, False


def as_priorities(name: str, value: Any, rows: int, device: torch.device, *, as_array: bool) -> Any:
    """Priorities, (rows,) or (rows, 1), as a (rows,) tensor of real numbers, or `as_array` of float32 or float64; on a
    CPU all are finite.

    Raises TypeError for booleans and non-numbers, ValueError for another shape, a third device or, on the CPU, for
    priorities that are not finite.
    """
    tensor = as_tensor(name, value, device)
    if tensor.dtype == torch.bool or tensor.dtype not in STORABLE:
        raise TypeError(f"{name} must be real numbers; found {tensor.dtype}.")
    if tensor.dim() == 2 and tensor.shape[1] == 1:
        tensor = tensor.reshape(-1)
    if tensor.dim() != 1 or tensor.shape[0] != rows:
        hint = ""
        if tensor.dim() == 2 and tensor.shape[0] == rows:
            # as of sequences
            hint = " Those of sequences reduce over time, as R2D2 does: 0.9 * p.amax(1) + 0.1 * p.mean(1)."
        raise ValueError(
            f"{name} must have shape [{rows}], one for each transition or sequence; found {list(tensor.shape)}.{hint}"
        )
    if device.type != "cpu":
        return tensor
    numbers = numpy_view(name, tensor.float() if tensor.dtype == torch.bfloat16 else tensor)
    if numbers.dtype not in _REAL:
        numbers = numbers.astype(np.float64)
    # one operation, which overflows to what is looked at again
    if not np.vdot(numbers, numbers) < math.inf and not np.isfinite(numbers).all():
        place = int(np.flatnonzero(~np.isfinite(numbers))[0])
        raise ValueError(
            f"{name}[{place}] is {numbers[place]}; priorities must be finite. Nothing was changed: look for a diverged "
            "loss of the learner, and for NaN or infinite numbers in the stored rewards or observations; or leave "
            "these transitions out."
        )
    return numbers if as_array else torch.from_numpy(numbers)


def check_batch_size(size: object) -> int:
    """A batch size as an int of at least 1, or TypeError / ValueError."""
    if type(size) is int and 0 < size <= _MOST_ROWS:
        return size
    return check_int("the batch size", size, 1, _MOST_ROWS)


def check_beta(beta: object) -> float | None:
    """An importance exponent as a float, or None, which stands for the sampler's own; TypeError / ValueError."""
    return None if beta is None else check_float("sample beta", beta, high=MOST_EXPONENT)


def check_key(key: object) -> int:
    """A key as an int, or TypeError; a tensor of one integer without dimensions is one."""
    if isinstance(key, Tensor) and key.dim() == 0 and not key.dtype.is_floating_point:
        key = key.item()
    if isinstance(key, bool) or not isinstance(key, (int, np.integer)):
        raise TypeError(f"`key in buffer` needs a key, an int as add returns it; found {key!r}.")
    return int(key)


def check_generators(values: object, device: torch.device) -> tuple[torch.Generator, ...]:
    """Generators of this device, or TypeError / ValueError."""
    if not isinstance(values, Iterable):
        raise TypeError(f"generators must be a list of torch.Generator; found {type(values).__name__}.")
    checked = tuple(values)
    for value in checked:
        if not isinstance(value, torch.Generator):
            raise TypeError(f"generators must be of type torch.Generator; found {type(value).__name__}.")
        if value.device.type != device.type:
            raise ValueError(f"generators must be on {device}; found one on {value.device}.")
    return checked


def check_int(name: str, value: object, least: int | None = None, most: int | None = None) -> int:
    """An int from `least` to `most`, or TypeError / ValueError."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be an int; found {value!r}.")
    if least is not None and value < least:
        raise ValueError(f"{name} must be at least {least}; found {value}.")
    if most is not None and value > most:
        raise ValueError(f"{name} must be at most {most:,}; found {value:,}.")
    return int(value)


def check_bool(name: str, value: object) -> bool:
    """A bool, or TypeError."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be True or False; found {value!r}.")
    return bool(value)


def check_float(name: str, value: object, low: float = 0.0, high: float = math.inf, *, above: bool = False) -> float:
    """A finite float from `low` to `high`, or TypeError / ValueError; `above`: greater than `low`."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"{name} must be a number; found {value!r}.")
    try:
        converted = float(value)
    except OverflowError:
        # a whole number larger than any float
        converted = math.inf
    if not low <= converted <= high or abs(converted) == math.inf or (above and converted == low):
        bound = "" if low == -math.inf else f" and {'greater than' if above else 'at least'} {low:g}"
        expected = f"finite{bound}" if high == math.inf else f"from {low:g} to {high:g}"
        raise ValueError(f"{name} must be {expected}; found {value!r}.")
    return converted


def check_choice(name: str, value: Any, allowed: tuple[str, ...]) -> Any:
    """The value if it is one of those allowed, else ValueError."""
    if value not in allowed:
        raise ValueError(f"{name} must be {', '.join(map(repr, allowed[:-1]))} or {allowed[-1]!r}; found {value!r}.")
    return value


def check_path(name: str, value: object) -> Path:
    """A path as a Path, with the home folder for `~`; TypeError for no path, ValueError for an empty one."""
    if not isinstance(value, (str, os.PathLike)) or not isinstance(os.fspath(value), str):
        raise TypeError(f"{name} must be the path of a folder or file; found {value!r}.")
    if not os.fspath(value):
        raise ValueError(f"{name} is empty; name a folder or file.")
    return Path(os.path.expanduser(value))
