"""Random schedules of everything that can happen, over weight-sync's own state machines.

Store, network, engines and clock are simulated; who may publish, what builds on what, what may be
deleted, what a receiver believes and does next is decided by `weight_sync.core` itself. A model is
three numbers, a delta is some of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random

from weight_sync.core.manifest import PolicyVersion
from weight_sync.core.plan import Link, anchor_due, chain, prunable, stuck
from weight_sync.core.publisher import RunRecord, acquire, admit
from weight_sync.core.receiver import (
    Activate,
    Activated,
    ActivateFailed,
    Event,
    Phase,
    Prepare,
    Prepared,
    PrepareFailed,
    Verified,
    doubt,
    supersedes,
    transition,
    wants,
)
from weight_sync.core.registry import EngineEndpoint, EngineReport, Registry
from weight_sync.errors import (
    AnchorRequired,
    ChecksumMismatch,
    Fenced,
    NumberNotRising,
    PayloadMissing,
    WeightSyncError,
)

from integration_tests.weight_chaos.checker import Checker, root_of
from integration_tests.weight_chaos.simulated import (
    ANCHOR_EVERY,
    BASE,
    CRASHES,
    DAMAGES,
    ENGINES,
    HEALS_WITHIN,
    HOSTS,
    LOADS,
    RUN,
    STUCK_AFTER,
    TENSORS,
    Announced,
    Host,
    Machine,
    Model,
    Stored,
    Trainer,
    checksums,
)


class World:
    """One schedule: `run` it, then read the checker."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.checker = Checker()
        self.now_s = 0.0
        self.registry = Registry(started_s=0.0, fresh=True, report_ttl_s=15.0)
        self.record = RunRecord(RUN)
        self.log: dict[int, Announced] = {}
        self.store: dict[tuple[int, int], Stored] = {}
        self.content: dict[str, Model] = {}
        self.hosts = [Host(f"host-{n}") for n in range(HOSTS)]
        self.trainers: list[Trainer] = []
        self.faults = True
        self.seen: dict[str, int] = {}
        """How often each thing happened."""

    def run(self, actions: int) -> None:
        """Let so many random things happen, then let the faults end, and everything heal."""
        self.acquire()
        for _ in range(actions):
            self.rng.choice(self.ACTIONS)(self)
            self.check()
        self.faults = False
        self.heal()

    # publishers

    def acquire(self) -> None:
        """A trainer starts or resumes; whoever published before may not know it yet."""
        self.count("acquire")
        self.record = acquire(self.record, known_number=0)
        stored = max((number for number, _ in self.store), default=0)
        for key in [k for k, s in self.store.items() if not s.committed]:
            if key[1] < self.record.incarnation:
                del self.store[key]
        weights = self.trainers[-1].weights.copy() if self.trainers else BASE.copy()
        number = max(self.record.last_number, stored) + 1
        self.trainers.append(Trainer(self.record.incarnation, number, weights))

    def publish(self) -> None:
        """The newest trainer publishes, or one that was fenced and does not know it."""
        trainer = self.trainers[-1]
        if self.faults and self.rng.random() < 0.15:
            trainer = self.rng.choice(self.trainers)
        crash = self.rng.choice(CRASHES) if self.faults and self.rng.random() < 0.2 else ""
        try:
            self.publish_by(trainer, crash)
        except Fenced:
            self.count("fenced")
            if trainer.incarnation == self.record.incarnation:
                self.checker.violations.append("the trainer in charge was fenced")
            self.trainers.remove(trainer)
        if crash and trainer is self.trainers[-1]:
            self.count(f"crash {crash}")
            self.trainers.pop()
            self.acquire()

    def publish_by(self, trainer: Trainer, crash: str) -> None:
        number, trainer.next_number = trainer.next_number, trainer.next_number + 1
        trainer.step += 1
        for name in self.rng.sample(TENSORS, self.rng.randint(1, 3)):
            trainer.weights[name] = self.rng.getrandbits(30)
        content = trainer.weights.copy()
        links = [Link(a.version.number, a.base) for a in self.log.values()]
        base = trainer.snapshot
        if base is not None and (
            anchor_due(since_anchor=base[1], anchor_every=ANCHOR_EVERY)
            or stuck(links, self.registry.stuck_at(now_s=self.now_s))
        ):
            base = None
        if crash == "before the payload":
            return
        version = PolicyVersion(
            run=RUN,
            incarnation=trainer.incarnation,
            number=number,
            step=trainer.step,
            parent=0,
            root_hash=root_of(checksums(content)),
        )
        changed = {n: v for n, v in content.items() if base is None or base[2][n] != v}
        stored = Stored(version, base[0] if base else 0, changed)
        self.store[number, trainer.incarnation] = stored
        if crash == "in the payload":
            return
        stored.committed = True
        self.damage(stored)
        if crash == "before the announcement":
            return
        self.announce(Announced(version, stored.base), content)
        if crash:
            return
        trainer.snapshot = (number, base[1] + 1 if base else 0, content)
        self.prune(trainer)

    def damage(self, stored: Stored) -> None:
        kind = self.rng.choice(DAMAGES) if self.faults else "none"
        last = self.store.get((stored.version.number - 1, stored.version.incarnation))
        if kind == "flipped":
            stored.intact = False
        elif kind == "missing":
            stored.present = False
        elif kind == "twice the last" and last is not None:
            stored.payload = last.payload  # with a checksum to match: what it decodes to tells
        elif kind == "swapped with the last" and last is not None:
            stored.payload, last.payload = last.payload, stored.payload
        self.count(f"damage {kind}")

    def announce(self, announced: Announced, content: Model) -> None:
        self.record = admit(self.record, announced.version, base=announced.base)
        number = announced.version.number
        if self.log and number <= max(self.log):
            self.checker.violations.append(f"version {number} was announced out of order")
        self.log[number] = announced
        self.content[announced.version.label] = content
        self.checker.published(announced.version.label, checksums(content))
        for host in self.hosts:
            fate = self.rng.random() if self.faults else 1.0
            host.inbox += [announced] * (0 if fate < 0.1 else 2 if fate < 0.2 else 1)
            if fate < 0.3:
                self.rng.shuffle(host.inbox)

    def announce_again(self) -> None:
        """An answer was lost, and the announcement is repeated."""
        if not self.log:
            return
        announced = self.rng.choice(list(self.log.values()))
        try:
            admit(self.record, announced.version, base=announced.base)
        except (Fenced, NumberNotRising, AnchorRequired):
            self.count("refused repetition")
        else:
            self.checker.violations.append(f"version {announced.version.number} was let in twice")

    def prune(self, trainer: Trainer) -> None:
        needed = self.registry.needed(now_s=self.now_s)
        if not needed.settled:
            return
        numbers = {number for (number, _), s in self.store.items() if s.committed}
        links = {
            n: Link(n, a.base) for n, a in self.log.items() if n in numbers and self.at(a.version)
        }
        for number in prunable(links, targets=needed.targets, keep_latest=1):
            del self.store[number, self.log[number].version.incarnation]
        newest = max(self.log)
        left = {n: link for n, link in links.items() if self.at(self.log[n].version)}
        try:
            chain(left, newest)
        except PayloadMissing as error:
            self.checker.violations.append(f"pruning cut the way to the newest version: {error}")

    def at(self, version: PolicyVersion) -> Stored | None:
        return self.store.get((version.number, version.incarnation))

    # receivers

    def hear(self) -> None:
        """A receiver reads one announcement, or opens its stream again."""
        host = self.rng.choice(self.hosts)
        if not host.inbox and self.log:
            host.inbox.append(self.log[max(self.log)])
        if host.inbox:
            self.hear_one(host)

    def hear_one(self, host: Host) -> None:
        told = host.inbox.pop(0)
        if supersedes(told.version, host.newest.version if host.newest else None):
            host.newest = told

    def look(self) -> None:
        """A receiver asks an engine what it holds."""
        host = self.rng.choice(self.hosts)
        engine = self.rng.choice(host.engines)
        answers = not self.faults or self.rng.random() < 0.9
        event = doubt(engine.state, engine.label if answers else None)
        if event is not None:
            self.apply(engine, event)

    def work(self) -> None:
        """A receiver's update goes on by one step."""
        self.work_of(self.rng.choice(self.hosts))

    def work_of(self, host: Host) -> bool:
        """Return whether there was anything to do."""
        if host.loading is not None:
            self.load(host, host.loading)
            host.loading = None
            return True
        if host.target is not None and host.shadow is not None:
            for engine in host.engines:
                if engine.state.phase is Phase.READY:
                    self.apply(engine, Activate())
                    engine.paused = True
                    if host.target.version.number < host.reached:
                        self.checker.violations.append(f"{host.name} goes back to an older version")
                    host.reached = host.target.version.number
                    host.loading = engine
                    return True
            version = host.target.version
            host.whole = {version.number: (version, host.shadow)}
            host.target = host.shadow = None
            return True
        if host.target is not None:
            self.prepare(host, host.target)
            return True
        newest = host.newest
        due = [e for e in host.engines if newest and wants(e.state, newest.version)]
        if newest is None or not due:
            return False
        for engine in due:
            if not self.adopted(engine, newest):
                self.apply(engine, Prepare(newest.version))
                host.target = newest
        return True

    def adopted(self, engine: Machine, newest: Announced) -> bool:
        """Take an engine that can prove it has the newest version already."""
        if engine.state.phase is not Phase.UNKNOWN or engine.label != newest.version.label:
            return False
        if root_of(checksums(engine.content)) != newest.version.root_hash:
            return False
        engine.paused = False
        self.apply(engine, Verified(newest.version))
        return True

    def prepare(self, host: Host, target: Announced) -> None:
        preparing = [e for e in host.engines if e.state.phase is Phase.PREPARING]
        try:
            host.shadow = self.shadow_of(host, target)
        except WeightSyncError as error:
            self.count(f"prepare failed: {type(error).__name__}")
            if error.anchor_helps:
                host.attempts.failed(target.version.number)
            for engine in preparing:
                self.apply(engine, PrepareFailed(str(error)))
            host.target = None
            return
        host.attempts.succeeded()
        for engine in preparing:
            self.apply(engine, Prepared())

    def shadow_of(self, host: Host, target: Announced) -> Model:
        held = {
            number: model
            for number, (version, model) in host.whole.items()
            if number in self.log and self.log[number].version == version
        }
        try:
            return self.rebuilt(target, held)
        except ChecksumMismatch:
            return self.rebuilt(target, {})

    def rebuilt(self, target: Announced, held: Mapping[int, Model]) -> Model:
        links = {n: Link(n, a.base) for n, a in self.log.items()}
        steps = chain(links, target.version.number, held=held)
        model = dict(held.get(links[steps[0]].base, {})) if steps else dict(held[max(held)])
        for number in steps:
            stored = self.at(self.log[number].version)
            if stored is None or not stored.present:
                raise PayloadMissing(f"version {number} is not there")
            if not stored.intact:
                raise ChecksumMismatch(f"version {number} is damaged")
            model |= stored.payload
        if set(model) != set(TENSORS) or root_of(checksums(model)) != target.version.root_hash:
            raise ChecksumMismatch(f"what was made is not version {target.version.number}")
        return model

    def load(self, host: Host, engine: Machine) -> None:
        target = engine.state.target
        assert target is not None
        assert host.shadow is not None
        outcome = self.rng.choice(list(LOADS)) if self.faults else "done"
        self.count(f"load {outcome}")
        content, label, answers = LOADS[outcome]
        if content == "base":
            engine.restart()
        elif content == "new":
            engine.content = host.shadow.copy()
        elif content == "torn":
            engine.content |= dict(list(host.shadow.items())[:1])
        if label == "new":
            engine.label = target.label
        holds = root_of(checksums(engine.content)) == target.root_hash
        if answers and engine.label == target.label and holds:
            engine.paused = False
            self.apply(engine, Activated())
        else:
            self.apply(engine, ActivateFailed(outcome))

    def report(self) -> None:
        self.report_of(self.rng.choice(self.hosts))

    def report_of(self, host: Host) -> None:
        self.registry.register(
            node_id=host.name,
            host=host.name,
            rollout_target="",
            engines=[EngineEndpoint(str(i)) for i in range(ENGINES)],
            lease_s=0,
            now_s=self.now_s,
        )
        reports = [
            EngineReport(
                url=str(i),
                phase=e.state.phase,
                version=e.state.held.number if e.state.held else 0,
                target_version=e.state.target.number if e.state.target else 0,
            )
            for i, e in enumerate(host.engines)
        ]
        stuck_at = host.attempts.stuck_at
        self.registry.report(host.name, reports, now_s=self.now_s, stuck_at=stuck_at)

    # what else happens

    def kill_receiver(self) -> None:
        host = self.rng.choice(self.hosts)
        if host.loading is not None and self.rng.random() < 0.5:
            # The engine finished, or tore, what its receiver no longer saw.
            self.load(host, host.loading)
        self.count("receiver killed")
        host.start()

    def kill_engine(self) -> None:
        host = self.rng.choice(self.hosts)
        engine = self.rng.choice(host.engines)
        engine.restart()
        self.count("engine killed")
        if host.loading is engine:
            self.apply(engine, ActivateFailed("connection lost"))
            host.loading = None

    def jump(self) -> None:
        """The clock of the service runs on: leases end, reports grow old."""
        self.now_s += self.rng.choice([0.1, 5.0, 20.0, 3600.0])

    ACTIONS: tuple[Callable[[World], None], ...] = ()

    def apply(self, engine: Machine, event: Event) -> None:
        had = engine.state.held
        engine.state = transition(engine.state, event)
        if engine.state.held is not None and had is None:
            engine.claimed_life = engine.life

    def count(self, what: str) -> None:
        self.seen[what] = self.seen.get(what, 0) + 1

    def check(self) -> None:
        for host in self.hosts:
            if sum(e.state.phase is Phase.ACTIVATING for e in host.engines) > 1:
                self.checker.violations.append(f"{host.name} switches two engines at once")
            for index, engine in enumerate(host.engines):
                who = f"{host.name}/{index}"
                if not engine.paused:
                    self.checker.looked(who, engine.label, checksums(engine.content))
                held = engine.state.held
                # A restart that nobody has polled yet is the one thing a receiver cannot know.
                if held is not None and engine.claimed_life == engine.life:
                    self.checker.looked(f"{who}'s receiver", held.label, checksums(engine.content))

    def heal(self) -> None:
        """Without new faults, a few versions bring every engine to the newest one."""
        for _ in range(HEALS_WITHIN):
            self.now_s += 1.0
            for host in self.hosts:
                self.report_of(host)
            self.publish()
            for host in self.hosts:
                host.inbox.append(self.log[max(self.log)])
                while host.inbox:
                    self.hear_one(host)
                self.settle(host)
            self.check()
        # And once more without a version: engines that are started again get it too.
        newest = self.log[max(self.log)].version
        for host in self.hosts:
            for engine in host.engines:
                engine.restart()
            self.settle(host)
            for engine in host.engines:
                if engine.label != newest.label or engine.state.held != newest or engine.paused:
                    self.checker.violations.append(
                        f"an engine of {host.name} does not get to version {newest.number}: "
                        f"{engine.state}"
                    )
        self.check()

    def settle(self, host: Host) -> None:
        """Look at every engine and work, so often that a receiver would know itself stuck."""
        for _ in range(STUCK_AFTER):
            for engine in host.engines:
                event = doubt(engine.state, engine.label)
                if event is not None:
                    self.apply(engine, event)
            # To the end of one pass, whether it fails or not.
            while self.work_of(host) and (host.target is not None or host.loading is not None):
                pass


World.ACTIONS = (
    (World.publish,) * 4
    + (World.hear, World.look, World.report) * 4
    + (World.work,) * 20
    + (World.kill_receiver, World.kill_engine, World.acquire, World.announce_again, World.jump)
)
