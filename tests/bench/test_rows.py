"""What `tandem bench` says of its rounds: limits, sensors, odd rounds, older runs and peers."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from tandem.bench import bandwidth, benchmark, sensors
from tandem.bench import roofline as limits
from tandem.bench.machine import busy_seconds, machine_facts
from tandem.bench.peers import peer as peers
from tandem.bench.peers.peer import LlamaCpp
from tandem.bench.result import BenchResult, Limits, Row
from tandem.bench.roofline import impossible, share
from tandem.bench.rounds import Bench, Measured, Round, Workload
from tandem.bench.rows import compare, make_row, unlike
from tandem.bench.sensors import Reading, Sensors
from tandem.cli.bench_tables import _digits
from tandem.devices.backends import open_device
from tandem.devices.cpu.device import CPUDevice
from tandem.errors import DeviceError
from tandem.kernels.kernel import Cost

pytestmark = pytest.mark.fast

LIMITS: Limits = {"bytes_per_s": 100e9, "bytes_from": "reads", "ops_per_s": 1e12, "ops_from": "dot products"}
NOWHERE = Sensors(root=Path("/nowhere"))


def row(
    seconds: list[float], cost: Cost, readings: list[Reading] | None = None, root: Path | None = None
) -> Row:
    measured = Measured(Workload("decode", 10), [Round(s, s / 10, [s / 10] * 10) for s in seconds], cost, 10)
    quiet = [Reading(s, None, [], 0, 0.0) for s in seconds]
    return make_row(measured, readings or quiet, Sensors(root=root) if root else NOWHERE, LIMITS)


@pytest.mark.parametrize(
    ("cost", "of", "bound", "why"),
    [
        (Cost(50e9, 0.1e12), 0.5, "memory", ""),
        (Cost(20e9, 0.9e12), 0.9, "arithmetic", ""),
        (Cost(105e9, 0.1e12), 1.05, "memory", ""),  # within what limits are known to
        (Cost(120e9, 0.1e12), 1.2, "memory", "120 GB/s is above the roofline of 100 GB/s (memory)"),
        (Cost(20e9, 2e12), 2.0, "arithmetic", "2 TOP/s is above the roofline of 1 TOP/s (arithmetic)"),
    ],
)
def test_a_result_above_the_roofline_is_invalid(cost: Cost, of: float, bound: str, why: str) -> None:
    found = row([1.0, 1.0, 1.0], cost)
    assert (found["of_roofline"], found["bound"]) == (pytest.approx(of), bound)
    assert found["valid"] == (not why) and found["why"].startswith(why)
    unknown: Limits = {**LIMITS, "ops_per_s": None, "ops_from": None}
    assert share(50e9, 9e12, unknown) == (0.5, "memory") and not impossible(50e9, 9e12, unknown)


def test_odd_rounds_are_reported_and_counted() -> None:
    found = row([1.0, 1.01, 0.99, 1.0, 2.0], Cost(1e9, 1e9))
    assert found["outliers"] == [4] and found["warnings"] == ["round 5 of 5 is an outlier: 5.0 tokens/s"]
    assert len(found["samples"]) == 5 and found["interval"][0] == 5.0, "it counts"
    slower = row([1.0, 1.01, 1.02, 1.2, 1.21, 1.22], Cost(1e9, 1e9))
    assert slower["warnings"] == ["the last rounds are 23% slower than the first"]
    assert slower["drift"] == pytest.approx(-0.23, abs=0.01)


def test_clocks_throttling_and_others_are_noticed() -> None:
    seen = [Reading(1.0, 30.0, [mhz], 1, others) for mhz, others in ((4000, 0.3), (3000, 0.1))]
    found = row([1.0, 1.0], Cost(1e9, 1e9), seen)
    assert found["warnings"] == [
        "the clock was between 3,000 and 4,000 MHz",
        "the CPU was throttled 2 times, for it is too hot",
        "other processes took 20% of the machine",
    ]
    assert found["energy"] and (found["energy"]["joules_per_token"], found["energy"]["watts"]) == (3.0, 30.0)


def write(file: Path, value: object) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{value}\n")


def test_the_cpus_sensors(tmp_path: Path) -> None:
    zone = tmp_path / "class/powercap/intel-rapl:0"
    cpu = tmp_path / f"devices/system/cpu/cpu{min(os.sched_getaffinity(0))}"
    write(zone / "energy_uj", 9_000_000)
    write(zone / "max_energy_range_uj", 10_000_000)
    write(tmp_path / "class/powercap/intel-rapl:0:0/energy_uj", 1)  # a part of the package
    write(cpu / "cpufreq/scaling_cur_freq", 4_000_000)
    write(cpu / "thermal_throttle/core_throttle_count", 7)
    found = Sensors(root=tmp_path)
    assert (found.energy_source, found.clock_source, found.notes) == ("RAPL package", "cpufreq", [])

    def work() -> str:
        write(zone / "energy_uj", 2_000_000)  # the counter began again
        write(cpu / "thermal_throttle/core_throttle_count", 9)
        return "done"

    result, reading = found.during(work)
    assert (
        result == "done" and reading.joules == 3.0 and reading.throttled == 2 and reading.clocks[-1] == 4000
    )


def test_the_sensors_of_an_amd_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sensors, "EVERY", 0.01)
    monitor = tmp_path / "class/drm/card0/device/hwmon/hwmon3"
    write(monitor / "power1_average", 20_000_000)
    write(monitor / "freq1_input", 2_700_000_000)
    found = Sensors(gpu=True, root=tmp_path)
    assert found.energy_source == found.clock_source == "amdgpu"
    _, reading = found.during(lambda: time.sleep(0.05))
    assert reading.joules == pytest.approx(20 * reading.seconds) and set(reading.clocks) == {2700.0}
    assert reading.seconds >= 0.05


def test_sensors_that_are_not_for_us(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "class/powercap/intel-rapl:0/energy_uj", 1)

    def refuse(file: Path) -> str:
        raise PermissionError(13, "Permission denied", str(file))

    monkeypatch.setattr(Path, "read_text", refuse)  # root may read all
    found = Sensors(root=tmp_path)
    assert found.notes == ["RAPL is only readable by root: run as root to measure energy"]
    assert found.during(lambda: 1)[1].joules is None


def test_no_sensors_and_the_machine() -> None:
    before = busy_seconds()
    _, reading = NOWHERE.during(lambda: 1)
    assert (reading.joules, reading.clocks, reading.throttled) == (None, [], 0) and reading.others >= 0
    assert busy_seconds() >= before and machine_facts()["cores"] >= 1


def result(scale: float, spread: float = 0.01, **fields: object) -> BenchResult:
    seconds = [1 / scale * (1 + spread * i) for i in (-1, 0, 1, 0.5, -0.5)]
    base = {"model": "m", "device": "d", "kv": "f16", "threads": 2, "machine": {"cpu": "c"}}
    return {**base, "rows": [row(seconds, Cost(1e9, 1e9))], **fields}  # type: ignore[return-value, typeddict-item]


def test_an_older_run_is_faster_slower_or_the_same() -> None:
    assert [compare(result(scale), result(1.0))[0]["verdict"] for scale in (1.1, 0.9, 1.001)] == [
        "faster",
        "slower",
        "the same",
    ]
    found = compare(result(1.1), result(1.0))[0]
    assert (
        found["ratio"] == pytest.approx(1.1) and found["ratio_interval"][0] < 1.1 < found["ratio_interval"][1]
    )
    assert compare(result(1.1, 0.5), result(1.0, 0.5))[0]["verdict"] == "the same", "too noisy to tell"
    lie = result(1.0)
    lie["rows"][0]["valid"] = False
    assert compare(result(1.1), lie)[0]["verdict"] == "invalid"
    assert compare(result(1.0), result(1.0, rows=[])) == []
    assert unlike(result(1.0), result(1.0)) == []
    others = result(1.0, rows=[{**result(1.0)["rows"][0], "label": "prefill 7"}])
    assert unlike(result(1.0), others) == ["none of these tests is in the older result, which has prefill 7"]
    busy = result(1.0, rows=[{**result(1.0)["rows"][0], "others": 0.3}])
    label = busy["rows"][0]["label"]
    assert unlike(result(1.0), busy) == [
        f"in the older result, during {label}, other processes took 30% of the machine"
    ]
    said = unlike(result(1.0), result(1.0, kv="q8", machine={"cpu": "other"}))
    assert said == [
        "the older result has a different kv: q8, not f16",
        "the older result is from a different machine: other",
    ]


PEER = """import json, sys, time
reply = {"version": "1.2", "system": "AVX512 = 1"}
log = open(sys.argv[1], "a")
while True:
    print(json.dumps(reply), flush=True)
    line = sys.stdin.readline()
    if not line: break
    request = json.loads(line)
    print(json.dumps(request), file=log, flush=True)
    # with flash attention it takes 10 ms less
    flash = request.get("flash", globals().get("flash"))
    reply = {"seconds": 0.02 - 0.01 * bool(flash), "cpu": 0.0}
