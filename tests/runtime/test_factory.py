"""Factory specs: what a worker can rebuild arrives intact, the rest is refused in words before any process starts."""

from __future__ import annotations

import functools
import io
import logging
import os
import pathlib
import pickle
import re
import socket
import sqlite3
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringloader._core.values import encode
from ringloader._specs.main_module import MainModule
from ringloader.errors import ConfigError, FactoryError, ProtocolError
from ringloader.factory import (
    FactorySpec,
    callable_from_wire,
    callable_needs_main,
    callable_to_wire,
    check_callable,
    find_process_spec,
    pickle_dataset,
    unpickle_dataset,
)

SRC = pathlib.Path(__file__).parents[2] / "src"
TO_MODULE_LEVEL = "move it to module level or use functools.partial of a module-level function"


def gather(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return what it was called with."""
    return args, kwargs


def adder(amount: int) -> Callable[[int], int]:
    """Return a function that no process could import."""
    return lambda number: number + amount


class Recipe:
    """Has a class method and a static one."""

    @classmethod
    def create(cls, size: int) -> tuple[type, int]:
        return cls, size

    @staticmethod
    def double(size: int) -> int:
        return 2 * size


class Shorter(Recipe):
    """Inherits its class method."""


class Transform:
    """Says how it is rebuilt, and refuses to be pickled."""

    def __init__(self, size: int) -> None:
        self.size = size

    @property
    def process_spec(self) -> FactorySpec:
        return FactorySpec(Transform, self.size)

    def __reduce__(self) -> Any:
        raise TypeError("never pickled")


class Scale:
    """A picklable callable object."""

    def __init__(self, factor: int) -> None:
        self.factor = factor

    def __call__(self, number: int) -> int:
        return self.factor * number


class Plain:
    """A dataset as users write them."""

    images: Any

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


def trip(spec: FactorySpec) -> Any:
    """Send a spec through its wire form and build it."""
    return FactorySpec.from_wire(spec.to_wire()).build()


def run_script(arguments: list[str], cwd: pathlib.Path, source: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run an interpreter on the package, `source` on its standard input."""
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    return subprocess.run([sys.executable, *arguments], input=source, cwd=cwd, env=environment, capture_output=True, text=True)


# -- what arrives


@pytest.mark.parametrize(
    "value",
    [None, 3, 2**90, "text", b"b", (1, [2, {3: (4,)}]), {("a", 1): {5}}, pathlib.Path("/x"), np.int16(3), slice(1, 2), gather,
     Recipe, len, [gather, {"k": Recipe}], np.add, np.dtype("i4"), 1j, [np.float32(0.5), Recipe.double]],
    ids=lambda value: re.sub(r" at 0x\w+", "", repr(value)),
)  # fmt: skip
def test_spec_arguments_arrive_equal_and_of_their_type(value: Any) -> None:
    """Plain values, references and pickled objects reach the call as they were given."""
    (positional,), keywords = trip(FactorySpec(gather, value, key=value))
    assert positional == keywords["key"] == value
    assert type(positional) is type(value)


def test_spec_target_may_be_text_callable_method_or_partial() -> None:
    """Every importable callable can be the target, class and static methods included."""
    assert trip(FactorySpec("collections:OrderedDict", a=1)) == {"a": 1}
    assert trip(FactorySpec(Recipe.create, 3)) == (Recipe, 3)
    assert trip(FactorySpec(Shorter.create, 3)) == (Shorter, 3)
    assert trip(FactorySpec(Recipe.double, 4)) == 8
    assert trip(FactorySpec(functools.partial(functools.partial(gather, 1, b=2), 3, b=4), 5)) == ((1, 3, 5), {"b": 4})
    assert trip(FactorySpec(Scale(3), 4)) == 12


def test_spec_nested_specs_are_built_before_the_call() -> None:
    """Specs and objects with a spec are built in the worker wherever they are: alone, in containers, inside a pickle."""
    inner = FactorySpec(Transform, 3)
    args, kwargs = trip(
        FactorySpec(gather, inner, [inner, Transform(4)], {"t": (Transform(5),)}, mixed=[np.zeros(2), Transform(6)])
    )
    assert args[0].size == 3
    assert [element.size for element in args[1]] == [3, 4]
    assert args[2]["t"][0].size == 5
    assert kwargs["mixed"][1].size == 6


def test_spec_partial_argument_stays_a_callable() -> None:
    """A partial given as an argument is passed on, not called."""
    (partial,), _ = trip(FactorySpec(gather, functools.partial(gather, 1, key=Transform(2))))
    assert isinstance(partial, functools.partial)
    assert partial(3)[0] == (1, 3)
    assert partial.keywords["key"].size == 2


def test_spec_takes_arguments_as_they_are_at_construction() -> None:
    """Changing a list afterwards, or one that was built, changes no later build."""
    names = ["a"]
    spec = FactorySpec(gather, names)
    names.append("b")
    spec.build()[0][0].append("c")
    assert spec.build() == ((["a"],), {})


def test_spec_pickled_argument_keeps_sharing_and_logs_its_size(caplog: pytest.LogCaptureFixture) -> None:
    """What goes into a pickle does so once per argument, with one line that names it and its size."""
    array = np.arange(4)
    with caplog.at_level(logging.INFO, "ringloader"):
        (pair,), _ = trip(FactorySpec(gather, [array, array]))
    assert pair[0] is pair[1]
    assert len(caplog.records) == 1
    assert "args[0]" in caplog.text
    assert "bytes" in caplog.text


def test_b93_spec_with_ten_thousand_small_arrays_opens_no_descriptor() -> None:
    """B93: many small arrays in an argument travel as one pickle, without a descriptor each."""
    before = len(os.listdir("/proc/self/fd"))
    (arrays,), _ = trip(FactorySpec(gather, [np.full(3, index) for index in range(10_000)]))
    assert len(os.listdir("/proc/self/fd")) == before
    assert arrays[9_999].tolist() == [9_999] * 3


def test_spec_equality_hash_repr_and_pickle_go_by_content() -> None:
    """Equal calls are equal specs, readable ones, and a spec can be pickled without being built."""
    one, two = FactorySpec(gather, 1, key="a"), FactorySpec(gather, 1, key="a")
    assert one == two
    assert hash(one) == hash(two)
    assert one != FactorySpec(gather, 1, key="b")
    assert one != 3
    assert pickle.loads(pickle.dumps(one)) == one
    spec = FactorySpec(
        "collections:OrderedDict", [len], (1,), k=FactorySpec(Scale, factor=2), p=functools.partial(len), n=np.zeros(1)
    )
    text = repr(spec)
    assert text.startswith("FactorySpec('collections:OrderedDict', [builtins:len], (1,), k=FactorySpec('")
    assert "factor=2" in text
    assert "<pickle of " in text


@given(st.binary(max_size=40))
def test_spec_from_arbitrary_bytes_is_a_protocol_error(wire: bytes) -> None:
    """Bytes that are no spec are recognised as such."""
    with pytest.raises(ProtocolError):
        FactorySpec.from_wire(wire)


def test_spec_with_unknown_part_is_a_protocol_error() -> None:
    """A part of a later version is named, not misread."""
    with pytest.raises(ProtocolError, match="'z'"):
        FactorySpec.from_wire(encode(["s", ["z", b""], [], {}, False, []])).build()


def test_find_process_spec_ignores_other_meanings_of_the_name() -> None:
    """Classes, mocks, and objects whose `process_spec` is something else have no spec; a function that returns one has."""
    assert find_process_spec(Transform) is None
    assert find_process_spec(mock.MagicMock()) is None
    assert find_process_spec(Plain(process_spec="elsewhere")) is None
    assert find_process_spec(Plain(process_spec=lambda: FactorySpec(Recipe))) == FactorySpec(Recipe)


# -- what is refused


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("no_colon", "module:name"),
        ("a:b:c", "module:name"),
        (":name", "module:name"),
        ("1a:b", "module:name"),
        ("no_such_module_here:name", "no_such_module_here"),
        ("xml.dom.no_such_part:name", "xml.dom.no_such_part"),
        ("os.path.deeper:name", "os.path.deeper"),
        ("collections:OrderdDict", "OrderedDict"),
        ("math:pi", "not a callable"),
        (3, "not a callable"),
    ],
)
def test_spec_bad_target_is_refused(target: Any, words: str) -> None:
    """A target that names nothing is refused with what is wrong with it."""
    with pytest.raises(ConfigError, match="target") as caught:
        FactorySpec(target)
    assert words in str(caught.value)


