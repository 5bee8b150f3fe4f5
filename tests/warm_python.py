"""Processes that start warm: most of what a short run of train.py takes are the imports of PyTorch, 3 s.

One process imports the packages, and nothing of ours. For each request it forks, and the child goes on as
`python -c CODE ARGS` would, in a session of its own: with its own import of train.py, its own end and its own status.
"""

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from pathlib import Path


class Warm:
    """The one that forks."""

    def __init__(self, environment: dict[str, str]):
        self.requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, __file__, str(theirs.fileno())]
        self.process = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()])
        theirs.close()

    def start(self, code: str, args: list, folder: Path, environment: dict, out: int, err: int) -> "Child":
        """out, err: file descriptors."""
        news, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        request = json.dumps([code, args, str(folder), environment])
        socket.send_fds(self.requests, [request.encode()], [theirs.fileno(), out, err])
        theirs.close()
        return Child(news)

    def stop(self) -> None:
        self.requests.close()
        self.process.wait(100)


class Child:
    """As much of subprocess.Popen as is needed."""

    def __init__(self, news: socket.socket):
        self.news = news
        self.pid = int(news.recv(100))

    def wait(self, timeout: float) -> int:
        self.news.settimeout(timeout)
        with self.news:
            return os.waitstatus_to_exitcode(int(self.news.recv(100)))


def serve(requests: socket.socket) -> str:
    """Returns in children only, which are then ready to run the code it returns."""
    import safetensors.torch  # noqa: F401
    import tiktoken  # noqa: F401
    import torch._inductor.compile_fx  # noqa: F401

    gc.freeze()  # none of this is garbage: collecting takes 0.3 s
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks of this loop
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, 2**20, 3)
        if not request:  # its other end is closed, be it by a crash
            os._exit(0)
        if os.fork() == 0:
            break
        for descriptor in descriptors:
            os.close(descriptor)
    news, *outputs = descriptors
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    requests.close()
    if pid := os.fork():
        for output in outputs:
            os.close(output)  # or the reader of a pipe or terminal would wait for us, too
        os.write(news, b"%d" % pid)
        os.write(news, b"%d" % os.waitpid(pid, 0)[1])
        os._exit(0)
    os.close(news)
    os.setsid()
    for number, output in enumerate(outputs, start=1):
        os.dup2(output, number)
        os.close(output)
    sys.stdout = sys.__stdout__ = open(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = sys.__stderr__ = open(2, "w", 1, "utf-8", errors="backslashreplace", closefd=False)
    code, sys.argv[1:], folder, environment = json.loads(request)
    os.chdir(folder)
    sys.path[0] = folder
    os.environ.update(environment)
    return code


if __name__ == "__main__":
    status = 0
    try:
        exec(serve(socket.socket(fileno=int(sys.argv[1]))), {"__name__": "__main__"})
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    os._exit(status)  # PyTorch's own end takes another 0.7 s, after an error more than two
