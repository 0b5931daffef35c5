"""A dataset that tells what process it is in. Importable by workers, without torch."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np

from tests.runtime.sample_datasets import Numbers

_GET_ROBUST_LIST = {"x86_64": 274, "aarch64": 100}
_STATUS = ("Threads", "SigBlk", "SigIgn", "SigCgt", "ShdPnd", "Umask", "NoNewPrivs", "Cpus_allowed")


class Facts(Numbers):
    """Numbers, and methods for `Loader.call`."""

    def facts(self) -> dict[str, Any]:
        """What should be the same for all workers, however they were started."""
        pid = os.getpid()
        status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines())
        head, nbytes = ctypes.c_void_p(), ctypes.c_size_t()
        number = _GET_ROBUST_LIST[os.uname().machine]
        assert ctypes.CDLL(None).syscall(number, 0, ctypes.byref(head), ctypes.byref(nbytes)) == 0
        fds = [os.readlink(fd) for fd in Path("/proc/self/fd").iterdir() if os.path.lexists(fd)]
        return {
            "parent": os.getppid(),
            "leads": [
                os.getsid(0) == pid,
                os.getpgid(0) == pid,
                threading.get_native_id() == pid == threading.main_thread().native_id,
            ],
            "robust": [head.value is not None, nbytes.value],
            "status": {name: status[name].strip() for name in _STATUS if name in status},
            "limits": [list(resource.getrlimit(k)) for k in range(16)],
            "environment": dict(os.environ),
            "argv": sys.argv,
            "flags": list(sys.flags),
            "warnings": sys.warnoptions,
            "hash": hash("text"),
            "cwd": os.getcwd(),
            "path": sys.path,
            "streams": [os.readlink(f"/proc/self/fd/{k}") for k in range(3)],
            # Whatever kinds of things it has open: sockets and memory have numbers of their own.
            "open": sorted(name.split(":")[0].split(" ")[0] for name in fds if not name.startswith("/dev/shm")),
            "signals": [str(signal.getsignal(k)) for k in range(1, 32)],
            "threads": [thread.name for thread in threading.enumerate()],
            "heavy": [name for name in ("torch", "logging", "ringloader._runtime.pool") if name in _AT_START],
        }

    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    def limit(self) -> int:
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]

    def say(self, text: str) -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.write(f"{text}\n")
            stream.flush()

    def work(self) -> list[Any]:
        """What could suffer from a process that was not made as usual: threads, forks, children, native code."""
        lock, found = threading.RLock(), []

        def count() -> None:
            for _ in range(100):
                with lock:
                    found.append(1)

        threads = [threading.Thread(target=count) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        pid = os.fork()
        if pid == 0:
            os._exit(7)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        said = subprocess.run([sys.executable, "-c", "print(6 * 7)"], capture_output=True, text=True, check=True).stdout
        matrix = np.arange(64.0 * 64).reshape(64, 64) + 1000 * np.eye(64)
        error = float(np.abs(np.linalg.inv(matrix) @ matrix - np.eye(64)).max())
        return [len(found), status, said.strip(), error < 1e-6]


_AT_START = set(sys.modules)