def test_spec_target_check_imports_no_module() -> None:
    """The check finds a module and its parents without running them."""
    sys.modules.pop("xml.sax.saxutils", None)
    FactorySpec("xml.sax.saxutils:escape")
    assert "xml.sax.saxutils" not in sys.modules


def test_b04_lambda_as_collate_fn_is_refused_with_place_and_remedy() -> None:
    """B04: the message names the argument, the function, where it was defined, and what to do."""
    line = adder.__code__.co_firstlineno + 2
    for check in (check_callable, callable_to_wire):
        with pytest.raises(ConfigError) as caught:
            check(adder(1), "collate_fn")
        message = str(caught.value)
        assert message.startswith("collate_fn ")
        assert "adder.<locals>.<lambda>" in message
        assert f"{__file__}:{line}" in message
        assert TO_MODULE_LEVEL in message


@pytest.mark.parametrize("wrap", [lambda fn: fn, lambda fn: functools.partial(fn, 1), lambda fn: Scale(fn)])
def test_b04_local_function_inside_an_argument_is_named_by_its_path(wrap: Callable[[Any], Any]) -> None:
    """B04: an argument path leads to the function, through containers, partials and objects."""

    def local() -> None:
        return None

    with pytest.raises(ConfigError) as caught:
        FactorySpec(gather, transform={"steps": [len, wrap(local)]})
    message = str(caught.value)
    assert message.startswith("kwargs['transform']['steps'][1]")
    assert "<locals>.local" in message
    assert __file__ in message
    assert TO_MODULE_LEVEL in message


