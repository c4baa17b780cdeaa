"""Tensors of type BF16, which Triton's Python API hands over by DLPack alone. Knows nothing of what is in them.

The structures are DLPack's; numpy knows the protocol and not the type.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_CPU = 1
_UINT, _BFLOAT = 1, 4
_NAME = b"dltensor"


class _Device(ctypes.Structure):
    _fields_ = (("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32))


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter))


_get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
_lent: dict[int, tuple[Any, ...]] = {}  # what capsules point to, by address, until their receiver lets go


def to_capsule(array: npt.NDArray[Any]) -> Any:
    """A bfloat16 array as a DLPack capsule; the array stays alive until the receiver has let go of it."""
    array = np.ascontiguousarray(array)
    shape = (ctypes.c_int64 * array.ndim)(*array.shape)
    managed = _Managed(
        _Tensor(array.ctypes.data, _Device(_CPU, 0), array.ndim, _DataType(_BFLOAT, 16, 1), shape, None, 0),
        None,
        _release,
    )
    address = ctypes.addressof(managed)
    _lent[address] = (managed, shape, array)
    return _new_capsule(address, _NAME, None)


def from_capsule(capsule: Any) -> npt.NDArray[Any]:
    """The bfloat16 array of a DLPack capsule in host memory, not copied.

    Raises:
        TypeError: the capsule holds another type.
    """
    managed = ctypes.cast(_get_pointer(capsule, _NAME), ctypes.POINTER(_Managed))
    dtype = managed.contents.tensor.dtype
    if dtype.code != _BFLOAT:
        raise TypeError(f"a DLPack tensor of type code {dtype.code}; expected {_BFLOAT} (bfloat16)")
    dtype.code = _UINT  # the same bits, in a type that numpy takes
    found: npt.NDArray[Any] = np.from_dlpack(_Holder(capsule))
    return found.view(BFLOAT16)


class _Holder:
    """What numpy asks for a capsule."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CPU, 0


def _forget(address: int) -> None:
    _lent.pop(address, None)


_release = _Deleter(_forget)
