"""The only place that starts a child process.

Every child gets an argument list (never a shell), a session of its own, so that it can be ended
with all that it started, and ``LC_ALL=C``, so that its words can be read. It dies with the worker.
Both pipes are read while it runs and only the end of each is kept; bytes that are not UTF-8 are
replaced and NULs removed, since PostgreSQL's text takes none.
"""

import asyncio
import contextlib
import dataclasses
import errno
import os
import pathlib
import shutil
import signal
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Final

import structlog

from messages import errors, redaction
from worker import children, pipes

log = structlog.get_logger(__name__)

DEFAULT_TIMEOUT: Final = 600.0
"""Seconds; os-brick's default for a command."""
CAPTURE_LIMIT: Final = pipes.CAPTURE_LIMIT
KILL_PATIENCE: Final = 10.0
"""Seconds until a killed program is given up."""
GRACE: Final = 5.0
"""Seconds between SIGTERM and SIGKILL, and for draining the pipes of a killed group."""
SETTLE_GRACE: Final = 1.0
"""Seconds for what a program's grandchildren may still write after its end."""
ENDING_GRACE: Final = 1.0
"""Seconds from SIGTERM to SIGKILL, and from that to giving up, once the worker ends."""

Argument = str | os.PathLike[str]


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """How a program ended."""

    program: str
    exit_code: int
    stdout: str
    stderr: str