def test_b04_local_class_instance_is_refused_with_its_class() -> None:
    """B04: for an instance of a local class the class is to blame, as argument and as dataset."""

    class Local:
        pass

    with pytest.raises(ConfigError, match=r"args\[0\].*Local.*" + __file__):
        FactorySpec(gather, Local())
    with pytest.raises(ConfigError, match=r"^dataset .*Local"):
        pickle_dataset(Local())


@pytest.mark.parametrize(
    "kind",
    ["open file", "binary file", "raw file", "socket", "sqlite3", "lock", "rlock"],
)
def test_b28_open_handle_is_refused_naming_the_argument(kind: str, tmp_path: pathlib.Path) -> None:
    """B28: a file, connection or lock is refused in an argument, in an object of an argument, and in a dataset."""
    (tmp_path / "f").write_bytes(b"")
    makers: dict[str, Callable[[], Any]] = {
        "open file": lambda: (tmp_path / "f").open(),
        "binary file": lambda: (tmp_path / "f").open("rb"),
        "raw file": lambda: (tmp_path / "f").open("rb", buffering=0),
        "socket": socket.socket,
        "sqlite3": lambda: sqlite3.connect(":memory:"),
        "lock": threading.Lock,
        "rlock": threading.RLock,
    }
    handle = makers[kind]()
    try:
        with pytest.raises(ConfigError, match=r"^kwargs\['source'\] .*open it inside the factory"):
            FactorySpec(gather, source=handle)
        with pytest.raises(ConfigError, match=r"^args\[0\]\.source .*open it inside the factory"):
            FactorySpec(gather, Plain(source=handle))
        with pytest.raises(ConfigError, match=r"^dataset\.source .*open it inside the factory"):
            pickle_dataset(Plain(source=handle))
    finally:
        if hasattr(handle, "close"):
            handle.close()


def test_spec_memory_file_is_a_value() -> None:
    """BytesIO is no open file."""
    (copy,), _ = trip(FactorySpec(gather, io.BytesIO(b"abc")))
    assert copy.read() == b"abc"


def test_spec_argument_over_the_limit_is_refused_with_size_and_remedy() -> None:
    """An argument beyond 64 MiB, plain or pickled, is a dataset in disguise."""
    for images in (np.zeros(65 << 20, np.uint8), [bytes(33 << 20), gather, bytes(33 << 20)]):
        with pytest.raises(ConfigError, match=r"kwargs\['images'\].*64 MiB.*inside the factory"):
            FactorySpec(gather, images=images)


