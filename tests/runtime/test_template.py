"""Workers that are split off a template: the same as fresh interpreters, and started all the same when it is no use."""

from __future__ import annotations

import ctypes
import errno
import importlib
import mmap
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
import torch

from ringloader import FactoryError, FactorySpec, FaultPolicy, Loader
from ringloader._runtime import forking, sources
from ringloader._runtime.template import Template
from tests.runtime.conftest import UNIT_S, wait_until
from tests.runtime.process_datasets import Facts
from tests.runtime.running import ROOT, Program, is_alive, run

_PATIENT = FaultPolicy(restarts=20, backoff_s=0.0)


def make(num_workers: int = 1, size: int = 8) -> Loader:
    return Loader(FactorySpec(Facts, size), batch_size=2, num_workers=num_workers, output="numpy", faults=_PATIENT)


def template_of(loader: Loader) -> Template:
    engine = loader._engine
    assert engine is not None
    template: Template = engine.backend._template
    return template


def process_of(loader: Loader) -> psutil.Process:
    """The template's process."""
    popen = template_of(loader)._popen
    assert popen is not None
    return psutil.Process(popen.pid)


def kill_worker(loader: Loader) -> None:
    """Kill worker 0 and wait for its successor."""
    (pid, *_), before = loader.stats().worker_pids, loader.stats().num_restarts
    os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: loader.stats().num_restarts > before)
    assert wait_until(lambda: len(loader.stats().worker_pids) == loader._options.num_workers)


def read(loader: Loader) -> list[int]:
    return [int(i) for _, indices in loader for i in indices]


def is_split(pid: int) -> bool:
    """Whether a worker was split off; the command line it shows is its template's then."""
    return "forking" in "".join(psutil.Process(pid).cmdline())


