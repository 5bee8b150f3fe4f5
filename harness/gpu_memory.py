"""Memory of the GPU that two processes share."""

from __future__ import annotations

import ctypes
import functools
import math
from contextlib import suppress
from types import SimpleNamespace


class Handle(ctypes.Structure):  # cudaIpcMemHandle_t, which is passed by value
    _fields_ = [("reserved", ctypes.c_char * 64)]


@functools.cache
def gpu_memory(shape: tuple[int, ...], handle: bytes | None = None):
    """A float32 tensor in GPU memory, and the handle by which another process can open that memory (CUDA IPC). With a
    handle: the memory behind it. (None, None) where that is not possible."""
    import torch

    with suppress(OSError, AttributeError, RuntimeError):
        cuda = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.partition('.')[0]}")  # the one that PyTorch has loaded
        torch.cuda.synchronize()  # creates the context
        pointer, found = ctypes.c_void_p(), Handle.from_buffer_copy(handle or bytes(64))
        if handle:
            failed = cuda.cudaIpcOpenMemHandle(ctypes.byref(pointer), found, 1)
        else:
            failed = cuda.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(4 * math.prod(shape)))
            failed = failed or cuda.cudaIpcGetMemHandle(ctypes.byref(found), pointer)
        if not failed:
            view = dict(shape=shape, typestr="<f4", data=(pointer.value, False), version=3)
            return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=view), device="cuda"), bytes(found)
        cuda.cudaGetLastError()  # or PyTorch raises it later
    return None, None
