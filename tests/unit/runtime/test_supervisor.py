from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest

from triptych.errors import StartError
from triptych.runtime import supervisor
from triptych.runtime.supervisor import SupervisedProcess, Supervisor

SLEEP = "import time; time.sleep(600)"
# Ends a second process of its own, and itself, only by SIGKILL.
STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, file=sys.stderr, flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "FIRST_BACKOFF", 0.01)


def python(name: str, code: str, *words: str, stop_order: int = 0) -> SupervisedProcess:
    return SupervisedProcess(name, [sys.executable, "-c", code, *words], None, stop_order)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextlib.asynccontextmanager
async def running(
    *children: SupervisedProcess, stop_seconds: float = 20.0
) -> AsyncIterator[tuple[Supervisor, asyncio.Task[int], list[str]]]:
    said: list[str] = []
    boss = Supervisor(children, stop_seconds=stop_seconds, say=said.append)
    task = asyncio.create_task(boss.run())
    try:
        yield boss, task, said
    finally:
        if not task.done():
            boss.stop()
            boss.stop()
        await asyncio.wait([task])


async def test_children_run_until_the_stop_and_none_is_left() -> None:
    children = [python(name, SLEEP) for name in ("a", "b")]
    async with running(*children) as (boss, task, _):
        await until(lambda: None not in (boss.pid_of("a"), boss.pid_of("b")))
        pids = [boss.pid_of(name) or 0 for name in ("a", "b")]
        assert all(alive(pid) for pid in pids)
        boss.stop()
        assert await task == 0
        assert not any(alive(pid) for pid in pids)
        assert boss.pid_of("a") is None


async def test_a_child_has_a_group_of_its_own_in_our_session() -> None:
    """Ctrl-C reaches it through us alone, and cores are shared with it as with ourselves."""
    async with running(python("a", SLEEP)) as (boss, _, _):
        await until(lambda: boss.pid_of("a") is not None)
        pid = boss.pid_of("a") or 0
        assert os.getpgid(pid) == pid
        assert os.getsid(pid) == os.getsid(0)


async def test_what_dies_is_started_again_and_the_others_stay() -> None:
    async with running(python("a", SLEEP), python("b", SLEEP)) as (boss, _, said):
        await until(lambda: None not in (boss.pid_of("a"), boss.pid_of("b")))
        boss.ready()
        first, other = boss.pid_of("a") or 0, boss.pid_of("b")
        for turn in range(1, 8):  # more often than what never came up may die
            pid = boss.pid_of("a") or 0
            os.kill(pid, signal.SIGKILL)
            await until(lambda p=pid: boss.pid_of("a") not in (None, p))  # type: ignore[misc]
            assert boss.restarts_of("a") == turn
        assert not alive(first)
        assert (boss.pid_of("b"), boss.restarts_of("b")) == (other, 0)
        assert any("SIGKILL" in line for line in said)


async def test_the_pause_before_a_restart_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "LAST_BACKOFF", 0.05)
    async with running(python("a", "")) as (_, task, said):
        with pytest.raises(StartError):
            await task
    pauses = [line.split(" in ")[1] for line in said if "restarting in" in line]
    assert pauses == ["0.0 s", "0.0 s", "0.0 s", "0.1 s"]


async def test_stderr_is_passed_on_line_by_line_with_the_name() -> None:
    code = (
        "import os, time; os.write(2, b'one\\ntwo \\xff\\n' + b'x' * 200_000 + b'\\nhalf');"
        "time.sleep(600)"
    )
    async with running(python("worker", code)) as (boss, task, said):
        await until(lambda: sum(map(len, said)) > 200_000)
        assert said[:2] == ["[worker] one", "[worker] two \N{REPLACEMENT CHARACTER}"]
        boss.stop()
        await task
    assert said[-1] == "[worker] half"
    assert sum(line.count("x") for line in said) == 200_000


async def test_a_child_that_never_comes_up_ends_the_start_with_its_last_words() -> None:
    code = "import sys; print('no such model', file=sys.stderr); sys.exit(1)"
    async with running(python("good", SLEEP), python("bad", code)) as (boss, task, _):
        with pytest.raises(StartError, match=r"bad does not start.*(?s:.*)no such model"):
            await task
        assert boss.restarts_of("bad") == supervisor.MAX_START_FAILURES - 1
        assert boss.pid_of("good") is None