@pytest.fixture
def without_template(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    return lambda: monkeypatch.setenv("RINGLOADER_TEMPLATE", "0")


def test_split_workers_are_as_fresh_interpreters(without_template: Callable[[], None]) -> None:
    """Parent, session, signals, limits, environment, streams, descriptors, thread ids: nothing tells the two apart."""
    found = []
    for is_fresh in (False, True):
        if is_fresh:
            without_template()
        with make() as loader:
            (facts,) = loader.call("facts")
            assert is_split(loader.stats().worker_pids[0]) is not is_fresh
        facts["environment"].pop("RINGLOADER_TEMPLATE", None)
        facts["environment"].pop("PYTEST_CURRENT_TEST", None)
        found.append(facts)
    for name in found[0]:
        assert found[0][name] == found[1][name], name
    assert found[0]["parent"] == os.getpid()
    assert found[0]["leads"] == [True] * 3
    assert found[0]["heavy"] == []


def test_split_workers_do_what_processes_do(without_template: Callable[[], None]) -> None:
    """Threads and locks, forks, children and linear algebra work in them."""
    with make(2) as loader:
        assert loader.call("work") == [[400, 7, "42", True]] * 2
        assert all(map(is_split, loader.stats().worker_pids))


def test_template_goes_with_its_loader() -> None:
    """It is one process for all workers, and is gone with `close`."""
    with make(3) as loader:
        read(loader)
        assert wait_until(lambda: len(loader.stats().worker_pids) == 3)
        template = process_of(loader)
        children = {child.pid for child in psutil.Process().children()}
        assert {template.pid, *loader.stats().worker_pids} <= children
        assert template.children() == []
    assert not is_alive(template.pid)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_template_that_is_killed_is_replaced(number: int) -> None:
    """Workers go on; the next one is started somehow, and those after it from a new template."""
    with make(2) as loader:
        assert read(loader) == list(range(8))
        old = process_of(loader)
        old.send_signal(number)
        assert wait_until(lambda: not is_alive(old.pid))
        kill_worker(loader)
        assert read(loader) == list(range(8))
        kill_worker(loader)
        assert wait_until(lambda: any(map(is_split, loader.stats().worker_pids)))
        assert process_of(loader).pid != old.pid
        assert read(loader) == list(range(8))


def test_template_that_is_killed_time_and_again_is_given_up() -> None:
    """After three no other is made, and workers are interpreters of their own."""
    with make(1) as loader:
        read(loader)
        for _ in range(8):
            if template_of(loader)._popen is not None:
                process_of(loader).kill()
                assert wait_until(lambda: not is_alive(process_of(loader).pid))
            kill_worker(loader)
            assert read(loader) == list(range(8))
        assert template_of(loader)._popen is None
        assert not is_split(loader.stats().worker_pids[0])


def test_template_that_is_stopped_delays_a_start_by_little(without_template: Callable[[], None]) -> None:
    """Its successor takes over; the stopped one is ended."""
    with make(1) as loader:
        read(loader)
        old = process_of(loader)
        old.suspend()
        began_s = time.monotonic()
        kill_worker(loader)
        assert read(loader) == list(range(8))
        assert time.monotonic() - began_s < 5.0 * UNIT_S
        assert not is_alive(old.pid)


def test_what_a_process_inherits_is_what_holds_when_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Environment and limits that changed since the first worker reach the next one."""
    with make(1) as loader:
        assert loader.call("variable", "CHANGED") == [None]
        first, before = process_of(loader).pid, resource.getrlimit(resource.RLIMIT_NOFILE)
        monkeypatch.setenv("CHANGED", "yes")
        kill_worker(loader)
        assert loader.call("variable", "CHANGED") == ["yes"]
        second = process_of(loader).pid
        resource.setrlimit(resource.RLIMIT_NOFILE, (before[0] - 1, before[1]))
        try:
            kill_worker(loader)
            assert loader.call("limit") == [before[0] - 1]
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        assert len({first, second, process_of(loader).pid}) == 3
        assert not is_alive(first)


def test_streams_are_those_of_the_moment(tmp_path: Path) -> None:
    """A worker that is started after the output was turned elsewhere writes there."""
    with make(1) as loader:
        read(loader)
        template = process_of(loader).pid
        saved = [os.dup(1), os.dup(2)]
        try:
            with (tmp_path / "out").open("wb") as out, (tmp_path / "errors").open("wb") as errors:
                os.dup2(out.fileno(), 1)
                os.dup2(errors.fileno(), 2)
            kill_worker(loader)
            loader.call("say", "words")
        finally:
            for k, fd in enumerate(saved):
                os.dup2(fd, k + 1)
                os.close(fd)
        assert process_of(loader).pid == template
    assert (tmp_path / "out").read_text() == "words\n"
    assert (tmp_path / "errors").read_text().endswith("words\n")


@pytest.mark.parametrize("how", ["threads", "raises", "dies", "slow"])
def test_template_that_cannot_be_had_costs_no_worker(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A site that starts threads, fails, ends the process or takes long: workers are interpreters, and all is read."""
    program = {
        "threads": "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
        "raises": "import socket\nsocket.recv_fds = None",
        "dies": "import os, sys\nif 'forking' in ''.join(open('/proc/self/cmdline')): os._exit(3)",
        "slow": "import time\nif 'forking' in ''.join(open('/proc/self/cmdline')): time.sleep(60)",
    }[how]
    (tmp_path / "sitecustomize.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    began_s = time.monotonic()
    with make(2) as loader:
        assert read(loader) == list(range(8))
        kill_worker(loader)
        assert read(loader) == list(range(8))
        assert not any(map(is_split, loader.stats().worker_pids))
    assert time.monotonic() - began_s < 10.0 * UNIT_S


class Scripted(Template):
    """A template whose process says what a test tells it to.

    `late`: what the kernel has noted by the time that it ends. `is_stuck`: it is not ended by the first attempt.
    """

    pid = 0

    def __init__(self, words: list[bytes], late: int = 0, is_stuck: bool = False) -> None:
        super().__init__(0)
        self.words, self.late, self.is_stuck = words, late, is_stuck

    def _launch(self, conditions: Any) -> None:
        self._sock, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._popen, self._conditions = self, conditions  # type: ignore[assignment]
        self.page = self._page = mmap.mmap(-1, mmap.PAGESIZE)
        for word in self.words:
            self.theirs.send(word)

    def kill(self) -> None:
        self.theirs.close()

    def wait(self, timeout_s: float | None = None) -> None:
        if self.is_stuck and timeout_s is not None:
            raise subprocess.TimeoutExpired("template", timeout_s)
        if self.late:
            memoryview(self.page).cast("i")[0] = self.late


@pytest.fixture
def a_socket() -> Iterator[int]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours.fileno()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EPERM, errno.EINVAL])
def test_kernel_that_does_not_know_how_is_asked_once(number: int, a_socket: int) -> None:
    """A sandbox that refuses the system call: the template is ended, and never made again."""
    template = Scripted([forking.READY, forking.ANSWER.pack(-number)])
    assert template.split(a_socket) is None
    assert template._popen is None
    assert template.split(a_socket) is None
    assert template._popen is None


