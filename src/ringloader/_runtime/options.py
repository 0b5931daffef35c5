"""The options of a loader, checked.

Owns what combinations are allowed and what None means. Everything here happens before the first process starts; each refusal
names the option, its value and the remedy. Must not look at the dataset.
"""

from __future__ import annotations

import logging
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
    pin_memory: bool
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

    @property
    def policy(self) -> PoolPolicy:
        return PoolPolicy(max(1, self.num_workers), self.prefetch_factor, self.timeout, self.faults)


def check(given: dict[str, Any]) -> Options:
    """Fill in defaults and refuse what cannot work. Raises ConfigError."""
    options = dict(given)
    _check_sampling(options)
    _fill_in(options, "num_workers", 0)
    check_count("num_workers", options["num_workers"], least=0)
    _fill_in(options, "prefetch_factor", 2)
    check_count("prefetch_factor", options["prefetch_factor"], least=1)
    _fill_in(options, "persistent_workers", True)
    for name in ("shuffle", "drop_last", "persistent_workers", "pin_memory", "in_order"):
        _fill_in(options, name, name == "in_order")
        if not isinstance(options[name], bool):
            raise ConfigError(f"{name} is {options[name]!r}; give True or False", option=name, value=options[name])
    _choose(options, "worker_backend", BACKENDS)
    _choose(options, "output", OUTPUTS)
    _choose(options, "seed_per", SEED_UNITS)
    _check_time_and_faults(options)
    _check_seed(options)
    _check_ranks(options)
    _check_memory(options)
    for name in ("collate_fn", "worker_init_fn"):
        value = options[name]
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


def _check_memory(options: dict[str, Any]) -> None:
    if options["max_ring_bytes"] is None:
        options["max_ring_bytes"] = memory.default_ring_nbytes()
    check_count("max_ring_bytes", options["max_ring_bytes"], least=1)
    if options["pin_memory"] and options["output"] == "numpy":
        raise ConfigError(
            "pin_memory=True needs tensors; output='numpy' makes arrays, so leave pin_memory out",
            option="pin_memory",
            value=True,
        )
