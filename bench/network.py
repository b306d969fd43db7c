"""Several hosts on one machine: network namespaces joined by a link of a chosen rate, processes of a chosen speed.

Needs root, iproute2 (``ip``, ``tc`` with tbf), ``nsenter`` (``ip netns exec`` would hide the groups of processes) and
the cpu controller of cgroups, version 1 or 2. What is made bears the id of the process that made it, and goes with it:
what a killed one left behind goes when the next one begins.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import sleep

PERIOD = 10_000  # us, in which a process may run for its share of a core; far below a micro-batch
BURST = "32kb"  # passes at once: messages are to be many times that
_OURS = re.compile(r"megagraph(\d+)-")


@dataclass(frozen=True, kw_only=True)
class Bed:
    """Hosts, joined by one link that all processes of a host share.

    Args:
        nodes, per_node: hosts, and processes of each.
        mbit: of the link, in 10^6 bits a second and direction.
        speeds: share of a core of every process, in the order of their ranks.
    """

    nodes: int = 2
    per_node: int = 1
    mbit: float
    speeds: tuple[float, ...]

    @property
    def ranks(self) -> int:
        return self.nodes * self.per_node


def refusal() -> str | None:
    """Why this machine has no beds; ``None`` where it has."""
    if os.geteuid():
        return "network namespaces need root"
    try:
        subprocess.run(["tc", "-V"], check=True, capture_output=True)
        subprocess.run(["ip", "netns", "list"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"iproute2 does not run: {error}"
    return None if _controller() is not None else "no cpu controller of cgroups can be written"


def run(bed: Bed, arguments: Sequence[str], timeout: float) -> None:
    """``torchrun`` on every host of a bed; the first that fails ends all.

    Each process calls :func:`take_share` first.

    Raises:
        subprocess.CalledProcessError, subprocess.TimeoutExpired: a host failed, or took too long.
    """
    _sweep()
    with _hosts(bed) as hosts, _shares(bed) as shares, ExitStack() as stack:
        processes = []
        for node, (name, _) in enumerate(hosts):
            command = ["nsenter", f"--net=/run/netns/{name}", sys.executable, "-m", "torch.distributed.run"]
            command += ["--nnodes", str(bed.nodes), "--node-rank", str(node), "--nproc-per-node", str(bed.per_node)]
            command += ["--master-addr", hosts[0][1], "--master-port", "29500", *arguments]
            environment = os.environ | {"GLOO_SOCKET_IFNAME": "wire", "OMP_NUM_THREADS": "1", "BED_SHARES": shares}
            processes.append(stack.enter_context(subprocess.Popen(command, env=environment)))
            stack.callback(processes[-1].terminate)
        waited = 0.0
        while any(process.poll() is None for process in processes):
            failed = [process for process in processes if process.poll()]
            if failed:
                raise subprocess.CalledProcessError(failed[0].returncode, failed[0].args)
            if waited > timeout:
                raise subprocess.TimeoutExpired(processes[0].args, timeout)
            sleep(0.5)
            waited += 0.5
        for process in processes:
            if process.returncode:
                raise subprocess.CalledProcessError(process.returncode, process.args)


def take_share(rank: int) -> None:
    """Take a core, and of it the share that the bed gives this process."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    (Path(f"{os.environ['BED_SHARES']}{rank}") / "cgroup.procs").write_text(str(os.getpid()))


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


@contextmanager
def _hosts(bed: Bed) -> Iterator[list[tuple[str, str]]]:
    """(Namespace, address) of every host, all on one bridge that none of them owns."""
    name = f"megagraph{os.getpid()}"
    network = f"10.{64 + os.getpid() % 64}.{os.getpid() // 64 % 256}"
    hosts = [(f"{name}-{node}", f"{network}.{node + 1}") for node in range(bed.nodes)]
    switch = f"{name}-switch"
    with ExitStack() as stack:
        for namespace in (switch, *(host for host, _ in hosts)):
            _ip("netns", "add", namespace)  # its links go with it
            stack.callback(subprocess.run, ["ip", "netns", "del", namespace], check=False)
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        for node, (host, address) in enumerate(hosts):
            port = f"port{node}"
            _ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", "wire", "netns", host)
            _ip("-n", switch, "link", "set", port, "master", "bridge", "up")
            _ip("-n", host, "addr", "add", f"{address}/24", "dev", "wire")
            for device in ("lo", "wire"):
                _ip("-n", host, "link", "set", "dev", device, "up")
            shape = ["qdisc", "replace", "dev", "wire", "root", "tbf", "rate", f"{bed.mbit}mbit", "burst", BURST]
            subprocess.run(["tc", "-n", host, *shape, "latency", "400ms"], check=True)
        yield hosts


@contextmanager
def _shares(bed: Bed) -> Iterator[str]:
    """The beginning of the names of groups that have a rank's share of a core each."""
    controller = _controller()
    assert controller is not None
    prefix = controller / f"megagraph{os.getpid()}-"
    with ExitStack() as stack:
        for rank, speed in enumerate(bed.speeds):
            group, quota = Path(f"{prefix}{rank}"), int(speed * PERIOD)
            group.mkdir()
            stack.callback(_remove, group)
            if (group / "cpu.max").exists():
                (group / "cpu.max").write_text(f"{quota} {PERIOD}")
            else:
                (group / "cpu.cfs_period_us").write_text(str(PERIOD))
                (group / "cpu.cfs_quota_us").write_text(str(quota))
        yield str(prefix)


def _controller() -> Path | None:
    """The folder where groups with a share of the processors are made."""
    root = Path("/sys/fs/cgroup")
    if os.access(root / "cpu" / "cpu.cfs_quota_us", os.W_OK):
        return root / "cpu"
    delegated = root / "cgroup.subtree_control"
    if os.access(delegated, os.W_OK) and "cpu" in delegated.read_text().split():
        return root
    return None


def _remove(group: Path) -> None:
    for _ in range(50):  # a process that has just ended still counts for a moment
        with suppress(OSError):
            group.rmdir()
            return
        sleep(0.1)


def _sweep() -> None:
    """Remove what processes have left behind that are gone."""
    listed = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout
    for namespace in (line.split()[0] for line in listed.splitlines() if line):
        if _is_orphan(namespace):
            subprocess.run(["ip", "netns", "del", namespace], check=False)
    controller = _controller()
    for group in controller.glob("megagraph*-*") if controller else ():
        if _is_orphan(group.name):
            _remove(group)


def _is_orphan(name: str) -> bool:
    found = _OURS.match(name)
    return found is not None and not Path(f"/proc/{found[1]}").exists()