"""


def test_a_peer_alternates_with_us(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, log = tmp_path / "peer.py", tmp_path / "log"
    script.write_text(PEER)
    monkeypatch.setattr(peers, "SCRIPT", script)
    monkeypatch.setattr(peers, "FIND", "")
    monkeypatch.setattr(peers, "SETTLE", 0.0)
    monkeypatch.setattr(benchmark, "SETTLE", 0.0)
    order: list[str] = []

    class Ours:
        def warm_up(self, workload: Workload) -> None: ...

        def round(self, workload: Workload) -> Round:
            order.append(f"ours after {len(log.read_text().splitlines())}")
            return Round(0.005, 0.001, [0.005])

        measured = Bench.measured
        engine = None

        def steps(self, workload: Workload) -> list[object]:
            return []

    peer = LlamaCpp(sys.executable, log, 2, gpu=False, kv="f16", vocab=100)
    workload = Workload("decode", 4, 3, 5)
    measured, _, theirs = benchmark.take(Ours(), workload, 4, NOWHERE, peer)  # type: ignore[arg-type]
    peer.close()
    assert theirs == [0.01] * 4 and peer.about["build"] == "AVX512 = 1"
    # Two openings with two rounds of two commands each, closed, and the last one.
    before = 1 + 5 + 1 + 5 + 1 + 1
    assert order == [f"ours after {before + n}" for n in (1, 1, 5, 5)]
    assert measured.seconds == [0.005] * 4


def test_there_is_no_such_peer(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="give --peer a Python"):
        LlamaCpp(str(tmp_path / "python"), tmp_path, 2, gpu=False, kv="f16", vocab=100)
    without = subprocess.run([sys.executable, "-c", peers.FIND], check=False).returncode
    if without:
        with pytest.raises(DeviceError, match="llama_cpp is not installed"):
            LlamaCpp(sys.executable, tmp_path, 2, gpu=False, kv="f16", vocab=100)


def test_limits_are_measured_again_before_a_result_is_called_impossible(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rates = iter((50e9, 120e9, 1e15))
    monkeypatch.setattr(benchmark, "raised", lambda limits, *_: {**limits, "bytes_per_s": next(rates)})
    fast = Measured(Workload("decode", 10), [Round(1.0, 0.1, [0.1] * 10)], Cost(115e9, 1), 10)
    device = CPUDevice(1)
    assert benchmark.checked(LIMITS, fast, device, 1)["bytes_per_s"] == 120e9, "until one allows it"
    assert benchmark.checked({**LIMITS, "bytes_per_s": 106e9}, fast, device, 1)["bytes_per_s"] == 106e9
    device.close()


def test_the_memory_and_the_units_that_devices_share_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth.HostReads, "best", lambda reads: 20e9 * reads.threads)
    monkeypatch.setattr(limits, "host_ops", lambda threads: 1e12 * threads)
    monkeypatch.setenv("TANDEM_THREADS", "2")
    with closing(open_device("cpu,cpu,cpu", threads=3)) as device:
        found = limits.measure_limits(device, 1 << 20)
    assert found["bytes_per_s"] == 40e9 and found["ops_per_s"] == 2e12, (
        "two threads read, however many devices"
    )


def test_figures_of_slow_devices_are_not_all_zero() -> None:
    shown = [_digits(number) for number in (4565.4, 123.4, 33.31, 0.4642, 0.0057, 0.00002, 0.0)]
    assert shown == ["4,565", "123", "33.3", "0.464", "0.0057", "<0.001", "0"]
