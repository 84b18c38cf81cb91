"""Choose batch, group, servers and staleness of a run by simulation."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from bench.scaling.settings import RunSettings, SimulatedRun
from bench.scaling.simulation import simulate


@dataclass(frozen=True, slots=True)
class Constraints:
    """Holds the limits of a run.

    gpus: in all; a server takes `gpus_per_server`, the learner the rest, whose speed is in
    proportion to their number.
    max_staleness: the largest that the user accepts.
    min_group: fewest episodes of a prompt.
    batch_episodes: episodes of an update.
    """

    gpus: int
    gpus_per_server: int = 1
    max_staleness: int = 2
    min_group: int = 4
    batch_episodes: tuple[int, ...] = (256,)


@dataclass(frozen=True, slots=True)
class Option:
    """One setting with its simulated result.

    idle: shares of the time without work, by sampler, learner and service.
    """

    servers: int
    learner_gpus: int
    max_staleness: int
    batch_size: int
    group: int
    update_s: float
    episodes_an_hour: float
    updates_an_hour: float
    idle: dict[str, float]

    def as_row(self) -> dict[str, Any]:
        """Return the fields for a table."""
        return asdict(self)


def idle_shares(result: SimulatedRun) -> dict[str, float]:
    """Return the share of the run's time in which samplers, learner and services have no work.

    Of samplers it is the mean; a service with n calls at once is busy by the share of its n.
    """
    wall_s, cfg = result.wall_s, result.settings
    busy_s = sum(usage.busy_s for usage in result.samplers) / len(result.samplers)
    shares = {"samplers": 1 - busy_s / wall_s, "learner": 1 - result.learner.busy_s / wall_s}
    for service in (*cfg.tools, *cfg.scorers):
        capacity_s = wall_s * min(service.parallel, cfg.batch_episodes)
        shares[service.name] = 1 - result.services[service.name].request_s / capacity_s
    return shares


def simulate_option(
    base: RunSettings,
    servers: int,
    learner_gpus: int,
    max_staleness: int,
    group: int,
    episodes: int,
) -> Option:
    """Return the simulated result of one setting; the learner's speed is that of its GPUs."""
    learner = replace(
        base.learner,
        s_per_token=base.learner.s_per_token / learner_gpus,
        s_per_sequence=base.learner.s_per_sequence / learner_gpus,
    )
    cfg = replace(
        base,
        samplers=replace(base.samplers, servers=servers),
        learner=learner,
        max_staleness=max_staleness,
        batch_size=episodes // group,
        group=group,
    )
    result = simulate(cfg)
    update_s = result.update_s(min(max_staleness + 1, cfg.updates - 1))
    return Option(
        servers,
        learner_gpus,
        max_staleness,
        cfg.batch_size,
        group,
        update_s,
        3600 / update_s * cfg.batch_episodes,
        3600 / update_s,
        idle_shares(result),
    )


def options(base: RunSettings, limits: Constraints) -> Iterator[Option]:
    """Yield the results of the settings that are tried within the constraints.

    First the numbers of servers, with the largest staleness and batch. Then every staleness and
    batch with the best two of them. The group changes the speed only through shared prompts: the
    smallest is taken.
    """
    max_servers = (limits.gpus - 1) // limits.gpus_per_server
    largest = limits.max_staleness, max(limits.batch_episodes)

    def try_option(servers: int, staleness: int, episodes: int) -> Option:
        learner_gpus = limits.gpus - servers * limits.gpus_per_server
        return simulate_option(base, servers, learner_gpus, staleness, limits.min_group, episodes)

    by_servers = [try_option(servers, *largest) for servers in _numbers(max_servers)]
    yield from by_servers
    by_servers.sort(key=lambda option: -option.episodes_an_hour)
    for option in by_servers[:2]:
        for setting in itertools.product(range(limits.max_staleness + 1), limits.batch_episodes):
            if setting != largest:
                yield try_option(option.servers, *setting)


def _numbers(highest: int) -> Sequence[int]:
    """Return numbers of servers to try: all up to 8, then about eight of them."""
    if highest <= 8:
        return range(1, highest + 1)
    return sorted({max(1, round(highest * part / 8)) for part in range(1, 9)})


def best_option(base: RunSettings, limits: Constraints) -> Option:
    """Return the setting with the most episodes an hour; of those within 3 % the one with the
    smallest staleness, then the smallest batch, which learns more often."""
    results = list(options(base, limits))
    highest = max(option.episodes_an_hour for option in results)
    near = [option for option in results if option.episodes_an_hour >= 0.97 * highest]
    return min(near, key=lambda o: (o.max_staleness, o.batch_size * o.group, -o.episodes_an_hour))
