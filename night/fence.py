"""Landlock (Linux 5.19), by system calls: a process that cannot read the held-out text, nor can what it starts.

It cannot look into other processes or end them (6.12) either, nor open a TCP connection (6.7): a server may have it.
"""

import ctypes
import os
import stat
import struct
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from prepare import cache_dir

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # numbers of the system calls, everywhere
READ_FILE, REFER = 1 << 2, 1 << 13  # REFER: to move files between folders
BIND_AND_CONNECT, ABSTRACT_SOCKETS_AND_SIGNALS = 3, 3
GET_VERSION, PATH_BENEATH, PR_SET_NO_NEW_PRIVS = 1, 1, 38
libc = ctypes.CDLL(None, use_errno=True)


def landlock(*args) -> int:
    words = (ctypes.c_long(arg) if isinstance(arg, int) else arg for arg in args)
    if (result := libc.syscall(*words)) < 0:
        raise OSError(code := ctypes.get_errno(), f"no Landlock: {os.strerror(code)}")
    return result


def fence(hidden: Iterable[Path]) -> Callable[[], None]:
    """What a new process calls to be fenced in. Raises OSError where Landlock is missing.

    Landlock can only allow. So what begins to exist later right in a folder above a hidden file cannot be read."""
    version = landlock(CREATE_RULESET, None, 0, GET_VERSION)
    attributes = struct.pack("3Q", READ_FILE | REFER, BIND_AND_CONNECT, ABSTRACT_SOCKETS_AND_SIGNALS)
    size = 8 if version < 4 else 16 if version < 6 else 24
    rules = landlock(CREATE_RULESET, attributes, size, 0)
    hidden = {path.resolve() for path in hidden}
    above = {folder for path in hidden for folder in path.parents}
    for path in {path for folder in above for path in folder.iterdir()} - hidden - above:
        try:
            file = os.open(path, os.O_PATH | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:  # it has gone
            continue
        access = READ_FILE | REFER if stat.S_ISDIR(os.fstat(file).st_mode) else READ_FILE
        landlock(ADD_RULE, rules, PATH_BENEATH, struct.pack("=Qi", access, file), 0)
        os.close(file)

    def enter() -> None:
        libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        landlock(RESTRICT_SELF, rules, 0)

    return enter


def held_out() -> list[Path]:
    """The held-out text of all datasets, as tokens and as it was downloaded."""
    for name in (".triton", ".nv"):  # caches of Triton and CUDA: above a dataset in ~/.cache lies ~
        with suppress(OSError):
            Path.home().joinpath(name).mkdir(exist_ok=True)
    return [path for pattern in ("*/val_*", "*/test_*", "*/raw") for path in cache_dir().glob(pattern)]