@pytest.mark.parametrize(
    "child",
    [
        python("bad", "import sys; print('wrong flag', file=sys.stderr); sys.exit(2)"),
        SupervisedProcess("bad", ["/no/such/wrong flag"]),
    ],
    ids=["exit code", "no program"],
)
async def test_a_start_error_of_a_child_ends_the_start_at_once(child: SupervisedProcess) -> None:
    async with running(child) as (boss, task, _):
        with pytest.raises(StartError, match="wrong flag"):
            await task
        assert boss.restarts_of("bad") == 0


async def test_a_start_error_after_it_was_ready_is_a_death_like_others(tmp_path: Path) -> None:
    code = "import os, sys, time\nif os.path.exists(sys.argv[1]): sys.exit(2)\ntime.sleep(600)"
    flag = tmp_path / "flag"
    async with running(python("a", code, str(flag))) as (boss, task, _):
        await until(lambda: boss.pid_of("a") is not None)
        boss.ready("a")
        flag.touch()
        os.kill(boss.pid_of("a") or 0, signal.SIGKILL)
        await until(lambda: boss.restarts_of("a") >= 3)
        assert not task.done()


async def test_a_start_error_at_the_first_start_ends_all_though_they_are_called_ready() -> None:
    """Workers of others may have made the frontend ready. Proved by heeding ``ready`` alone."""
    code = "import sys; sys.stdin.read(); print('taken', file=sys.stderr); sys.exit(2)"
    async with running(python("a", code)) as (boss, task, _):
        boss.ready()
        with pytest.raises(StartError, match="taken"):
            await task


NOTING = """
import pathlib, signal, sys, time
def stop(*_):
    time.sleep(0.2)
    with open(sys.argv[1], "a") as log:
        log.write(sys.argv[2] + "\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
print("up", file=sys.stderr, flush=True)
time.sleep(600)
"""


async def test_children_stop_in_their_order(tmp_path: Path) -> None:
    log = tmp_path / "log"
    orders = {"worker-0": 2, "frontend": 1, "worker-1": 2}
    children = [python(n, NOTING, str(log), n, stop_order=o) for n, o in orders.items()]
    async with running(*children) as (boss, task, said):
        await until(lambda: len([line for line in said if line.endswith("up")]) == 3)
        boss.stop()
        assert await task == 0
    first, *rest = log.read_text().split()
    assert first == "frontend"
    assert sorted(rest) == ["worker-0", "worker-1"]


async def test_a_process_that_does_not_stop_in_time_is_killed_with_its_children() -> None:
    async with running(python("a", STUBBORN), stop_seconds=0.2) as (boss, task, said):
        await until(lambda: bool(said))
        pids = [boss.pid_of("a") or 0, int(said[0].split()[-1])]
        boss.stop()
        assert await task == 0
        await until(lambda: not any(map(alive, pids)))


async def test_a_second_stop_forces_the_exit() -> None:
    async with running(python("a", STUBBORN), stop_seconds=600) as (boss, task, said):
        await until(lambda: bool(said))
        boss.stop()
        await asyncio.sleep(0.05)
        assert not task.done()
        boss.stop()
        async with asyncio.timeout(20):
            assert await task == supervisor.EXIT_FORCED


async def test_orphans_of_a_dead_child_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(python("a", STUBBORN)) as (boss, _, said):
        await until(lambda: bool(said))
        boss.ready()
        orphan = int(said[0].split()[-1])
        os.kill(boss.pid_of("a") or 0, signal.SIGKILL)
        await until(lambda: not alive(orphan))


async def test_it_can_be_stopped_between_two_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "FIRST_BACKOFF", 600.0)
    monkeypatch.setattr(supervisor, "LAST_BACKOFF", 600.0)
    async with running(python("a", "")) as (boss, task, said):
        await until(lambda: any("restarting in" in line for line in said))
        boss.stop()
        async with asyncio.timeout(20):
            assert await task == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_signals_stop_it(number: signal.Signals) -> None:
    async with running(python("a", SLEEP)) as (boss, task, _):
        await until(lambda: boss.pid_of("a") is not None)
        os.kill(os.getpid(), number)
        async with asyncio.timeout(20):
            assert await task == 0
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