def test_spec_broken_repr_and_reduce_are_still_refused_in_words() -> None:
    """Whatever a user's object raises, the answer is a ConfigError with the reason."""

    class Broken:
        def __repr__(self) -> str:
            raise RuntimeError("no repr")

        def __reduce__(self) -> Any:
            raise RuntimeError("no reduce")

    with pytest.raises(ConfigError, match="no reduce") as caught:
        FactorySpec(gather, Broken())
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_spec_shadowed_function_is_refused() -> None:
    """A function whose name now gives another object would be another function in the worker."""
    wrapped = functools.wraps(gather)(lambda *args: None)
    with pytest.raises(ConfigError, match="is not this object"):
        FactorySpec(wrapped)


# -- callables


@pytest.mark.parametrize(
    "fn", [f"{__name__}:gather", gather, FactorySpec(gather).__class__, functools.partial(gather, 1), Scale(2)]
)
def test_callable_round_trip_gives_an_equal_callable(fn: Any) -> None:
    """Names, functions, classes, partials and objects come back as callables."""
    wire = callable_to_wire(fn, "collate_fn")
    assert callable(callable_from_wire(wire))
    assert not callable_needs_main(wire)


def test_callable_spec_builds_the_callable() -> None:
    """A spec in a callable's place is built to get it; building something else is an error in words."""
    assert callable_from_wire(callable_to_wire(FactorySpec(Scale, 3), "collate_fn"))(4) == 12
    with pytest.raises(FactoryError, match="callable"):
        callable_from_wire(callable_to_wire(FactorySpec(gather), "collate_fn"))
    with pytest.raises(ConfigError, match="worker_init_fn"):
        callable_to_wire(3, "worker_init_fn")  # type: ignore[arg-type]  # what the check is for


def test_check_callable_returns_the_reference() -> None:
    """An importable callable and its name give the name."""
    assert check_callable(gather, "fn") == f"{__name__}:gather"
    assert check_callable("math:sin", "fn") == "math:sin"
    with pytest.raises(ConfigError, match="fn"):
        check_callable(7, "fn")  # type: ignore[arg-type]  # what the check is for


# -- datasets in one pickle


def test_dataset_large_arrays_go_out_of_band_and_come_back_in_place() -> None:
    """Large buffers are views of the dataset's own memory, never copied into the pickle; small ones stay in it."""
    dataset = Plain(images=np.arange(100_000), labels=np.arange(8), names=["a"], transform=Transform(3))
    packed = pickle_dataset(dataset)
    assert [buffer.nbytes for buffer in packed.buffers] == [800_000]
    assert np.shares_memory(np.frombuffer(packed.buffers[0], np.int64), dataset.images)
    assert packed.nbytes == len(packed.pickle) + 800_000
    assert not packed.needs_main
    memory = bytearray(packed.buffers[0])
    copy = unpickle_dataset(packed.pickle, [memory])
    assert np.shares_memory(copy.images, np.frombuffer(memory, np.uint8))
    np.testing.assert_array_equal(copy.images, dataset.images)
    assert copy.labels.tolist() == list(range(8))
    assert copy.transform.size == 3


def test_dataset_tensors_go_out_of_band() -> None:
    """Plain tensors travel like arrays, bfloat16 included; others as torch packs them."""
    torch = pytest.importorskip("torch")
    dataset = Plain(
        images=torch.arange(40_000.0).reshape(200, 200),
        half=torch.ones(200, 200, dtype=torch.bfloat16),
        turned=torch.arange(6).reshape(2, 3).T,
        weight=torch.ones(3, requires_grad=True),
        scalar=torch.tensor(3),
    )
    packed = pickle_dataset(dataset)
    assert [buffer.nbytes for buffer in packed.buffers] == [160_000, 80_000]
    copy = unpickle_dataset(packed.pickle, [bytearray(buffer) for buffer in packed.buffers])
    for name, tensor in vars(dataset).items():
        assert torch.equal(getattr(copy, name), tensor)
        assert getattr(copy, name).dtype is tensor.dtype
    assert copy.weight.requires_grad