def test_process_that_may_not_ask_about_itself_has_no_template(a_socket: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sandbox that answers no questions is no reason for a worker not to be started."""

    def refuse(pid: int) -> int:
        raise PermissionError(errno.EPERM, "not permitted")

    monkeypatch.setattr(os, "sched_getscheduler", refuse)
    assert Template(0).split(a_socket) is None


def test_template_gives_way_where_there_is_no_process_more(a_socket: int) -> None:
    """The limit may leave room for a worker then; another is made for the next one, as it may be higher."""
    template = Scripted([forking.READY, forking.ANSWER.pack(-errno.EAGAIN)])
    assert template.split(a_socket) is None
    assert (template._popen, template._is_unfit) == (None, False)


def test_worker_that_is_told_of_at_the_last_moment_is_known(a_socket: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A template that is ended for its silence may have split one off: the kernel has noted that."""
    monkeypatch.setattr("ringloader._runtime.template._ANSWER_S", 0.05)
    template = Scripted([forking.READY], late=4242)
    assert template.split(a_socket) == 4242
    assert template._popen is None


def test_worker_of_a_template_that_cannot_be_ended_is_ended_after_it(a_socket: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the hands of a debugger: another worker is started meanwhile, and the one that nobody knows of does not stay."""
    monkeypatch.setattr("ringloader._runtime.template._ANSWER_S", 0.05)
    with subprocess.Popen(["sleep", "600"]) as unknown, subprocess.Popen(["sleep", "600"]) as known:
        template = Scripted([forking.READY], late=unknown.pid, is_stuck=True)
        assert template.split(a_socket) is None
        assert wait_until(lambda: not is_alive(unknown.pid))
        template = Scripted([forking.READY, forking.ANSWER.pack(known.pid)], is_stuck=True)
        assert template.split(a_socket) == known.pid
        assert not template.close()
        assert wait_until(lambda: not any(thread.name == "waits-for-0" for thread in threading.enumerate()))
        assert is_alive(known.pid)
        known.kill()


_DIES_AFTER_SPLITTING = """
import os, signal
def end():
    if "forking" in "".join(open("/proc/self/cmdline")) and not os.path.exists({mark!r}):
        open({mark!r}, "w").close()
        os.kill(os.getpid(), signal.{name})
os.register_at_fork(after_in_parent=end)
"""


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
def test_template_that_ends_before_it_answers_leaves_no_worker_unknown(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has split off works for the loader, which knows all its children, and reaps them."""
    (tmp_path / "sitecustomize.py").write_text(_DIES_AFTER_SPLITTING.format(mark=str(tmp_path / "mark"), name=name))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    before = {child.pid for child in psutil.Process().children()}
    with make(2) as loader:
        assert read(loader) == list(range(8))
        assert wait_until(lambda: len(loader.stats().worker_pids) == 2)
        popen = template_of(loader)._popen
        known = {*loader.stats().worker_pids, *([popen.pid] if popen is not None else [])}
        assert (tmp_path / "mark").exists()
        assert {child.pid for child in psutil.Process().children()} - before == known
        assert loader.stats().num_restarts == 0
    assert {child.pid for child in psutil.Process().children()} <= before


_CLOSED = """
import os, sys
for number in map(int, sys.argv[2:]):
    os.close(number)
from ringloader import FactorySpec, Loader
from tests.runtime.process_datasets import Facts
if __name__ == "__main__":
    with Loader(FactorySpec(Facts, 8), batch_size=2, num_workers=2, output="numpy") as loader:
        seen = [int(i) for _, indices in loader for i in indices]
        streams = loader.call("facts")[0]["streams"]
    with open(sys.argv[1], "w") as file:
        print(seen == list(range(8)), *[streams[number] for number in map(int, sys.argv[2:])], file=file)
"""


@pytest.mark.parametrize("closed", [["1"], ["2"], ["0", "1", "2"]])
@pytest.mark.parametrize("is_split", [True, False])
def test_streams_that_are_closed_are_closed_to_workers(closed: list[str], is_split: bool, tmp_path: Path) -> None:
    """Nothing else takes their numbers: no socket, no page, and no file that a library opens as the interpreter starts; it
    would get what is printed."""
    library = tmp_path / "library"
    library.mkdir()
    (library / "sitecustomize.py").write_text("kept = open(__file__)\n")
    path = os.pathsep.join(map(str, (library, ROOT, ROOT / "src")))
    program = Program(environment=(("RINGLOADER_TEMPLATE", "1" if is_split else "0"), ("PYTHONPATH", path)))
    done = run(tmp_path, _CLOSED, str(tmp_path / "out"), *closed, program=program)
    assert done.returncode == 0
    assert (tmp_path / "out").read_text().split() == ["True", *["/dev/null"] * len(closed)]


def test_umask_is_that_of_the_moment() -> None:
    """As are user, groups, capabilities and whatever else the kernel says of this process."""
    with make(1) as loader:
        read(loader)
        old = process_of(loader).pid
        before = os.umask(0o067)
        try:
            kill_worker(loader)
            (facts,) = loader.call("facts")
            assert facts["status"]["Umask"] == "0067"
        finally:
            os.umask(before)
        assert process_of(loader).pid != old


def test_template_that_is_slow_to_come_is_used_when_it_is_there(a_socket: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first worker does not wait for it longer than a moment, the second finds it."""
    monkeypatch.setattr("ringloader._runtime.template._BOOT_S", 0.05)
    template = Scripted([])
    assert template.split(a_socket) is None
    assert template.split(a_socket) is None
    template.theirs.send(forking.READY)
    template.theirs.send(forking.ANSWER.pack(4243))
    assert template.split(a_socket) == 4243
    template.close()


def test_template_that_torch_makes_unfit_is_tried_without(a_socket: int) -> None:
    """Some build of it may start threads when it is imported."""
    template = Scripted([forking.UNFIT_WITH_TORCH])
    template._torch_origin = "/torch/__init__.py"
    assert template.split(a_socket) is None
    assert (template._is_unfit, template._torch_origin) == (False, "")
    template.words = [forking.READY, forking.ANSWER.pack(4244)]
    assert template.split(a_socket) == 4244
    template.close()


def test_loader_that_is_closed_waits_for_no_template(a_socket: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even for one that imports torch."""
    monkeypatch.setattr("ringloader._runtime.template._BOOT_S", 60.0 * UNIT_S)
    template = Scripted([])
    threading.Timer(0.1, lambda: setattr(template, "is_ending", True)).start()
    began_s = time.monotonic()
    assert template.split(a_socket) is None
    assert time.monotonic() - began_s < 10.0 * UNIT_S
    template.close()


def test_template_that_is_unfit_without_torch_is_not_tried_again(a_socket: int) -> None:
    """Threads of its own: seconds of importing torch would change nothing."""
    template = Scripted([forking.UNFIT])
    template._torch_origin = "/torch/__init__.py"
    assert template.split(a_socket) is None
    assert template._is_unfit


_WITH_TORCH = """
import sys
was_there = "torch" in sys.modules
import torch

class Tensors(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return torch.full((3,), float(index)), index
    def work(self):
        torch.set_num_threads(2)
        weights = torch.ones(300, 300, requires_grad=True)
        (weights @ weights).sum().backward()
        return [was_there, float(weights.grad.sum()), torch.get_num_threads()]
"""


@pytest.mark.parametrize("is_known", [True, False])
def test_torch_that_workers_will_import_is_there_already(
    is_known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the dataset's module has it here, the template imports it once; of a module that was not imported nobody knows."""
    name = f"with_torch_{is_known}".lower()
    (tmp_path / f"{name}.py").write_text(_WITH_TORCH)
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = FactorySpec(importlib.import_module(name).Tensors if is_known else f"{name}:Tensors")
    with Loader(spec, batch_size=4, num_workers=2) as loader:
        assert [indices.tolist() for _, indices in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert loader.call("work") == [[is_known, 2 * 300.0**3, 2]] * 2
        assert all(map(is_split, loader.stats().worker_pids))


_BEFORE_TORCH = """
import sys
if "torch" in sys.modules:
    raise ImportError("to be imported before torch")
"""
_AFTER_IT = """
import {first}
import torch

class Numbers:
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return index
"""


def test_module_that_has_to_come_before_torch_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker in which it fails because torch is there already begins again, without, and that is no death."""
    first, name = "comes_before_torch", "has_one_before_torch"
    (tmp_path / f"{first}.py").write_text(_BEFORE_TORCH)
    (tmp_path / f"{name}.py").write_text(_AFTER_IT.format(first=first))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, first, ModuleType(first))  # as if this process had the right order
    dataset = importlib.import_module(name).Numbers
    with Loader(FactorySpec(dataset), batch_size=4, num_workers=2) as loader:
        assert torch.cat(list(loader)).tolist() == list(range(8))
        assert template_of(loader)._torch_origin == torch.__file__
        kill_worker(loader)
        assert torch.cat(list(loader)).tolist() == list(range(8))
        assert loader.stats().num_restarts == 1


def test_module_that_cannot_be_imported_is_said_once_whoever_has_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beginning again helps only where torch was to blame."""
    name = "fails_in_workers"
    (tmp_path / f"{name}.py").write_text(
        f"import torch\nimport os\nif os.getpid() != {os.getpid()}:\n    raise ImportError('not here')\nclass D: pass"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = FactorySpec(importlib.import_module(name).D)
    with Loader(spec, batch_size=4, num_workers=1) as loader, pytest.raises(FactoryError, match="not here"):
        next(iter(loader))


class _Proxy:
    """Answers nothing but with an error, as proxies of frameworks do outside of a request."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("outside of application context")


class _Meta(type):
    def __getattribute__(cls, name: str) -> Any:
        raise RuntimeError("asked a class")


class _Odd(metaclass=_Meta):
    pass


def test_looking_for_torch_runs_nothing_of_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """Proxies, odd classes, modules without a name or of a kind of their own: none is asked anything, none fails a loader."""
    module = ModuleType("oddities")
    vars(module).update(proxy=_Proxy(), odd=_Odd, nameless=ModuleType("gone"), lazy=_Proxy())
    del vars(module)["nameless"].__dict__["__name__"]
    monkeypatch.setitem(sys.modules, "oddities", module)
    monkeypatch.setitem(sys.modules, "no_module", _Proxy())
    monkeypatch.setitem(sys.modules, "nothing", None)
    assert sources._torch_origin({"oddities:D", "no_module:D", "nothing:D", "not_there:D"}) == ""
    vars(module)["tensor"] = torch.Tensor
    assert sources._torch_origin({"oddities:D"}) == torch.__file__
    vars(module)["D"] = vars(module).pop("tensor")
    assert sources._torch_origin({"oddities:D"}) == ""  # what comes after the dataset is none of its needs


_IN_A_CONTAINER = """
import ctypes, errno, struct
# A filter as containers have it: what filters cannot see into (clone3, 435) is unknown, all else is allowed.
code = b"".join(struct.pack("<HBBI", *line) for line in (
    (0x20, 0, 0, 0), (0x15, 0, 1, 435), (0x06, 0, 0, 0x50000 | errno.ENOSYS), (0x06, 0, 0, 0x7FFF0000)))
program = ctypes.create_string_buffer(code, len(code))
filter = struct.pack("HxxxxxxP", 4, ctypes.addressof(program))
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, filter, 0, 0) == 0
from ringloader import FactorySpec, Loader
from tests.runtime.process_datasets import Facts
if __name__ == "__main__":
    with Loader(FactorySpec(Facts, 8), batch_size=2, num_workers=2, output="numpy") as loader:
        seen = [int(i) for _, indices in loader for i in indices]
        print(seen, *["forking" in open(f"/proc/{pid}/cmdline").read() for pid in loader.stats().worker_pids])
"""


def test_container_that_refuses_clone3_has_templates(tmp_path: Path) -> None:
    """Under the filter that container engines install."""
    done = run(tmp_path, _IN_A_CONTAINER)
    assert (done.returncode, done.stderr) == (0, "")
    assert set(done.stdout.split("]")[1].split()) == {"True"}
    assert done.stdout.startswith(f"{list(range(8))}")


_ORPHANS = """
import os, signal, sys
from ringloader import FactorySpec, Loader
from tests.runtime.process_datasets import Facts
if __name__ == "__main__":
    loader = Loader(FactorySpec(Facts, 8), batch_size=2, num_workers=2, output="numpy")
    list(loader)
    print(loader._engine.backend._template._popen.pid, *loader.stats().worker_pids, flush=True)
    if sys.argv[1] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("end", ["killed", "exit"])
def test_template_does_not_outlive_the_program(end: str, tmp_path: Path) -> None:
    """Neither it nor what was split off it."""
    done = run(tmp_path, _ORPHANS, end, program=Program(flags=("-X", "dev", "-W", "error")))
    assert (done.returncode, done.stderr) == (-signal.SIGKILL if end == "killed" else 0, "")
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) >= 2
    assert wait_until(lambda: not any(map(is_alive, pids)), within_s=2)


def test_process_of_several_threads_refuses_to_be_a_template() -> None:
    """Here: the tests' own."""
    thread = threading.Thread(target=time.sleep, args=(0.5,))
    thread.start()
    with pytest.raises(OSError, match="several threads"):
        forking.Splitter(ctypes.c_int())
    thread.join()
