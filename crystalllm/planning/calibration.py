"""Slices calibrated against each other: how fast each one's cores were while it ran.

A core's clock, its temperature and its neighbours change while planning goes on.
So a reference (`reference.py`) is measured on the cores of a slice before and
after it, and the slice's durations are brought to the usual speed of the first pass.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from crystalllm.errors import UserError
from crystalllm.planning import reference

_LIMIT_S = 120
# Beyond this a factor, or the drift within a slice, is worth a warning.
BOUND = 0.05


@dataclass(frozen=True)
class Reading:
    """The reference on one core at one moment, and the state of the core.

    Args:
        core: Which.
        matmul_ns: Median of a matrix product.
        copy_ns: Median of a copy in memory.
        others_share: Share of the time in which others had the core.
        clock_mhz: As the system tells it; 0 where it doesn't.
        temperature_c: The hottest sensor of the CPU; 0 where none is seen.
        num_throttled: Times that the core was slowed down for its temperature, since
            the system's start; -1 where that is not told.
        stolen_s: Seconds that a hypervisor gave to others, since the system's start.
        load: Runnable processes on the host, as an average over the last minute.
    """

    core: int
    matmul_ns: int
    copy_ns: int
    others_share: float = 0.0
    clock_mhz: float = 0.0
    temperature_c: float = 0.0
    num_throttled: int = -1
    stolen_s: float = 0.0
    load: float = 0.0

    @property
    def ns(self) -> float:
        """Both in one number: their geometric mean, so that neither outweighs the other."""
        return math.sqrt(self.matmul_ns * self.copy_ns)


# Readings of these cores, taken at the same time. Other devices bring their own.
Measure = Callable[[Sequence[int]], Sequence[Reading]]


def measure(cores: Sequence[int]) -> list[Reading]:
    """The reference on all of these cores at the same time, as slices use them.

    Raises:
        UserError: It fails, or does not end.
    """
    # One thread each: a library's pool would compute on other cores.
    one_thread = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")}
    running = [
        subprocess.Popen(
            [sys.executable, reference.__file__, str(core)],
            env={**os.environ, **one_thread},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for core in cores
    ]
    try:
        found = [_result(process, core) for process, core in zip(running, cores, strict=True)]
    finally:
        for process in running:
            process.kill()
            process.wait()
    clocks = _clocks_mhz()
    return [
        Reading(
            core=core,
            **taken,
            clock_mhz=clocks.get(core, 0.0),
            temperature_c=_temperature_c(),
            num_throttled=_num_throttled(core),
            stolen_s=_stolen_s(core),
            load=os.getloadavg()[0],
        )
        for core, taken in zip(cores, found, strict=True)
    ]


@dataclass(frozen=True)
class Calibration:
    """The readings around one slice, and what follows from them.

    Args:
        before: By core.
        after: By core.
    """

    before: tuple[Reading, ...]
    after: tuple[Reading, ...]

    def ns(self, core: int) -> float:
        """The reference while the slice ran: the geometric mean of before and after."""
        return math.sqrt(_of(self.before, core).ns * _of(self.after, core).ns)

    def drift(self, core: int) -> float:
        """From before to after, as a share: positive where the core became slower."""
        return _of(self.after, core).ns / _of(self.before, core).ns - 1

    def factor(self, core: int, standard: Standard) -> float:
        """What makes durations of a core those of the standard.

        It is 1 where the reference differs from the standard by no more than it, or the
        usual one, does from before to after: then the difference is noise, and a
        factor would only add it to the durations.
        """
        found = standard.ns / self.ns(core)
        noise = max(abs(math.log1p(self.drift(core))), standard.noise)
        return found if abs(math.log(found)) > noise else 1.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_json(cls, data: Mapping[str, Any]) -> Calibration:
        """Raises KeyError or TypeError for what is no calibration."""
        before, after = (tuple(Reading(**r) for r in data[k]) for k in ("before", "after"))
        return cls(before, after)


@dataclass(frozen=True)
class Standard:
    """The speed to which slices are brought.

    Args:
        ns: What the reference takes.
        noise: By which it usually changes from before to after a slice, as a logarithm.
    """

    ns: float
    noise: float

    @classmethod
    def of(cls, calibrations: Sequence[Calibration]) -> Standard:
        """The median over slices and their cores: one that had a bad moment sets no standard."""
        known = [(c, reading.core) for c in calibrations for reading in c.before]
        return cls(
            statistics.median_low(c.ns(core) for c, core in known),
            statistics.median_low(abs(math.log1p(c.drift(core))) for c, core in known),
        )


def warnings(calibration: Calibration, standard: Standard, *, where: str) -> list[str]:
    """What of a slice's conditions should be known by who uses its numbers."""
    found = []
    for core in (reading.core for reading in calibration.before):
        factor, drift = calibration.factor(core, standard), calibration.drift(core)
        before, after = _of(calibration.before, core), _of(calibration.after, core)
        if abs(factor - 1) > BOUND:
            found.append(
                f"{where}: the reference on core {core} took {1 / factor:.2f} times as long as "
                "usual; durations are scaled"
            )
        if abs(drift) > BOUND:
            found.append(
                f"{where}: the reference on core {core} changed by {drift:+.0%} while the slice ran"
            )
        others = max(before.others_share, after.others_share)
        if others > BOUND:
            found.append(f"{where}: others had core {core} for {others:.0%} of the time")
        if after.num_throttled > before.num_throttled:
            found.append(f"{where}: core {core} was slowed down for its temperature")
    return found


def _of(readings: Sequence[Reading], core: int) -> Reading:
    return next(reading for reading in readings if reading.core == core)


def _result(process: subprocess.Popen[str], core: int) -> dict[str, Any]:
    try:
        out, errors = process.communicate(timeout=_LIMIT_S)
    except subprocess.TimeoutExpired:
        raise UserError(
            f"The reference measurement did not end within {_LIMIT_S} s",
            where=f"Core {core}",
            do="Look for what keeps the core busy",
        ) from None
    if process.returncode:
        raise UserError(
            f"The reference measurement ended with code {process.returncode}",
            where=f"Core {core}: {(errors.strip() or 'no message').splitlines()[-1]}",
            do="Pass --cores with cores that this process may use",
        )
    return json.loads(out)


def _clocks_mhz() -> dict[int, float]:
    """By core, from /proc/cpuinfo; psutil gives no numbers of cores."""
    clocks: dict[int, float] = {}
    core = -1
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return clocks
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == "processor":
            core = int(value)
        elif name.strip() == "cpu MHz":
            clocks[core] = float(value)
    return clocks


def _temperature_c() -> float:
    read = getattr(psutil, "sensors_temperatures", dict)
    sensors = read()
    known = [s for name in ("coretemp", "k10temp", "cpu_thermal") for s in sensors.get(name, ())]
    return max((sensor.current for sensor in known), default=0.0)


def _num_throttled(core: int) -> int:
    path = Path(f"/sys/devices/system/cpu/cpu{core}/thermal_throttle/core_throttle_count")
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return -1


def _stolen_s(core: int) -> float:
    times = psutil.cpu_times(percpu=True)
    return float(getattr(times[core], "steal", 0.0)) if core < len(times) else 0.0