def test_dataset_over_the_limit_is_refused_unless_allowed() -> None:
    """What is not out of band is bounded, and the bound can be set."""
    dataset = Plain(rows=[bytes(1000)] + [bytes([index % 256]) * 1000 for index in range(1000)])
    with pytest.raises(ConfigError, match="dataset is too large"):
        pickle_dataset(dataset, max_nbytes=1 << 19)
    assert pickle_dataset(dataset, max_nbytes=1 << 21).buffers == []


# -- the main script

SCRIPT = textwrap.dedent(
    """
    import pathlib, pickle, sys
    from ringloader.errors import ConfigError
    from ringloader.factory import FactorySpec, callable_to_wire, pickle_dataset
    from ringloader._specs.main_module import describe_main

    print("script body")

    class Data:
        def __init__(self, size=0): self.size = size

    def shout(x): return f"{x}!"

    def refused(make):
        try:
            make()
        except ConfigError as error:
            return str(error)
        return "accepted"

    def attempts():
        yield "class", lambda: FactorySpec(Data)
        yield "text", lambda: FactorySpec("__main__:Data")
        yield "instance", lambda: FactorySpec(len, Data())
        yield "function", lambda: callable_to_wire(shout, "collate_fn")
        yield "dataset", lambda: pickle_dataset(Data())
        yield "nested", lambda: FactorySpec(len, [FactorySpec(Data)])

    if __name__ == "__main__":
        class Guarded: pass
        print("guarded part")
        for name, make in attempts():
            print(name, "|", refused(make))
        print("guarded class", "|", refused(lambda: FactorySpec(Guarded)))
        print("guarded instance", "|", refused(lambda: pickle_dataset(Guarded())))
        if len(sys.argv) > 1:
            spec, packed = FactorySpec(Data, 7), pickle_dataset(Data(8))
            sent = [describe_main().to_wire(), spec.to_wire(), packed.pickle, callable_to_wire(shout, "fn")]
            pathlib.Path(sys.argv[1]).write_bytes(pickle.dumps([*sent, spec.needs_main, packed.needs_main]))
    """
)
WORKER = textwrap.dedent(
    """
    import pathlib, pickle, sys
    from ringloader.factory import FactorySpec, callable_from_wire, unpickle_dataset
    from ringloader._specs import main_module
    main, spec, packed, fn, *flags = pickle.loads(pathlib.Path(sys.argv[1]).read_bytes())
    module = main_module.load_main(main_module.MainModule.from_wire(main))
    assert module is main_module.load_main(main_module.MainModule.from_wire(main))
    built, copy = FactorySpec.from_wire(spec).build(), unpickle_dataset(packed, [])
    assert type(built) is type(copy) is sys.modules["__main__"].Data is sys.modules[main_module.MAIN_ALIAS].Data
    assert main_module.describe_main().to_wire() == main and not main_module.loading_main
    assert FactorySpec(type(built), 7) == FactorySpec.from_wire(spec)
    print(built.size, copy.size, callable_from_wire(fn)("hey"), *flags)
    """
)


