"""The options of a loader, checked.

Owns what combinations are allowed and what None means. Everything here happens before the first process starts; each refusal
names the option, its value and the remedy. Must not look at the dataset.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import sys
from dataclasses import dataclass
from typing import Any

from ringloader._core.policy import FaultPolicy, PoolPolicy, check_count, check_duration
from ringloader._runtime import memory
from ringloader.errors import ConfigError

logger = logging.getLogger("ringloader")

BACKENDS = ("auto", "process", "thread")
OUTPUTS = ("torch", "numpy")
SEED_UNITS = ("batch", "sample")
# Where the user has not said how many: more do not make quick batches come quicker.
_MAX_PREFETCH = 8
# Slots that copies to a device may still be reading while the next batches are made.
_NUM_COPIED = 2
_DEVICE = re.compile(r"cpu|cuda(:\d+)?")


@dataclass(frozen=True, slots=True)
class Options:
    """Every option of `Loader` but the dataset, with defaults filled in."""

    batch_size: int | None
    shuffle: bool
    sampler: Any
    batch_sampler: Any
    num_workers: int
    worker_backend: str
    collate_fn: Any
    drop_last: bool
    prefetch_factor: int
    persistent_workers: bool
    pin_memory: bool | str
    device: str | None
    timeout: float | None
    faults: FaultPolicy
    in_order: bool
    seed: int
    seed_per: str
    rank: int | None
    world_size: int | None
    worker_init_fn: Any
    output: str
    max_ring_bytes: int
    max_prefetch: int  # no option: what `prefetch_factor` may become where batches are quick

    @property
    def policy(self) -> PoolPolicy:
        num_copied = _NUM_COPIED if self.pin_memory or self.device not in (None, "cpu") else 0
        return PoolPolicy(
            max(1, self.num_workers),
            self.prefetch_factor,
            self.timeout,
            self.faults,
            num_copied,
            num_beside=max(1, len(os.sched_getaffinity(0)) // memory.num_local_ranks() - 1),
        )


def check(given: dict[str, Any]) -> Options:
    """Fill in defaults and refuse what cannot work. Raises ConfigError."""
    options = dict(given)
    _check_sampling(options)
    _fill_in(options, "num_workers", 0)
    check_count("num_workers", options["num_workers"], least=0)
    options["max_prefetch"] = _MAX_PREFETCH if options["prefetch_factor"] is None else 0
    _fill_in(options, "prefetch_factor", 2)
    check_count("prefetch_factor", options["prefetch_factor"], least=1)
    _fill_in(options, "persistent_workers", True)
    for name in ("shuffle", "drop_last", "persistent_workers", "in_order"):
        _fill_in(options, name, name == "in_order")
        if not isinstance(options[name], bool):
            raise ConfigError(f"{name} is {options[name]!r}; give True or False", option=name, value=options[name])
    _choose(options, "worker_backend", BACKENDS)
    _choose(options, "output", OUTPUTS)
    _choose(options, "seed_per", SEED_UNITS)
    _check_time_and_faults(options)
    _check_seed(options)
    _check_ranks(options)
    _check_device_and_pinning(options)
    _fill_in(options, "max_ring_bytes", memory.default_ring_nbytes())
    check_count("max_ring_bytes", options["max_ring_bytes"], least=1)
    for name in ("collate_fn", "worker_init_fn"):
        value = options[name]
        if getattr(value, "__module__", "") == "ringloader.collation" and getattr(value, "__name__", "") == "pad_collate":
            raise ConfigError(f"{name} is pad_collate itself; call it: pad_collate()", option=name, value="pad_collate")
        if value is not None and not callable(value) and not isinstance(value, str) and not hasattr(value, "build"):
            raise ConfigError(f"{name} is {value!r}; give a callable, 'module:name' or a FactorySpec", option=name, value=value)
    return Options(**options)


def _fill_in(options: dict[str, Any], name: str, default: Any) -> None:
    if options[name] is None:
        options[name] = default


def _choose(options: dict[str, Any], name: str, choices: tuple[str, ...]) -> None:
    if options[name] is None:
        options[name] = choices[0]
    if options[name] not in choices:
        known = ", ".join(map(repr, choices))
        raise ConfigError(f"{name} is {options[name]!r}; choose one of {known}", option=name, value=options[name])


def _check_sampling(options: dict[str, Any]) -> None:
    batch_size, sampler, batch_sampler = options["batch_size"], options["sampler"], options["batch_sampler"]
    if batch_sampler is not None:
        # The default of batch_size counts as not given.
        clashing = [name for name in ("shuffle", "drop_last", "sampler") if options[name] not in (None, False)]
        clashing += ["batch_size"] if batch_size not in (None, 1, DEFAULT_BATCH_SIZE) else []
        if clashing:
            raise ConfigError(
                f"batch_sampler was given together with {', '.join(clashing)}; it decides these itself, so leave them out",
                option="batch_sampler",
                value=batch_sampler,
            )
        _check_iterable("batch_sampler", batch_sampler)
    if batch_size is not None and (type(batch_size) is not int or batch_size < 1):
        raise ConfigError(
            f"batch_size is {batch_size!r}; give an int of at least 1, or None for no batching",
            option="batch_size",
            value=batch_size,
        )
    if batch_size is None and options["drop_last"]:
        raise ConfigError("drop_last=True needs batches; batch_size=None makes none", option="drop_last", value=True)
    if sampler is not None:
        if options["shuffle"]:
            raise ConfigError(
                "sampler was given together with shuffle=True; the sampler decides the order, so leave shuffle out",
                option="shuffle",
                value=True,
            )
        _check_iterable("sampler", sampler)


DEFAULT_BATCH_SIZE = 32


def _check_iterable(name: str, value: Any) -> None:
    if not hasattr(value, "__iter__") and not hasattr(value, "__getitem__"):
        raise ConfigError(f"{name} is {value!r}, which cannot be iterated; give an iterable of keys", option=name, value=value)


def _check_time_and_faults(options: dict[str, Any]) -> None:
    timeout = options["timeout"]
    if timeout is not None:
        check_duration("timeout", timeout)
        options["timeout"] = float(timeout) or None
    _fill_in(options, "faults", FaultPolicy())
    if not isinstance(options["faults"], FaultPolicy):
        raise ConfigError(f"faults is {options['faults']!r}; give a FaultPolicy", option="faults", value=options["faults"])
    _check_reachable(options["faults"], options["num_workers"], options["timeout"])


def _check_reachable(faults: FaultPolicy, num_workers: int, timeout: float | None) -> None:
    """Refuse limits that others stand in the way of."""
    most = faults.restarts * max(1, num_workers) + 1
    if num_workers and faults.on_bad_sample != "raise" and faults.sample_deaths > most:
        raise ConfigError(
            f"faults.sample_deaths={faults.sample_deaths} is never reached: with faults.restarts={faults.restarts} and "
            f"num_workers={num_workers} no worker is left after {most} deaths, and "
            f"faults.on_bad_sample={faults.on_bad_sample!r} never applies; raise restarts",
            option="faults.sample_deaths",
            value=faults.sample_deaths,
        )
    if num_workers and faults.retry is not None and timeout is not None and faults.retry.total_wait_s >= timeout:
        raise ConfigError(
            f"faults.retry waits {faults.retry.total_wait_s:g} s for one sample, and timeout={timeout:g} ends a worker that "
            "takes so long for a batch: give fewer times or a smaller max_backoff_s, or raise timeout",
            option="faults.retry",
            value=faults.retry,
        )


def _check_seed(options: dict[str, Any]) -> None:
    seed = options["seed"]
    if seed is None:
        torch = sys.modules.get("torch")
        seed = torch.initial_seed() % (1 << 63) if torch is not None else secrets.randbits(63)
        options["seed"] = seed
        logger.info("seed=None: the seed is %d", seed)
    elif type(seed) is not int or not 0 <= seed < 1 << 63:
        raise ConfigError(f"seed is {seed!r}; give an int from 0 to 2**63 - 1, or None", option="seed", value=seed)


def _check_ranks(options: dict[str, Any]) -> None:
    for name, least in (("rank", 0), ("world_size", 1)):
        if options[name] is not None:
            check_count(name, options[name], least=least)
    rank, world_size = options["rank"], options["world_size"]
    if rank is not None and world_size is not None and rank >= world_size:
        raise ConfigError(
            f"rank is {rank} and world_size {world_size}; rank counts from 0 to world_size - 1", option="rank", value=rank
        )


def _check_device_and_pinning(options: dict[str, Any]) -> None:
    device, pin = options["device"], options["pin_memory"]
    if device is not None:
        options["device"] = str(device)
        if not _DEVICE.fullmatch(options["device"]):
            raise ConfigError(f"device is {device!r}; give 'cpu', 'cuda', 'cuda:N' or None", option="device", value=device)
    on_cuda = options["device"] not in (None, "cpu")
    # A copy out of memory that is not page-locked holds up the whole thread.
    _fill_in(options, "pin_memory", on_cuda)
    if options["pin_memory"] not in (False, True, "require") or type(options["pin_memory"]) is int:
        raise ConfigError(f"pin_memory is {pin!r}; give True, False or 'require'", option="pin_memory", value=pin)
    if options["output"] == "numpy":
        for name, is_set in (("pin_memory", options["pin_memory"] is not False and pin is not None), ("device", on_cuda)):
            if is_set:
                raise ConfigError(
                    f"{name}={options[name]!r} needs tensors; output='numpy' makes arrays, so leave {name} out",
                    option=name,
                    value=options[name],
                )


def check_device(device: str | None, num_devices: int) -> None:
    """Raise ConfigError for a CUDA device that is not among `num_devices`."""
    if device is None:
        return
    index = int(device.partition(":")[2] or 0)
    if index >= num_devices:
        seen = f"torch sees {num_devices} CUDA device{'s' * (num_devices != 1)}"
        raise ConfigError(f"device is {device!r}, but {seen}; use 'cpu' or None", option="device", value=device)