async def test_under_nohup_it_stays() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        async with running(python("a", SLEEP)) as (boss, task, _):
            await until(lambda: boss.pid_of("a") is not None)
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.sleep(0.05)
            assert not task.done()
    finally:
        signal.signal(signal.SIGHUP, before)


async def test_it_says_farewell_once() -> None:
    said: list[str] = []
    boss = Supervisor([python("a", SLEEP)], say=said.append, farewell="bye")
    task = asyncio.create_task(boss.run())
    await until(lambda: boss.pid_of("a") is not None)
    boss.stop()
    boss.stop()
    assert await task == supervisor.EXIT_FORCED
    assert said == ["bye"]


async def test_when_several_fail_at_once_each_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def fail(_: object) -> int:
        return supervisor.EXIT_START_ERROR

    monkeypatch.setattr(supervisor.LocalChild, "run", fail)
    unheard: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, about: unheard.append(about))
    with pytest.raises(StartError, match="does not start"):
        await Supervisor([python(name, SLEEP) for name in "abc"]).run()
    gc.collect()
    await asyncio.sleep(0)
    assert unheard == []


BOSS = f"""
import asyncio, sys
from triptych.runtime.supervisor import SupervisedProcess, Supervisor
children = [SupervisedProcess(name, [sys.executable, "-c", {SLEEP!r}]) for name in "ab"]

async def main():
    boss = Supervisor(children)
    task = asyncio.create_task(boss.run())
    while not all(boss.pid_of(name) for name in "ab"):
        await asyncio.sleep(0.01)
    print(boss.pid_of("a"), boss.pid_of("b"), flush=True)
    await task

asyncio.run(main())
"""


async def test_no_child_outlives_a_killed_supervisor() -> None:
    boss = await asyncio.create_subprocess_exec(
        sys.executable, "-c", BOSS, stdout=asyncio.subprocess.PIPE
    )
    assert boss.stdout is not None
    pids = [int(word) for word in (await boss.stdout.readline()).split()]
    try:
        # Past the child's own check of its parent: from here on only the kernel can end them.
        # In the midst of exec a process has no command line.
        await until(lambda: all(psutil.Process(pid).cmdline()[1:2] == ["-c"] for pid in pids))
        boss.kill()
        await until(lambda: not any(map(alive, pids)))
    finally:
        for pid in filter(alive, pids):
            os.kill(pid, signal.SIGKILL)
        if boss.returncode is None:
            boss.kill()
        await boss.wait()


async def test_a_child_whose_parent_is_gone_already_does_not_start() -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "triptych.runtime.parent_death", "1"),
        *(sys.executable, "-c", "print('started')"),
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await process.communicate()
    assert (out, process.returncode) == (b"", 1)


async def test_one_that_never_comes_up_ends_the_server_however_long_each_start_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Finding 11: each start took longer than STEADY_SECONDS, so its deaths were forgotten."""
    monkeypatch.setattr(supervisor, "STEADY_SECONDS", 0.0)
    crash = "import os; os.kill(os.getpid(), 11)"
    async with running(python("bad", crash)) as (_, task, _), asyncio.timeout(60):
        with pytest.raises(StartError, match="bad does not start: it was killed by SIGSEGV"):
            await task


async def test_a_starting_process_is_shown_with_its_last_log_line() -> None:
    code = """
import sys, time
print("loading weights ... 40%", file=sys.stderr, flush=True)
print('{"level": "warning"}', file=sys.stderr, flush=True)
sys.stdin.readline()
time.sleep(600)
"""
    up = "import sys, time; print('is ready at x', file=sys.stderr, flush=True); time.sleep(600)"
    children = [
        SupervisedProcess("slow", [sys.executable, "-c", code], up="is ready at"),
        SupervisedProcess("quick", [sys.executable, "-c", up], up="is ready at"),
    ]
    async with running(*children) as (boss, _, said):
        assert boss.starting() == {"slow": "", "quick": ""}
        await until(lambda: boss.starting() == {"slow": "loading weights ... 40%"})
        assert "[quick] is ready at x" in said