def lines(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """The answers that SCRIPT printed, by name."""
    assert done.returncode == 0, done.stderr
    return dict(line.split(" | ", 1) for line in done.stdout.splitlines() if " | " in line)


@pytest.mark.parametrize("how", ["file", "file without suffix", "module", "package"])
def test_b25_main_script_works_and_its_guarded_part_runs_once(how: str, tmp_path: pathlib.Path) -> None:
    """B25: things in a script's `__main__` are rebuilt elsewhere from the file or `-m` name, its guarded part not run again."""
    places = {"file": "train.py", "file without suffix": "train", "module": "pkg/train.py", "package": "pkg/__main__.py"}
    script = tmp_path / places[how]
    script.parent.mkdir(exist_ok=True)
    script.write_text(SCRIPT)
    starts = {"module": ["-m", "pkg.train"], "package": ["-m", "pkg"]}
    answers = lines(run_script([*starts.get(how, [str(script)]), "out"], tmp_path))
    accepted = [name for name, answer in answers.items() if answer == "accepted"]
    assert accepted == ["class", "text", "instance", "function", "dataset", "nested"]
    (tmp_path / "worker.py").write_text(WORKER)
    done = run_script(["worker.py", "out"], tmp_path)
    assert done.stdout.splitlines() == ["script body", "7 8 hey! True True"], done.stderr


def test_b25_class_under_the_guard_is_refused_in_the_parent(tmp_path: pathlib.Path) -> None:
    """B25: a class under the guard is not at module level for a worker, and the parent says so."""
    (tmp_path / "train.py").write_text(SCRIPT)
    answers = lines(run_script(["train.py"], tmp_path))
    for name in ("guarded class", "guarded instance"):
        assert "Guarded" in answers[name]
        assert 'if __name__ == "__main__":' in answers[name]
        assert "move it to" in answers[name]


@pytest.mark.parametrize("arguments", [["-c", SCRIPT], ["-"]], ids=["-c", "stdin"])
def test_b25_main_without_a_file_is_refused_in_the_parent(arguments: list[str], tmp_path: pathlib.Path) -> None:
    """B25: what lives in a notebook, `-c` or stdin `__main__` is refused at construction, naming it and the way out."""
    answers = lines(run_script(arguments, tmp_path, SCRIPT))
    assert "accepted" not in answers.values()
    for name, answer in answers.items():
        assert "__main__" in answer, name
        assert "move it to an importable .py file" in answer, name
    assert "'Data'" in answers["class"]
    assert answers["function"].startswith("collate_fn")


def test_b06_script_without_guard_is_seen_as_loading(tmp_path: pathlib.Path) -> None:
    """B06: while a worker loads an unguarded script the flag is up, so that a loader made there can be refused."""
    (tmp_path / "train.py").write_text("from ringloader._specs import main_module\nprint(__name__, main_module.loading_main)\n")
    code = (
        "from ringloader._specs import main_module as m\n"
        "m.load_main(m.MainModule('path', 'train.py'))\n"
        "print(m.loading_main)"
    )  # fmt: skip
    done = run_script(["-c", code], tmp_path)
    assert done.stdout.split() == ["__ringloader_main__", "True", "False"], done.stderr


@pytest.mark.parametrize(("body", "error"), [("raise SystemExit(0)", "ImportError"), ("1 / 0", "ZeroDivisionError")])
def test_main_script_that_fails_to_load_leaves_main_as_it_was(body: str, error: str, tmp_path: pathlib.Path) -> None:
    """A script that raises or exits gives that error, and the worker's own `__main__` is back in place."""
    (tmp_path / "train.py").write_text(body)
    code = (
        "import sys; from ringloader._specs import main_module as m; before = sys.modules['__main__']\n"
        "try: m.load_main(m.MainModule('path', 'train.py'))\n"
        "except Exception as error: print(type(error).__name__)\n"
        "print(sys.modules['__main__'] is before, m.MAIN_ALIAS in sys.modules, m.loading_main)"
    )
    assert run_script(["-c", code], tmp_path).stdout.split() == [error, "True", "False", "False"]


def test_main_module_description_survives_its_plain_form() -> None:
    """The description goes through a plain dict, and other dicts are refused."""
    main = MainModule("module", "pkg.train")
    assert MainModule.from_wire(main.to_wire()) == main
    with pytest.raises(ValueError, match="main module"):
        MainModule.from_wire({"kind": "code", "where": "x"})


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_b43_start_method_of_multiprocessing_is_left_alone(method: str, tmp_path: pathlib.Path) -> None:
    """B43: specs neither use nor set multiprocessing's start method; the same script gives the same spec under each."""
    code = f"""if True:
        import multiprocessing
        multiprocessing.set_start_method({method!r})
        import ringloader.factory, ringloader.datasets, ringloader.samplers
        print(multiprocessing.get_start_method(), ringloader.factory.FactorySpec("json:dumps", 1))"""
    assert run_script(["-c", code], tmp_path).stdout.strip() == f"{method} FactorySpec('json:dumps', 1)"


def test_factory_import_and_use_load_no_torch(tmp_path: pathlib.Path) -> None:
    """A worker that builds from a spec, pickles and samples never imports torch by itself."""
    code = (
        "import sys, numpy as np, ringloader.datasets, ringloader.samplers as s; from ringloader.factory import *; "
        "FactorySpec('json:dumps', np.zeros(3)); s.DistributedSampler(9); print('torch' in sys.modules)"
    )
    assert run_script(["-c", code], tmp_path).stdout.strip() == "False"
