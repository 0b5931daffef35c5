"""A pool that is only simulated: workers, slots' memory and a consumer on a virtual clock, with faults drawn from a seed.

Stands in for every process and system call. Memory is one word a slot, written when a worker begins and again when it ends a
Fill (or by a killed worker at any time before it is reaped), so that a slot given to two writers, or to a writer while
somebody can see it, shows as a wrong word.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ringloader._core import events as ev
from ringloader._core import messages as msg
from ringloader._core import values
from ringloader._core.batch_keys import Keys, pack_keys
from ringloader._core.policy import FaultPolicy, PoolPolicy
from ringloader._core.scheduler import Scheduler
from ringloader._core.session import Batch, Session
from ringloader._core.slots import SlotState
from ringloader._core.streams import Streams, stream_keys
from ringloader._core.views import WorkerView

Word = tuple[object, ...]


@dataclass
class SimWorker:
    """One simulated incarnation."""

    worker_id: int
    incarnation: int
    alive: bool = True  # still able to write, until reaped
    answering: bool = True  # False once killed
    queue: deque[msg.Fill] = field(default_factory=deque)
    running: msg.Fill | None = None
    began_s: float = 0.0
    kept: dict[int, int] = field(default_factory=dict)  # session id → batch id
    kept_of_streams: set[tuple[int, int]] = field(default_factory=set)
    readers: dict[tuple[int, int], int] = field(default_factory=dict)  # (session, stream) → next number


@dataclass
class Held:
    """A batch that the consumer can see."""

    key: tuple[int, int]
    place: tuple[int, int] | None
    word: Word


class Simulation:
    """One schedule: `run` raises AssertionError when a guarantee is broken."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.now_s = 0.0
        self.num_workers = rng.choice((1, 1, 2, 3))
        faults = FaultPolicy(
            restarts=rng.choice((0, 3, 50, 50)),
            sample_deaths=rng.choice((1, 3)),
            stall_s=None,
            start_timeout_s=rng.choice((None, 20.0)),
            on_bad_sample=rng.choice(("raise", "raise", "skip", "replace")),
            max_batches_per_worker=rng.choice((None, None, 1, 3)),
        )
        unreaped_s = rng.choice((5.0, 5.0, 0.0))  # 0: as with threads, which cannot be killed
        self.policy = PoolPolicy(
            self.num_workers,
            rng.choice((1, 2, 3)),
            rng.choice((5.0, 5.0, None)),
            faults,
            unreaped_s=unreaped_s,
            num_beside=rng.choice((1, 2, 99)),
        )
        self.core = Scheduler(self.policy)
        self.death_rate = rng.choice((0.0, 0.05, 0.3))
        self.hang_rate = rng.choice((0.0, 0.05)) if self.policy.timeout_s else 0.0
        self.fail_rate = rng.choice((0.0, 0.1))
        self.room = rng.choice((200, 400, 10_000))
        self.max_held = rng.choice((1, 1, 3, 40))
        self.memory: dict[tuple[int, int], Word] = {}
        self.segments: dict[int, int] = {}
        self.workers: dict[tuple[int, int], SimWorker] = {}
        self.unended: list[SimWorker] = []  # killed, abandoned, and perhaps still writing
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.num_events = 0
        self.sizes: dict[tuple[int, int], int] = {}
        self.held: list[Held] = []
        self.sessions: list[SimConsumer] = []
        self.lost = False
        self.carriers: dict[type, Callable[[Any], None]] = {
            ev.StartWorker: self.do_start_worker,
            ev.KillWorker: self.do_kill_worker,
            ev.StopWorker: self.do_stop_worker,
            ev.AbandonWorker: self.do_abandon_worker,
            ev.SendFill: self.do_send_fill,
            ev.SendCancel: self.do_send_cancel,
            ev.AddSegment: self.do_add_segment,
            ev.DropSegment: self.do_drop_segment,
            ev.DropSession: self.do_drop_session,
        }

    def run(self) -> None:
        for k in range(self.rng.choice((1, 1, 2, 3))):
            self.open(k)
        self.act(lambda: self.core.start(self.now_s))
        for _ in range(4000):
            if all(consumer.done for consumer in self.sessions):
                break
            self.step()
        else:
            raise AssertionError(f"no end after 4000 steps at {self.now_s:.1f} s")
        self.finish()

    def open(self, k: int) -> None:
        streams = Streams(self.num_workers, num_kept=self.policy.num_in_flight) if self.rng.random() < 0.3 else None
        pull = None if streams is None else stream_puller(streams)
        session = Session(k, k, in_order=self.rng.random() < 0.7, streams=streams, pull=pull)
        session.max_depth = self.rng.choice((0, 8)) if streams is None else 0
        self.core.open_session(session)
        consumer = SimConsumer(self, session, self.rng.randrange(1, 9))
        self.sessions.append(consumer)
        if k and streams is None and self.rng.random() < 0.3:
            session.is_early = True  # some of its batches are made before anybody asks
            self.later(self.rng.random(), lambda: None if consumer.done else consumer.pull())
            self.later(self.rng.random() * 8, consumer.ask)
        else:
            self.later(self.rng.random(), consumer.ask)

    def finish(self) -> None:
        """With every lease given back and every late answer in, all slots are free again."""
        for held in list(self.held):
            self.release(held)
        for _ in range(2000):
            is_idle = all(not worker.fills for worker in self.core.workers.everyone())
            if not self.events and is_idle and not self.core.workers.retiring:
                break
            self.step()
        leftover = [s for s in self.core.slots.by_id.values() if s.state not in (SlotState.FREE, SlotState.QUARANTINED)]
        leftover = [s for s in leftover if s.state is not SlotState.RETIRED]
        assert not leftover or self.lost, f"slots not back in circulation: {leftover}"
        assert not self.core.workers.retiring or self.lost, "told to stop, and still there"

    # --- time -----------------------------------------------------------------------------------------------------------

    def later(self, delay_s: float, what: Callable[[], None]) -> None:
        self.num_events += 1
        heapq.heappush(self.events, (self.now_s + delay_s, self.num_events, what))

    def step(self) -> None:
        """The next thing that happens: an event, or the look that the core has asked for."""
        look_at_s = self.core.workers.look_at_s
        if look_at_s is not None and (not self.events or look_at_s <= self.events[0][0]):
            self.now_s = max(self.now_s, look_at_s)
            self.act(lambda: self.core.tick(self.now_s, self.observe))
            return
        assert self.events, "nothing will ever happen again, and consumers are waiting"
        self.now_s, _, what = heapq.heappop(self.events)
        what()

    def act(self, decide: Callable[[], None]) -> None:
        decide()
        self.core.dispatch(self.now_s)
        self.flush()
        self.core.check()
        for held in self.held:
            assert held.place is None or self.memory[held.place] == held.word, "a batch changed while it could be seen"

    def flush(self) -> None:
        while self.core.outbox:
            self.carry_out(self.core.outbox[0])
            self.core.outbox.popleft()

    # --- commands -------------------------------------------------------------------------------------------------------

    def carry_out(self, command: Any) -> None:
        if not isinstance(command, ev.Warn):
            self.carriers[type(command)](command)

    def do_start_worker(self, command: ev.StartWorker) -> None:
        worker = SimWorker(command.worker_id, command.incarnation)
        old = [one for one in self.workers.values() if one.worker_id == command.worker_id and one.answering]
        workers = self.core.workers
        num_leaving = sum(one.worker_id == command.worker_id for one in workers.retiring)
        assert len(old) <= (command.worker_id in workers.successors) + num_leaving, "two processes for one worker id"
        self.workers[command.worker_id, command.incarnation] = worker
        if command.incarnation > 1 and self.rng.random() < self.death_rate:
            self.later(self.rng.random(), lambda: self.die(worker))
        else:
            delay_s = 60.0 if self.rng.random() < 0.02 and self.policy.faults.start_timeout_s else self.rng.random()
            self.later(delay_s, lambda: self.say(worker, msg.Ready(1, {"pid": 100 + command.incarnation, "length": 100})))

    def do_kill_worker(self, command: ev.KillWorker) -> None:
        worker = self.workers.get((command.worker_id, command.incarnation))
        if worker is not None:
            worker.answering = False
            if self.rng.random() < 0.9:
                self.later(self.rng.random() * 0.2, lambda: self.die(worker))
            else:
                self.later(30.0, lambda: self.die(worker))  # stuck in the kernel for a while

    def do_abandon_worker(self, command: ev.AbandonWorker) -> None:
        worker = self.workers.get((command.worker_id, command.incarnation))
        if worker is not None and worker.alive:
            self.unended.append(worker)

    def do_send_fill(self, command: ev.SendFill) -> None:
        worker = self.workers.get((command.worker_id, command.incarnation))
        if worker is not None and worker.answering:
            assert len(worker.queue) + (worker.running is not None) <= self.policy.num_in_flight + 8
            self.check_readers(worker, command.fill)
            worker.queue.append(command.fill)
            self.next_fill(worker)

    def check_readers(self, worker: SimWorker, fill: msg.Fill) -> None:
        """No two processes read one stream."""
        if self.consumer(fill).session.streams is None:
            return
        stream = values.decode(fill.keys)[0]
        for other in self.workers.values():
            others = [*other.queue, *([other.running] if other.running else [])] if other.answering else []
            if other is not worker:
                same = [one for one in others if one.session_id == fill.session_id and values.decode(one.keys)[0] == stream]
                assert not same, "two processes read one stream"

    def do_stop_worker(self, command: ev.StopWorker) -> None:
        worker = self.workers[command.worker_id, command.incarnation]
        assert not worker.queue, "stopped with work to do"
        assert worker.running is None, "stopped at work"
        if self.rng.random() < 0.9:
            self.later(self.rng.random() * 0.1, lambda: self.die(worker, 0))

    def do_send_cancel(self, command: ev.SendCancel) -> None:
        worker = self.workers.get((command.worker_id, command.incarnation))
        if worker is None or not worker.answering:
            return
        if worker.kept.get(command.session_id) == command.batch_id:
            del worker.kept[command.session_id]
        for fill in list(worker.queue):
            if fill.serial == command.serial:
                worker.queue.remove(fill)
                self.later(0.01, lambda f=fill: self.say(worker, msg.Cancelled(f.serial, f.generation)))  # type: ignore[misc]

    def do_add_segment(self, command: ev.AddSegment) -> None:
        used = sum(self.segments.values())
        limit = self.room if not command.forced else self.room * 2
        fitting = min(command.num_slots, max(0, limit - used) // command.slot_nbytes)
        if fitting < command.least:
            event: Any = ev.SegmentRefused(command.slot_nbytes, "full", self.rng.random() < 0.7)
        else:
            segment_id = self.num_events
            self.num_events += 1
            self.segments[segment_id] = fitting * command.slot_nbytes
            for k in range(fitting):
                self.memory[segment_id, k * command.slot_nbytes] = ("fresh",)
            event = ev.SegmentAdded(segment_id, command.slot_nbytes, fitting)
        self.later(self.rng.random() * 0.1, lambda: self.grown(event))

    def grown(self, event: Any) -> None:
        if getattr(event, "segment_id", None) in self.segments or isinstance(event, ev.SegmentRefused):
            self.act(lambda: self.core.handle(event, self.now_s))

    def do_drop_segment(self, command: ev.DropSegment) -> None:
        del self.segments[command.segment_id]
        for place in [place for place in self.memory if place[0] == command.segment_id]:
            assert not any(held.place == place for held in self.held), "memory given back that somebody can see"
            for worker in [*self.workers.values(), *self.unended]:
                running = worker.running
                assert running is None or not worker.alive or (running.segment_id, running.offset) != place
            del self.memory[place]

    def do_drop_session(self, command: ev.DropSession) -> None:
        for worker in self.workers.values():
            for key in [key for key in worker.readers if key[0] == command.session_id]:
                del worker.readers[key]

    # --- workers --------------------------------------------------------------------------------------------------------

    def observe(self, worker_id: int, incarnation: int) -> WorkerView | None:
        worker = self.workers.get((worker_id, incarnation))
        if worker is None:
            return None
        if worker.running is None:
            return WorkerView(-1, -1, 0.0, "idle")
        start, num_samples = self.place(worker.running)
        fetching = self.rng.random() < 0.8
        return WorkerView(worker.running.serial, start, worker.began_s, "fetching", fetching, num_samples=num_samples)

    def place(self, fill: msg.Fill) -> tuple[int, int]:
        """Which samples of a Fill are being fetched: the first, and how many."""
        if not self.consumer(fill).fetches_together:
            return 0, 1
        if not fill.cuts:
            return 0, len(fill.keys) // 8 if fill.int_keys else 1
        starts = np.frombuffer(fill.cuts, np.int64).tolist()
        k = self.rng.randrange(len(starts))
        assert starts == sorted(set(starts))
        assert starts[0] == 0
        return starts[k], [*starts[1:], len(fill.keys) // 8][k] - starts[k]

    def say(self, worker: SimWorker, message: Any) -> None:
        if worker.answering and worker.alive:
            self.act(lambda: self.core.receive(worker.worker_id, worker.incarnation, message, self.now_s))

    def next_fill(self, worker: SimWorker) -> None:
        if worker.running is not None or not worker.queue:
            return
        fill = worker.running = worker.queue.popleft()
        worker.began_s = self.now_s
        self.write(fill, ("half", fill.serial))
        if self.rng.random() < 0.02:
            # The answer to an earlier use of this slot, come late: the slot is half written now.
            late = msg.Filled(fill.serial, fill.generation - 1, 0, b"", b"", b"", 30, 30, 1, 10, 10, 0)
            self.later(0.0, lambda: self.say(worker, late))
        draw = self.rng.random()
        if draw < self.death_rate * 0.5:
            self.later(self.rng.random(), lambda: self.die(worker))
        elif draw < self.death_rate * 0.5 + self.hang_rate:
            pass
        else:
            self.later(self.rng.random(), lambda: self.end_fill(worker, fill))

    def write(self, fill: msg.Fill, word: Word) -> None:
        place = (fill.segment_id, fill.offset)
        if fill.slot_id != msg.NO_SLOT and place in self.memory:
            assert not any(held.place == place for held in self.held), "a worker writes where somebody can see it"
            self.memory[place] = word

    def end_fill(self, worker: SimWorker, fill: msg.Fill) -> None:
        if not worker.alive or worker.running is not fill:
            return
        worker.running = None
        if self.consumer(fill).session.streams is not None and self.end_stream_fill(worker, fill):
            self.next_fill(worker)
            return
        nbytes = self.sizes.setdefault(
            (fill.session_id, fill.batch_id), self.rng.choice((0, 30, 30, 30, 60)) if self.rng.random() < 0.2 else 30
        )
        answer: Any
        if worker.kept.get(fill.session_id) == fill.batch_id:
            del worker.kept[fill.session_id]
        if self.rng.random() < self.fail_rate:
            answer = msg.Failed(fill.serial, fill.generation, "sample", 0, "ValueError", "bad", "", {})
        elif nbytes and (fill.slot_id == msg.NO_SLOT or fill.capacity < nbytes):
            is_stream = self.consumer(fill).session.streams is not None
            kept = is_stream or self.rng.random() < 0.8
            if is_stream:
                worker.kept_of_streams.add((fill.session_id, fill.batch_id))
            elif kept:
                worker.kept[fill.session_id] = fill.batch_id
            answer = msg.NeedRoom(fill.serial, fill.generation, nbytes, kept)
        else:
            if nbytes:
                self.write(fill, ("batch", fill.session_id, fill.batch_id))
            fetch_ns = self.rng.choice((10, 20_000, 400_000, 10**9))  # some sessions are quick, for a while
            answer = msg.Filled(fill.serial, fill.generation, 0, b"", b"", b"", nbytes, nbytes, 1, fetch_ns, 10, 0)
        self.say(worker, answer)
        if worker.answering and self.rng.random() < self.death_rate * 0.2:
            self.die(worker)  # right after its answer
        self.next_fill(worker)

    def consumer(self, fill: msg.Fill) -> SimConsumer:
        return self.sessions[fill.session_id]

    def end_stream_fill(self, worker: SimWorker, fill: msg.Fill) -> bool:
        """Read on in a stream, from where the Fill says if need be; True when it had no such batch."""
        stream, number, at, state = values.decode(fill.keys)
        key = (fill.session_id, stream)
        if (fill.session_id, fill.batch_id) in worker.kept_of_streams:
            worker.kept_of_streams.discard((fill.session_id, fill.batch_id))
            return False
        if worker.readers.get(key, 1 << 30) > number:
            assert at <= number
            assert at < 0 or state == b"after %d" % at, "a state of another place"
            worker.readers[key] = max(at, 0)
        worker.readers[key] = number + 1
        consumer = self.consumer(fill)
        if number >= consumer.lengths[stream]:
            self.say(worker, msg.Ended(fill.serial, fill.generation, consumer.lengths[stream], ""))
            return True
        if consumer.saves:
            self.say(worker, msg.StreamState(fill.serial, fill.generation, b"after %d" % (number + 1)))
        return False

    def die(self, worker: SimWorker, returncode: int = -9) -> None:
        if not worker.alive:
            return
        if worker.running is not None:
            self.write(worker.running, ("torn", worker.running.serial))  # it was still writing
        worker.alive = worker.answering = False
        running = worker.running
        start, num_samples = self.place(running) if running and self.rng.random() < 0.8 else (-1, 1)
        serial, is_oom = running.serial if running else -1, self.rng.random() < 0.1
        death = ev.Death(returncode, serial, start, "fetching", num_samples=num_samples, is_oom=is_oom)
        self.act(lambda: self.core.handle(ev.WorkerExited(worker.worker_id, worker.incarnation, death), self.now_s))

    # --- consumer -------------------------------------------------------------------------------------------------------

    def release(self, held: Held) -> None:
        self.held.remove(held)
        if held.place is not None:
            pending = self.rng.random() < 0.2
            self.act(lambda: self.core.handle(ev.SlotReleased(*held.key, pending), self.now_s))
            if self.rng.random() < 0.3:
                # Released by hand first, and by the last view's end much later: the slot may be somebody else's by then.
                again = ev.SlotReleased(*held.key)
                self.later(self.rng.random() * 3, lambda: self.act(lambda: self.core.handle(again, self.now_s)))
            if pending:
                completed = ev.SlotCompleted(*held.key)
                self.later(self.rng.random(), lambda: self.act(lambda: self.core.handle(completed, self.now_s)))

    def interrupt(self) -> None:
        """An exception broke into the middle of a decision: every worker is killed, the core rebuilt. Some do not end yet."""
        stubborn = 0.1 if self.policy.unreaped_s else 0.5
        for worker in self.workers.values():
            if worker in self.unended:
                continue
            worker.answering = False
            if worker.alive and self.rng.random() < stubborn:
                self.unended.append(worker)
                self.later(self.rng.random() * 3, lambda w=worker: self.die(w))  # type: ignore[misc]
                continue
            if worker.alive and worker.running is not None:
                self.write(worker.running, ("torn", worker.running.serial))
            worker.alive = False
        unended = [(worker.worker_id, worker.incarnation) for worker in self.unended if worker.alive]
        alive = {held.key for held in self.held if held.place is not None}
        known = set(self.core.slots.segments)
        for segment_id in [one for one in self.segments if one not in known]:
            del self.segments[segment_id]
        self.act(lambda: self.core.recover(alive, set(), unended, set(self.segments), self.now_s))


def stream_puller(streams: Streams) -> Callable[[int], Keys | None]:
    """What gives the keys of any batch of these streams."""

    def pull(batch_id: int) -> Keys | None:
        number, stream = divmod(batch_id, streams.num_streams)
        return None if streams.are_over else stream_keys(stream, number, -1 - batch_id)

    return pull


class SimConsumer:
    """One session's user: asks, holds, lets go, sometimes leaves or is interrupted."""

    def __init__(self, sim: Simulation, session: Session, num_batches: int) -> None:
        self.sim, self.session, self.num_batches = sim, session, num_batches
        self.lengths = [sim.rng.randrange(0, num_batches + 1) for _ in range(sim.num_workers)]  # of streams
        self.saves = sim.rng.random() < 0.5
        self.broken: set[int] = set()
        self.fetches_together = sim.rng.random() < 0.3 and session.streams is None
        self.delivered: list[int] = []
        self.num_pulled = 0
        self.done = False
        self.leaves_at = sim.rng.randrange(num_batches) if sim.rng.random() < 0.2 else -1
        self.since_s = 0.0

    def ask(self) -> None:
        sim, session = self.sim, self.session
        session.is_early = False
        if len(self.delivered) == self.leaves_at:
            sim.act(lambda: sim.core.close_session(session.session_id))
            self.done = True
            return
        session.arrived = sim.rng.random() > 0.03
        if session.in_hand is not None and not session.arrived:
            self.lose()
        sim.act(session.settle)
        if sim.rng.random() < 0.01:
            sim.interrupt()
        self.pull()
        self.since_s = sim.now_s
        self.wait()

    def lose(self) -> None:
        """The batch in hand never reached the user: it must come again."""
        session = self.session
        assert session.in_hand is not None
        lost = self.delivered.pop()
        assert lost == session.in_hand.batch_id
        for held in [held for held in self.sim.held if held.word[1:] == (session.session_id, lost)]:
            self.sim.release(held)

    def pull_streams(self) -> None:
        """As the iterator does: so many batches ahead as are not known to be gone."""
        session, streams = self.session, self.session.streams
        assert streams is not None
        target = session.num_delivered + session.num_gone + 1 + self.sim.policy.num_in_flight
        pull, batch_id = stream_puller(streams), session.num_submitted
        while batch_id < target and (keys := pull(batch_id)) is not None:
            target += streams.is_gone(*streams.of(keys))
            self.sim.act(lambda: self.sim.core.submit(session.session_id, batch_id, keys))  # noqa: B023
            batch_id += 1
        session.ended = session.ended or streams.are_over

    def pull(self) -> None:
        if self.session.streams is not None:
            self.pull_streams()
            return
        target = self.session.num_delivered + 1 + self.sim.core.num_ahead(self.session)
        while self.num_pulled < min(target, self.num_batches):
            keys = pack_keys([self.num_pulled * 2, self.num_pulled * 2 + 1], self.num_pulled * 2)
            batch_id = self.num_pulled
            self.sim.act(lambda: self.sim.core.submit(self.session.session_id, batch_id, keys))  # noqa: B023
            self.num_pulled += 1
        self.session.ended = self.num_pulled == self.num_batches

    def wait(self) -> None:
        sim, session = self.sim, self.session
        batch = session.head()
        if batch is not None:
            self.take(batch)
        elif session.finished():
            self.end()
        elif sim.core.supervision.is_lost or sim.core.supervision.start_fault is not None:
            sim.lost = self.done = True
        else:
            if sim.core.is_starved(session) and sim.rng.random() < 0.5:
                self.unstarve()
                if self.done:
                    return
            assert sim.now_s - self.since_s < 400, f"a consumer waited {sim.now_s - self.since_s:.0f} s"
            sim.later(0.1 + sim.rng.random(), self.wait)

    def unstarve(self) -> None:
        """The ring is full: the user is told and lets something go, or others free room."""
        sim, session_has_streams = self.sim, self.session.streams is not None
        if sim.held:
            sim.release(sim.held[0])
        elif session_has_streams and sim.now_s - self.since_s > 100:
            # Two such sessions may hold all the memory there is with batches that would have to be read again: an error.
            self.done = True
            sim.act(lambda: sim.core.close_session(self.session.session_id))
            return
        elif not any(other.num_pulled and not other.done for other in sim.sessions if other is not self):
            limit = sim.room // 2
            assert sim.core.room.refusal is not None
            if sim.core.room.refusal.slot_nbytes > limit:
                sim.lost = self.done = True  # two slots of this size can never be had: an error for the user
                sim.act(lambda: sim.core.close_session(self.session.session_id))
                return
        sim.act(lambda: sim.core.retry_growth())

    def take(self, batch: Batch) -> None:
        sim, session = self.sim, self.session
        slot = sim.core.slots.by_id.get(batch.slot_id)
        place = None if slot is None or batch.fault is not None else (slot.segment_id, slot.offset)
        word: Word = ("batch", session.session_id, batch.batch_id)
        if place is not None:
            assert sim.memory[place] == word, f"batch {batch.batch_id} is {sim.memory[place]}"
            assert slot is not None
            key = (slot.slot_id, slot.generation)
        else:
            key = (-1, -1)
        sim.act(lambda: sim.core.hand_over(session, batch))
        if batch.fault is not None and batch.fault.kind == "deaths" and batch.stream >= 0:
            self.broken.add(batch.stream)  # nobody can read beyond
        if batch.fault is None:
            sim.held.append(Held(key, place, word))
        self.delivered.append(batch.batch_id)
        while len(sim.held) > sim.max_held:
            sim.release(sim.held[0])
        sim.later(sim.rng.random() * 0.5, self.ask)

    def end(self) -> None:
        expected = list(range(self.num_batches))
        got = self.delivered if self.session.in_order else sorted(self.delivered)
        if self.session.streams is not None:
            count = self.session.streams.num_streams
            expected = [k for k in range(count * 10) if k // count < self.lengths[k % count]]
            # Where a sample killed workers, its batch is the last: one that might have turned out not to exist.
            for broken in self.broken:
                had = [k for k in sorted(got) if k % count == broken]
                # One out of order may have been handed over before an earlier one, made again, ended the stream.
                assert not self.session.in_order or had == list(range(broken, broken + count * len(had), count))
                expected = sorted({*(k for k in expected if k % count != broken), *had})
        assert got == expected, f"delivered {self.delivered} of {self.num_batches}"
        self.sim.act(lambda: self.sim.core.close_session(self.session.session_id))
        self.done = True
