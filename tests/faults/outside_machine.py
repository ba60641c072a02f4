"""On the machine: what others take of it, limits of processes, the clock. Ranks compute no model."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from benchmarks import proc
from tests.faults.cells import ENDED, NAMED, RECOVERED, WENT_ON
from tests.faults.outside import NotHere, Own, Scene, Wrong, outside
from tests.proc.servers import limit_for

CGROUPS = Path("/sys/fs/cgroup")
MIB = 1 << 20
HOUR = 3600  # seconds


# -- others use the machine


@contextlib.contextmanager
def stressed(*args: str) -> Iterator[None]:
    """`stress-ng` with them, until the block ends."""
    program = shutil.which("stress-ng")
    if program is None:
        raise NotHere("stress-ng is not installed")
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [program, *args, "--timeout", "60", "--temp-path", folder, "--quiet"], start_new_session=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            yield
        finally:
            proc.kill(process.pid)
            process.wait(10)


def beside(scene: Scene, *args: str) -> None:
    """Streams while it runs, and a rank is killed and replaced meanwhile."""
    deployment = scene.at("mp")
    with stressed(*args):
        scene.stream(3)
        load = scene.begin()
        os.kill(deployment.pids("rank1")[0], signal.SIGKILL)
        scene.await_end(load)
        scene.rest()


@outside("stress-cpu", "`stress-ng --cpu 8`, and rank 1 is killed meanwhile", RECOVERED)
def stress_cpu(scene: Scene) -> None:
    beside(scene, "--cpu", "8")


@outside("stress-vm", "`stress-ng --vm 2 --vm-bytes 1G`, and rank 1 is killed meanwhile", RECOVERED)
def stress_vm(scene: Scene) -> None:
    beside(scene, "--vm", "2", "--vm-bytes", "1G")


@outside("stress-io", "`stress-ng --io 4 --hdd 2`, and rank 1 is killed meanwhile", RECOVERED)
def stress_io(scene: Scene) -> None:
    beside(scene, "--io", "4", "--hdd", "2", "--hdd-bytes", "64M")


# -- limits of a group of processes


@contextlib.contextmanager
def group(kind: str) -> Iterator[Path]:
    """A control group, which is empty and gone in the end."""
    made = CGROUPS / kind / f"planaria-{os.getpid()}"
    try:
        made.mkdir()
    except OSError as e:
        raise NotHere(f"no control group of {kind}: {e.strerror}") from None
    try:
        yield made
    finally:
        if kind == "freezer":
            (made / "freezer.state").write_text("THAWED")
        end = time.monotonic() + 10
        while pids := (made / "cgroup.procs").read_text().split():
            for pid in pids:
                with contextlib.suppress(OSError):
                    (CGROUPS / kind / "cgroup.procs").write_text(pid)
            if time.monotonic() > end:
                break
        made.rmdir()


def put_all(deployment: Own, into: Path) -> None:
    """Every process of the deployment, and what they start from now on."""
    assert deployment.server is not None
    for pid in proc.tree(deployment.server.pid):
        with contextlib.suppress(OSError):
            (into / "cgroup.procs").write_text(str(pid))


@outside("frozen", "every process stands still at once for 8 s, longer than the heartbeat's limit (5 s)")
def frozen(scene: Scene) -> None:
    deployment = scene.at("mp")
    assert isinstance(deployment, Own)
    with group("freezer") as made:
        load = scene.begin()
        put_all(deployment, made)
        (made / "freezer.state").write_text("FROZEN")
        time.sleep(8)
        (made / "freezer.state").write_text("THAWED")
        scene.await_end(load)


@outside("throttled", "all processes together get a tenth of a core, 5 s")
def throttled(scene: Scene) -> None:
    deployment = scene.at("mp")
    assert isinstance(deployment, Own)
    with group("cpu") as made:
        (made / "cpu.cfs_quota_us").write_text("10000")
        load = scene.begin()
        put_all(deployment, made)
        time.sleep(5)
        (made / "cpu.cfs_quota_us").write_text("-1")
        scene.await_end(load)


@outside("no-process", "no process can be started (`pids.max`) when rank 1 is killed, for 3 s", RECOVERED)
def no_process(scene: Scene) -> None:
    deployment = scene.at("mp")
    assert isinstance(deployment, Own)
    with group("pids") as made:
        put_all(deployment, made)
        load = scene.begin()
        (made / "pids.max").write_text("1")
        os.kill(deployment.pids("rank1")[0], signal.SIGKILL)
        time.sleep(3)
        (made / "pids.max").write_text("max")
        scene.await_end(load)


@outside("out-of-memory", "rank 1 is killed, and the kernel's OOM killer ends what is forked in its place, and who "
         "forks it", RECOVERED)  # fmt: skip
def out_of_memory(scene: Scene) -> None:
    deployment = scene.at("mp")
    with group("memory") as made:
        (rank,) = deployment.pids("rank1")
        (made / "memory.limit_in_bytes").write_text(str(MIB))
        (made / "cgroup.procs").write_text(str(psutil.Process(rank).ppid()))  # of what it is forked from
        load = scene.begin()
        os.kill(rank, signal.SIGKILL)
        time.sleep(4)
        (made / "memory.limit_in_bytes").write_text("-1")
        scene.await_end(load)
        scene.rest()
        scene.notes.append((made / "memory.oom_control").read_text().split("\n")[2])


@outside("little-memory", "server, engine and ranks have 64 MiB together from the start", NAMED, ENDED)
def little_memory(scene: Scene) -> None:
    with group("memory") as made:
        (made / "memory.limit_in_bytes").write_text(str(64 * MIB))
        with scene.own(prefix=within_group(made)):
            scene.stream()


def within_group(made: Path) -> tuple[str, ...]:
    return ("sh", "-c", f'echo $$ > {made}/cgroup.procs; exec "$@"', "sh")


# -- limits of a process


@outside("descriptors-at-start", "`ulimit -n 64`, and as many connections as that at once", NAMED, WENT_ON, RECOVERED)
def descriptors_at_start(scene: Scene) -> None:
    with scene.own(prefix=("prlimit", "--nofile=64:64")), connections(scene, 64):
        scene.stream()


@outside("descriptors", "the server may open no file or socket more for 3 s, while 40 clients connect")
def descriptors(scene: Scene) -> None:
    """Its streams go on; who comes meanwhile waits."""
    deployment = scene.at("mp")
    assert deployment.server is not None
    pid = deployment.server.pid
    load = scene.begin()
    have = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    try:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit_for(pid, 0), have[1]))
        with connections(scene, 40):
            late = deployment.load(40)
            time.sleep(3)
            resource.prlimit(pid, resource.RLIMIT_NOFILE, have)
            scene.await_end(load)
            scene.await_end(late)
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, have)


@outside("descriptors-engine", "rank 1 is killed when the engine may open no descriptor more, and when it may four, "
         "for 2 s", RECOVERED)  # fmt: skip
def descriptors_engine(scene: Scene) -> None:
    """A process takes four for its pipes, and one to watch it."""
    deployment = scene.at("mp")
    for room in (0, 4):
        (pid,) = deployment.pids("engine")
        have = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        load = scene.begin()
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit_for(pid, room), have[1]))
        os.kill(deployment.pids("rank1")[0], signal.SIGKILL)
        time.sleep(2)
        with contextlib.suppress(ProcessLookupError):  # another has taken its place
            resource.prlimit(pid, resource.RLIMIT_NOFILE, have)
        scene.await_end(load)
        scene.rest()


@contextlib.contextmanager
def connections(scene: Scene, count: int) -> Iterator[None]:
    """So many clients that connect and say nothing."""
    assert scene.on.server is not None
    at = urlsplit(scene.on.server.url)
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(socket.create_connection((str(at.hostname), at.port or 0), timeout=10))
        yield


@outside("addresses", "`ulimit -v`: 700 MiB of addresses a process", NAMED, WENT_ON, RECOVERED)
def addresses(scene: Scene) -> None:
    with scene.own(prefix=("prlimit", f"--as={700 * MIB}")):
        scene.stream()


@outside("few-addresses", "`ulimit -v`: 150 MiB of addresses a process", NAMED)
def few_addresses(scene: Scene) -> None:
    with scene.own(prefix=("prlimit", f"--as={150 * MIB}")):
        scene.stream()


@outside("core-and-stack", "`ulimit -s 256 -c 0 -l 0`: small stacks, no locked memory")
def small_stack(scene: Scene) -> None:
    with scene.own(prefix=("prlimit", f"--stack={256 << 10}", "--core=0", "--memlock=0")):
        scene.stream()


# -- the clock


class WrongClock:
    """A time of day for processes with `env`, which is made wrong by `step`. See clock.c. Raises NotHere."""

    def __init__(self, folder: Path) -> None:
        self.library, self.file = folder / "clock.so", folder / "wrong-by"
        compiler = shutil.which("cc")
        if compiler is None:
            raise NotHere("there is no C compiler")
        source = Path(__file__).with_name("clock.c")
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", self.library, source], check=True)
        self.file.write_bytes(bytes(8))
        self.env = {"LD_PRELOAD": str(self.library), "CLOCK_WRONG_BY": str(self.file)}

    def step(self, seconds: int) -> None:
        """From now on it is wrong by so many."""
        with open(self.file, "r+b", buffering=0) as file:
            file.write(seconds.to_bytes(8, "little", signed=True))


@outside("clock", "the clock steps 6 h forward, 12 h back, 40 days forward, to 1990, and back; each time rank 1 is "
         "killed", RECOVERED)  # fmt: skip
def clock(scene: Scene) -> None:
    with tempfile.TemporaryDirectory() as folder:
        wrong = WrongClock(Path(folder))
        with scene.own(env=wrong.env) as deployment:
            for seconds in (6 * HOUR, -6 * HOUR, 40 * 24 * HOUR, -36 * 365 * 24 * HOUR, 0):
                load = scene.begin()
                wrong.step(seconds)
                os.kill(deployment.pids("rank1")[0], signal.SIGKILL)
                scene.await_end(load)
                when = datetime.fromisoformat(deployment.health()["last_fault"]["when"]).timestamp()
                if abs(when - seconds - time.time()) > HOUR:
                    raise Wrong(f"the clock was not taken for what it says: {when}")
                scene.rest()
