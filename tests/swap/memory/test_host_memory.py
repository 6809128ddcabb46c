"""Memory that a process may still take, read from trees of files as kernels and container runtimes show them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from memo.swap import available_host_bytes, total_host_bytes

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20
GIB = 1 << 30
NONE_V1 = 9223372036854771712


class Tree:
    """A root with 100 GiB of memory, 80 of them free; files are written below it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.meminfo(total=100 * GIB, available=80 * GIB)

    def write(self, name: str, text: object) -> None:
        file = self.root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def meminfo(self, *, total: int, available: int) -> None:
        lines = f"MemTotal: {total >> 10} kB\nMemAvailable: {available >> 10} kB\nHugePages_Total: 0"
        self.write("proc/meminfo", lines)

    def member(self, lines: str) -> None:
        self.write("proc/self/cgroup", lines)

    def v2(self, group: str, limit: object, used: int, *, high: object = "max", inactive: int = 0) -> None:
        place = f"sys/fs/cgroup{group}"
        self.write(f"{place}/memory.max", limit)
        self.write(f"{place}/memory.high", high)
        self.write(f"{place}/memory.current", used)
        self.write(f"{place}/memory.stat", f"anon 5\ninactive_file {inactive}\nactive_file 7")

    def v1(self, group: str, limit: int, used: int, *, inactive: int = 0) -> None:
        place = f"sys/fs/cgroup/memory{group}"
        self.write(f"{place}/memory.limit_in_bytes", limit)
        self.write(f"{place}/memory.usage_in_bytes", used)
        self.write(f"{place}/memory.stat", f"inactive_file 1\ntotal_inactive_file {inactive}")

    @property
    def available(self) -> int:
        return available_host_bytes(self.root, total_before=total_host_bytes(self.root))


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_without_cgroups_it_is_the_kernels_estimate(tree: Tree) -> None:
    assert tree.available == 80 * GIB


def test_a_container_sees_its_own_group_as_the_mount(tree: Tree) -> None:
    tree.member("0::/")
    tree.v2("", 16 * GIB, 6 * GIB)
    assert tree.available == 10 * GIB


def test_a_path_that_the_container_does_not_see_counts_by_its_mount(tree: Tree) -> None:
    tree.member("0::/kubepods/pod1/c1")
    tree.v2("", 16 * GIB, 6 * GIB)
    assert tree.available == 10 * GIB


def test_the_narrowest_of_nested_groups_counts(tree: Tree) -> None:
    tree.member("0::/user.slice/job.scope/step")
    tree.v2("/user.slice", 64 * GIB, 50 * GIB)
    tree.v2("/user.slice/job.scope", 32 * GIB, 12 * GIB)
    tree.v2("/user.slice/job.scope/step", "max", 12 * GIB)
    assert tree.available == 14 * GIB
    tree.v2("/user.slice/job.scope", 32 * GIB, 20 * GIB)
    assert tree.available == 12 * GIB
    tree.v2("/user.slice/other.scope", GIB, GIB)
    assert tree.available == 12 * GIB, "another's"


def test_without_any_limit_it_is_the_kernels_estimate(tree: Tree) -> None:
    tree.member("4:memory:/a\n0::/a")
    tree.v2("/a", "max", 12 * GIB)
    tree.v1("/a", NONE_V1, 12 * GIB)
    assert tree.available == 80 * GIB


def test_memory_high_is_a_limit_too(tree: Tree) -> None:
    tree.member("0::/a")
    tree.v2("/a", 64 * GIB, 4 * GIB, high=20 * GIB)
    assert tree.available == 16 * GIB


@pytest.mark.parametrize("controllers", ["memory", "cpuset,memory"])
def test_groups_of_the_first_version_with_all_of_their_ancestors(tree: Tree, controllers: str) -> None:
    tree.member(f"9:name=systemd:/elsewhere\n4:{controllers}:/slurm/job_1/step_0\n0::/")
    tree.v1("", NONE_V1, 90 * GIB)
    tree.v1("/slurm/job_1", 40 * GIB, 10 * GIB)
    tree.v1("/slurm/job_1/step_0", 60 * GIB, 10 * GIB)
    tree.v1("/elsewhere", GIB, GIB)
    assert tree.available == 30 * GIB


def test_file_pages_that_nobody_uses_are_there_to_be_taken(tree: Tree) -> None:
    tree.member("4:memory:/a\n0::/a")
    tree.v2("/a", 30 * GIB, 29 * GIB, inactive=9 * GIB)
    assert tree.available == 10 * GIB
    tree.v1("/a", 30 * GIB, 29 * GIB, inactive=4 * GIB)
    assert tree.available == 5 * GIB


def test_a_group_above_its_limit_leaves_nothing(tree: Tree) -> None:
    tree.member("0::/a")
    tree.v2("/a", 10 * GIB, 11 * GIB)
    assert tree.available == 0


def test_where_the_machine_grows_as_it_is_used_the_limits_count_alone(tree: Tree) -> None:
    """A sandbox shows little more than what is in use: 4 GiB of the 128 that its group may have."""
    tree.member("0::/a")
    tree.v2("/a", 128 * GIB, 3 * GIB)
    tree.meminfo(total=4 * GIB, available=GIB)
    assert available_host_bytes(tree.root, total_before=4 * GIB) == GIB
    assert available_host_bytes(tree.root, total_before=2 * GIB) == 125 * GIB
    tree.v2("/a", "max", 3 * GIB)
    assert available_host_bytes(tree.root, total_before=2 * GIB) == GIB, "nothing says how far it may grow"


def test_this_machine_has_some_memory_left_and_no_more_than_there_is() -> None:
    assert 0 < available_host_bytes() <= total_host_bytes()
