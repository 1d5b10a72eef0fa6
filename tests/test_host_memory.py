"""Free memory is the machine's or the container's, whichever is less."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.devices.host_memory import host_memory

pytestmark = pytest.mark.fast

MACHINE = 1_000_000  # bytes, less than any machine has


def free(folder: Path, membership: str, groups: dict[str, str]) -> float:
    """host_memory where the process has this /proc/self/cgroup and these files of control groups."""
    files = {"proc/meminfo": f"MemFree: 1 kB\nMemAvailable: {MACHINE // 1000} kB\n", **groups}
    if membership:
        files["proc/self/cgroup"] = membership
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return host_memory(folder / "proc", folder / "cgroup")


def version_2(group: str, limit: str) -> dict[str, str]:
    stat = "anon 50000\nfile 40000\ninactive_file 30000\nactive_file 10000\n"
    return {
        f"cgroup/{group}memory.max": f"{limit}\n",
        f"cgroup/{group}memory.current": "90000\n",
        f"cgroup/{group}memory.stat": stat,
    }


def test_no_groups(tmp_path: Path) -> None:
    assert free(tmp_path, "", {}) == MACHINE * 1.024


def test_a_container_s_limit(tmp_path: Path) -> None:
    assert free(tmp_path, "0::/\n", version_2("", "200000")) == 200000 - 90000 + 40000


def test_the_least_of_nested_groups(tmp_path: Path) -> None:
    groups = {
        **version_2("a/b/", "max"),
        **version_2("a/", "300000"),
        **version_2("", "max"),
        **version_2("c/", "1"),
    }
    assert free(tmp_path, "0::/a/b\n", groups) == 300000 - 90000 + 40000


def test_a_group_that_is_full(tmp_path: Path) -> None:
    assert free(tmp_path, "0::/\n", version_2("", "10000")) == 0


@pytest.mark.parametrize("folder", ["memory/docker/1234/", "memory/"])
def test_version_1_as_seen_from_outside_and_inside(tmp_path: Path, folder: str) -> None:
    groups = {
        f"cgroup/{folder}memory.limit_in_bytes": "500000\n",
        f"cgroup/{folder}memory.usage_in_bytes": "100000\n",
        f"cgroup/{folder}memory.stat": "cache 9\ntotal_inactive_file 20000\ntotal_active_file 5000\n",
    }
    membership = "5:cpu,cpuacct:/docker/1234\n4:memory:/docker/1234\n0::/\n"
    assert free(tmp_path, membership, groups) == 500000 - 100000 + 25000