class Child:
    """A program that goes on running: its pid, its pipes, and its end."""

    def __init__(self, program: str, process: pipes.Process) -> None:
        self.program = program
        self._process = process
        self._stderr = pipes.Tail()
        assert process.stderr is not None
        self._drain = asyncio.create_task(self._stderr.drain(process.stderr))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.returncode

    @property
    def stderr(self) -> str:
        """The end of what it has written to stderr so far."""
        return self._stderr.text()

    async def write_line(self, line: bytes) -> None:
        """Sends one line to its stdin; one that has closed its stdin hears nothing."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._process.stdin.write(line + b"\n")
            await self._process.stdin.drain()

    async def lines(self) -> AsyncIterator[bytes]:
        """What it writes to stdout, line by line, until it closes it."""
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            yield line.rstrip(b"\n")

    async def wait(self) -> int:
        """Waits for its end; returns the exit code, negative for a signal."""
        code = await self._process.wait()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._drain), GRACE)
        return code

    async def stop(self, *, grace: float = GRACE) -> None:
        """Ends it with its whole group, SIGTERM first, and waits until it is gone."""
        try:
            # Of one that has ended, the pid, which is the group's id too, may be another's by now.
            if self.exit_code is None:
                await _end_group(self._process, grace, KILL_PATIENCE)
        finally:
            self._drain.cancel()
            self._process.transport.close()


class Executor:
    """Runs programs found on ``PATH``.

    Args:
        root_helper: goes before a program that needs root, ``("sudo", "-n")`` for instance.
    """

    def __init__(self, root_helper: Sequence[str] = ()) -> None:
        self._root_helper = tuple(root_helper)
        self._children = children.Children()
        self._end: float | None = None
        self._timeouts: set[asyncio.Timeout] = set()

    @property
    def children(self) -> children.Children:
        """The programs that run."""
        return self._children

    def end_by(self, seconds: float) -> None:
        """Lets no :meth:`run` take longer than so many seconds from now.

        For a worker that ends: what it still has to undo may meet a tool that hangs. What is run
        after that time fails at once.
        """
        self._end = asyncio.get_running_loop().time() + seconds
        for timeout in self._timeouts:
            if not timeout.expired():
                timeout.reschedule(min(timeout.when() or self._end, self._end))

    async def run(
        self,
        *argv: Argument,
        timeout: float = DEFAULT_TIMEOUT,
        stdin: bytes = b"",
        ok_codes: Collection[int] = (0,),
        env: Mapping[str, str] | None = None,
        run_as_root: bool = False,
        secrets: Collection[str] = (),
        capture_limit: int = CAPTURE_LIMIT,
    ) -> Result:
        """Runs a program to its end.

        Args:
            timeout: seconds, after which it is killed with its group.
            capture_limit: how many bytes of stdout's end are kept.
            secrets: values that must not show in the error or a log, wherever they stand.

        Raises:
            CommandFailed: it ended with another code than ``ok_codes``, or could not be started.
            CommandTimeout: it did not end in time.
        """
        command = self._command(argv, env, run_as_root=run_as_root)
        program = pathlib.Path(os.fspath(argv[0])).name
        clock = asyncio.get_running_loop().time
        started = clock()
        if self._end is not None and self._end <= started:
            raise errors.CommandTimeout(
                f"{program} was not started: the worker ends", program=program, timeout_seconds=0
            )
        process = await self._spawn(command, program, env)
        out, err = pipes.Tail(capture_limit), pipes.Tail()
        try:
            exit_code = await self._see_out(process, stdin, out, err, timeout)
        except TimeoutError:
            took = clock() - started
            raise errors.CommandTimeout(
                f"{program} did not end within {timeout:g} s and was killed"
                if took >= timeout
                else f"{program} was killed after {took:.1f} s: the worker ends",
                program=program,
                timeout_seconds=timeout,
                stderr=redaction.mask_text(err.text(), secrets)[-2000:],
            ) from None
        stderr = redaction.mask_text(err.text(), secrets)
        if exit_code not in ok_codes:
            raise errors.CommandFailed(
                f"{program} ended with exit code {exit_code}: {_last_line(stderr)}",
                program=program,
                exit_code=exit_code,
                stderr=stderr[-2000:],
            )
        return Result(program, exit_code, out.text(), stderr)

    async def start(
        self,
        *argv: Argument,
        env: Mapping[str, str] | None = None,
        run_as_root: bool = False,
        dies_with_worker: bool = True,
    ) -> Child:
        """Starts a program that goes on running, with pipes for stdin and stdout.

        Without ``dies_with_worker`` it goes on when the worker ends.

        Raises:
            CommandFailed: it could not be started.
        """
        program = pathlib.Path(os.fspath(argv[0])).name
        if find_program(os.fspath(argv[0])) is None:
            raise _cannot_start(program, os.strerror(errno.ENOENT))
        command = self._command(
            argv, env, run_as_root=run_as_root, dies_with_worker=dies_with_worker
        )
        return Child(program, await self._spawn(command, program, env))

    def _command(
        self,
        argv: Sequence[Argument],
        env: Mapping[str, str] | None,
        *,
        run_as_root: bool,
        dies_with_worker: bool = True,
    ) -> list[str]:
        command = [os.fspath(argument) for argument in argv]
        if run_as_root:
            # sudo(8) resets the environment: what the program needs of it is set behind it.
            variables = {**env, "LC_ALL": "C"} if env and self._root_helper else {}
            assignments = [f"{name}={value}" for name, value in variables.items()]
            command = [
                *self._root_helper,
                *(["env", *assignments] if assignments else []),
                *command,
            ]
        if find_program(command[0]) is None:
            # What starts before it could not tell: setpriv would be found, and end at once. Behind
            # a root helper that is missing, the program is not to blame.
            raise _cannot_start(pathlib.Path(command[0]).name, os.strerror(errno.ENOENT))
        if dies_with_worker:
            # The kernel kills it when the worker ends, however that ends (PR_SET_PDEATHSIG).
            command = ["setpriv", "--pdeathsig", "KILL", "--", *command]
        return command

    async def _spawn(
        self, command: Sequence[str], program: str, env: Mapping[str, str] | None
    ) -> pipes.Process:
        environment = {**os.environ, **(env or {}), "LC_ALL": "C"}
        log.debug("process.started", program=program, arguments=len(command) - 1)
        spawning = asyncio.ensure_future(self._execute(command, environment))
        try:
            return await asyncio.shield(spawning)
        except OSError as error:
            first = pathlib.Path(command[0]).name
            raise _cannot_start(first, error.strerror) from error
        except asyncio.CancelledError:
            # asyncio would kill the child alone, and wait for whoever holds its pipes.
            await asyncio.wait({spawning})
            if spawning.exception() is None:
                process = spawning.result()
                try:
                    await self._end_group(process)
                finally:
                    process.transport.close()
            raise

    async def _execute(
        self, command: Sequence[str], environment: Mapping[str, str]
    ) -> pipes.Process:
        with self._children.starting():
            transport, protocol = await asyncio.get_running_loop().subprocess_exec(
                lambda: pipes.Protocol(self._children),
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=environment,
                start_new_session=True,
            )
        return pipes.Process(transport, protocol)

    async def _see_out(
        self,
        process: pipes.Process,
        stdin: bytes,
        out: pipes.Tail,
        err: pipes.Tail,
        timeout: float,
    ) -> int:
        """Feeds and reads a program to its end; returns its exit code.

        Raises:
            TimeoutError: it did not end in time, and is gone with its group.
        """
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        reading = asyncio.gather(
            _feed(process.stdin, stdin), out.drain(process.stdout), err.drain(process.stderr)
        )
        try:
            async with self._timeout(timeout):
                return await process.wait()
        except BaseException:
            await asyncio.shield(self._end_group(process))
            raise
        finally:
            await _settle(reading, process)

    @contextlib.asynccontextmanager
    async def _timeout(self, seconds: float) -> AsyncIterator[None]:
        """Raises ``TimeoutError`` after so many seconds, or once the worker has to have ended."""
        until = asyncio.get_running_loop().time() + seconds
        async with asyncio.timeout_at(until if self._end is None else min(until, self._end)) as one:
            self._timeouts.add(one)
            try:
                yield
            finally:
                self._timeouts.discard(one)

    async def _end_group(self, process: pipes.Process) -> None:
        if self._end is None:
            await _end_group(process, GRACE, KILL_PATIENCE)
        else:
            await _end_group(process, ENDING_GRACE, ENDING_GRACE)


def find_program(name: str) -> pathlib.Path | None:
    """Where a program is on ``PATH``, or None."""
    found = shutil.which(name)
    return pathlib.Path(found) if found else None


def start_time(pid: int) -> int | None:
    """When a process started, in clock ticks since boot, or None if there is none.

    With the pid and the boot it names a process for good: pids come again, field 22 of
    proc_pid_stat(5) does not.
    """
    fields = children.stat(pid)
    return None if fields is None or fields[0] in (b"Z", b"X") else int(fields[19])


async def end_recorded(pid: int, started: int, *, grace: float = GRACE) -> bool:
    """Ends a process that an earlier worker started in this boot, if it is still the same one.

    With its group, where it leads one. Returns whether there was one to end.
    """
    if start_time(pid) != started:
        return False
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            (os.killpg if os.getpgid(pid) == pid else os.kill)(pid, number)
        except ProcessLookupError:
            pass
        except PermissionError:
            log.warning("process.may_not_be_ended", pid=pid)
            return False
        deadline = asyncio.get_running_loop().time() + grace
        while asyncio.get_running_loop().time() < deadline:
            if start_time(pid) != started:
                return True
            await asyncio.sleep(0.02)
    return True


async def _feed(stream: asyncio.StreamWriter, data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        stream.write(data)
        await stream.drain()
    stream.close()


async def _settle(reading: asyncio.Future[tuple[None, None, None]], process: pipes.Process) -> None:
    # A grandchild that was left may hold a pipe open for ever: it is given a moment, no more.
    try:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(reading, SETTLE_GRACE)
    finally:
        process.transport.close()


async def _end_group(process: pipes.Process, grace: float, kill_patience: float) -> None:
    """Ends a child and all of its session's group; the group's id is the child's pid."""
    for number, patience in ((signal.SIGTERM, grace), (signal.SIGKILL, kill_patience)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), patience)
            break
    else:
        # It hangs in the kernel, on a dead device for instance, and ends when that lets it.
        log.error("process.cannot_be_killed", pid=process.pid)
    # The leader may have ended by itself on SIGTERM and left others of its group.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _cannot_start(program: str, reason: str | None) -> errors.CommandFailed:
    return errors.CommandFailed(
        f"{program} cannot be started: {reason}; is it installed and on PATH?",
        program=program,
        reason=reason,
    )


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].strip()[-500:] if lines else "it printed nothing on stderr"
