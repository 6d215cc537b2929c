"""The worker, through the client: what code does, sees and leaves behind. On every local backend.

The process backend does not isolate: nothing here may harm a host.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from agentgym.errors import ToolError
from agentgym.sandbox import Language, RunResult, SandboxConfig, sandbox_backends
from agentgym.tools.sandbox.pool import PooledSandbox, SandboxPool


def local_config(backend: str, output_limit: int = 4096) -> SandboxConfig:
    return SandboxConfig.model_validate({"backend": backend, "pool_size": 0, "output_limit": output_limit})


@pytest.fixture(params=["process", "namespace"])
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    reason = sandbox_backends.get(name)().unavailable()
    if reason is not None:
        pytest.skip(f"sandbox backend {name}: {reason}")
    return name


@pytest.fixture
async def box(backend: str) -> AsyncIterator[PooledSandbox]:
    pool = SandboxPool(local_config(backend))
    yield await pool.open()
    await pool.aclose()
    assert (pool.stats().live, pool.stats().opened) == (0, pool.stats().closed)


async def run(box: PooledSandbox, language: Language, code: str, timeout: float = 20.0) -> RunResult:
    return await box.run(language, code, timeout=timeout)


async def output(box: PooledSandbox, language: Language, code: str) -> str:
    result = await run(box, language, code)
    assert (result.status, result.state_lost) == ("ok", False), result
    return result.output


# -- python ------------------------------------------------------------------------------------------------------------


async def test_python_keeps_its_state_and_shows_the_last_value(box: PooledSandbox) -> None:
    assert await output(box, "python", "import math\ndef area(r):\n    return math.pi * r * r\nx = 1") == ""
    assert await output(box, "python", "x += 1\nround(area(x), 3)") == "12.566\n"
    assert await output(box, "python", "print('a'); None") == "a\n"
    assert await output(box, "python", "_") == "12.566\n"


async def test_an_exception_is_output_and_the_state_stays(box: PooledSandbox) -> None:
    result = await run(box, "python", "x = 7\ndef f():\n    return 1 / 0\nf()")
    assert (result.status, result.state_lost) == ("error", False)
    assert result.output.endswith("    return 1 / 0\n           ~~^~~\nZeroDivisionError: division by zero\n")
    assert 'File "<call 1>", line 4' in result.output
    assert "worker" not in result.output
    assert await output(box, "python", "x") == "7\n"


async def test_a_syntax_error_is_output(box: PooledSandbox) -> None:
    result = await run(box, "python", "x = = 1")
    assert result.status == "error"
    assert result.output.endswith("SyntaxError: invalid syntax\n")


async def test_exit_in_python_ends_the_call_only(box: PooledSandbox) -> None:
    assert await output(box, "python", "y = 3\nimport sys\nsys.exit()") == ""
    result = await run(box, "python", "sys.exit('no')")
    assert (result.status, result.output) == ("error", "SystemExit: no\n")
    assert await output(box, "python", "y") == "3\n"


async def test_an_interpreter_that_ends_is_reported_and_the_next_one_is_fresh(box: PooledSandbox) -> None:
    await run(box, "python", "x = 1")
    result = await run(box, "python", "import os\nos.write(1, b'last words')\nos._exit(3)")
    assert (result.status, result.state_lost, result.output) == ("lost", True, "last words")
    assert result.reason == "the python interpreter exited with code 3"
    result = await run(box, "python", "x")
    assert (result.status, result.state_lost) == ("error", False)
    assert "NameError" in result.output


async def test_code_that_forks_does_not_answer_twice(box: PooledSandbox) -> None:
    assert await output(box, "python", "import os\npid = os.fork()\nif pid: _ = os.waitpid(pid, 0)") == ""
    assert await output(box, "python", "1") == "1\n"
    assert await output(box, "python", "2") == "2\n"


async def test_input_is_at_its_end_and_does_not_hang(box: PooledSandbox) -> None:
    assert "EOFError" in (await run(box, "python", "input()")).output
    assert await output(box, "bash", "cat; read x; echo got $?") == "got 1\n"


async def test_invalid_unicode_survives_both_ways(box: PooledSandbox) -> None:
    assert await output(box, "python", "import os; _ = os.write(1, b'\\xff\\x00ok\\n')") == "\ufffd\x00ok\n"
    assert await output(box, "python", "print('\\ud800', 'Zürich 東京')") == "\\ud800 Zürich 東京\n"
    assert await output(box, "bash", "printf '\\xff\\n'; echo Zürich 東京") == "\ufffd\nZürich 東京\n"


@pytest.mark.parametrize("size", [100, 10_000_000])
async def test_code_of_any_size_runs(box: PooledSandbox, size: int) -> None:
    text = "#" + "y" * size + "\n"
    assert await output(box, "python", text + "print(1)") == "1\n"
    assert await output(box, "bash", text + "echo 1") == "1\n"


# -- bash --------------------------------------------------------------------------------------------------------------


async def test_bash_keeps_folder_variables_and_functions(box: PooledSandbox) -> None:
    await output(box, "bash", "mkdir -p a/b; cd a/b; v='x y'; f() { echo \"f $v $1\"; }; alias g='f'")
    assert await output(box, "bash", "basename $PWD; f 1") == "b\nf x y 1\n"
    assert await output(box, "bash", "export E=1; bash -c 'echo $E'") == "1\n"


async def test_bash_tells_exit_codes_and_merges_both_streams_in_order(box: PooledSandbox) -> None:
    result = await run(box, "bash", "echo one; echo two >&2; echo three; (exit 7)")
    assert (result.status, result.exit_code, result.output) == ("error", 7, "one\ntwo\nthree\n")


@pytest.mark.parametrize(
    "code", ["echo 'open", "cat <<EOF\nhello", "echo $(", "if true; then", "f() {", "break 9", "}"]
)
async def test_unfinished_bash_code_cannot_poison_the_session(box: PooledSandbox, code: str) -> None:
    await output(box, "bash", "v=1")
    await run(box, "bash", code)
    assert await output(box, "bash", "echo $v") == "1\n"


async def test_exit_ends_the_shell_only_and_is_reported(box: PooledSandbox) -> None:
    await output(box, "python", "x = 5")
    await output(box, "bash", "v=1")
    result = await run(box, "bash", "echo bye; exit 3")
    assert (result.status, result.exit_code, result.state_lost) == ("lost", 3, True)
    assert result.output.startswith("bye\n")
    assert await output(box, "bash", "echo [$v]") == "[]\n"
    assert await output(box, "python", "x") == "5\n"


async def test_all_bytes_reach_bash_but_nul(box: PooledSandbox) -> None:
    odd = "".join(map(chr, range(1, 128))).replace("'", "").replace("\r", "").replace("\n", "")
    assert await output(box, "bash", f"printf %s '{odd}' | wc -c") == f"{len(odd)}\n"
    with pytest.raises(ToolError, match="NUL"):
        await run(box, "bash", "echo \0")


# -- output (D6) -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "truncated"), [(4095, False), (4096, False), (4097, True)])
async def test_output_up_to_the_limit_is_whole(box: PooledSandbox, size: int, truncated: bool) -> None:  # D6
    result = await run(box, "python", f"print('x' * {size - 1})")
    assert (result.truncated, result.output_bytes) == (truncated, size)
    assert (result.output == "x" * (size - 1) + "\n") is not truncated


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
async def test_a_flood_is_cut_in_the_middle_with_its_size(box: PooledSandbox, stream: str) -> None:  # D6
    code = f"import sys\nfor i in range(1000): print('a' + 'x' * 99998, file=sys.{stream})\nprint('end')"
    result = await run(box, "python", code)
    assert (result.status, result.truncated, result.output_bytes) == ("ok", True, 100_000_004)
    assert result.output.startswith("axxx")
    assert result.output.endswith("xx\nend\n")
    assert f"\n... [{100_000_004 - 4096} bytes left out] ...\n" in result.output
    assert len(result.output) < 4200


# -- time (D5) ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("language", "code"),
    [
        ("python", "import time; time.sleep(60)"),
        ("python", "while True: pass"),
        ("python", "import os; os.system('sleep 60')"),
        ("python", "import subprocess; subprocess.run(['sleep', '60'])"),
        ("bash", "sleep 60; touch late.txt"),
        ("bash", "while :; do :; done"),
        ("bash", "python3 -c 'import time; time.sleep(60)'; touch late.txt"),
        ("bash", "trap '' INT; sleep 60"),
    ],
)
async def test_an_interrupt_ends_the_call_and_keeps_the_state(
    box: PooledSandbox, language: Language, code: str
) -> None:
    await output(box, language, {"python": "x = 1", "bash": "x=1"}[language])
    started = time.monotonic()
    result = await run(box, language, code, timeout=1.0)
    assert time.monotonic() - started < 2.5
    assert result.status == "timeout"
    if "trap" not in code:
        assert not result.state_lost
        assert await output(box, language, {"python": "x", "bash": "echo $x"}[language]) == "1\n"
    assert await output(box, "bash", "ls") == ""


async def test_code_that_swallows_interrupts_loses_its_interpreter(box: PooledSandbox) -> None:
    code = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nx = 1\nwhile True: pass"
    result = await run(box, "python", code, timeout=0.5)
    assert (result.status, result.state_lost) == ("timeout", True)
    result = await run(box, "python", "x")
    assert "NameError" in result.output


async def test_a_background_job_that_holds_the_pipe_does_not_hold_the_call(box: PooledSandbox) -> None:  # D5
    started = time.monotonic()
    result = await run(box, "bash", "python3 -c 'import time; time.sleep(12)' & echo started", timeout=1.0)
    assert time.monotonic() - started < 2.0
    assert result.status == "ok"
    assert result.output.endswith("started\n")


async def test_a_timeout_kills_everything_that_was_started(box: PooledSandbox) -> None:  # D5
    code = (
        "{ sleep 2; touch late.txt; } & setsid sh -c 'sleep 2; touch late.txt' & "
        "python3 -c 'import os, time\nif os.fork(): os._exit(0)\nos.setsid()\nif os.fork(): os._exit(0)\n"
        'time.sleep(2); open("late.txt", "w")\'; sleep 60'
    )
    result = await run(box, "bash", code, timeout=1.0)
    assert result.status == "timeout"
    await asyncio.sleep(2.2)
    assert await output(box, "bash", "ls; echo next") == "next\n"


async def test_a_cancelled_call_is_stopped_and_the_next_one_works(box: PooledSandbox) -> None:
    await output(box, "python", "x = 1")
    call = asyncio.create_task(run(box, "python", "import time; time.sleep(60)"))
    await asyncio.sleep(0.2)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    started = time.monotonic()
    assert await output(box, "python", "x") == "1\n"
    assert time.monotonic() - started < 2.0


async def test_calls_wait_for_each_other(box: PooledSandbox) -> None:
    results = await asyncio.gather(
        run(box, "python", "import time; time.sleep(0.2); print(open('a').read() if 0 else 1)"),
        run(box, "bash", "echo 2"),
        run(box, "python", "3"),
    )
    assert [result.output for result in results] == ["1\n", "2\n", "3\n"]


# -- limits ------------------------------------------------------------------------------------------------------------


async def test_too_much_memory_is_an_error_of_the_code(box: PooledSandbox) -> None:
    result = await run(box, "python", "x = 1\ny = bytearray(10 ** 9)")
    assert (result.status, result.state_lost) == ("error", False)
    assert result.output.endswith("MemoryError\n")
    assert await output(box, "python", "x") == "1\n"


# -- files -------------------------------------------------------------------------------------------------------------


async def test_files_go_in_and_out(box: PooledSandbox) -> None:
    data = bytes(range(256)) * 4000
    await box.write_file("a/b/data.bin", data)
    assert await output(box, "bash", "wc -c < a/b/data.bin") == f"{len(data)}\n"
    assert await box.read_file("a/b/data.bin", limit=10_000_000) == data
    assert await box.read_file("./a//b/data.bin", limit=3) == b"\x00\x01\x02"
    await box.write_file("a/b/data.bin", b"short")
    assert await box.read_file("a/b/data.bin", limit=100) == b"short"
    assert [(e.name, e.kind, e.size) for e in await box.list_files("a/b")] == [("data.bin", "file", 5)]
    assert [(e.name, e.kind) for e in await box.list_files()] == [("a", "folder")]


@pytest.mark.parametrize(
    "path", ["../x", "a/../../x", "/etc/passwd", "/workx", "link", "link/passwd", "deep/link/x", ""]
)
async def test_no_path_leads_out(box: PooledSandbox, path: str) -> None:
    await output(box, "bash", "ln -s /etc link; mkdir deep; ln -s / deep/link")
    with pytest.raises(ToolError):
        await box.read_file(path, limit=100)
    with pytest.raises(ToolError):
        await box.write_file(path, b"x")


async def test_what_is_no_regular_file_is_refused_without_hanging(box: PooledSandbox) -> None:
    await output(box, "bash", "mkfifo pipe; mkdir folder; ln -s pipe link")
    for path in ("pipe", "folder", "link", "missing/x"):
        with pytest.raises(ToolError):
            await box.read_file(path, limit=100)
    assert {e.name: e.kind for e in await box.list_files()} == {"pipe": "other", "folder": "folder", "link": "link"}
    with pytest.raises(ToolError, match="No such file"):
        await box.list_files("missing")


# -- trusted programs --------------------------------------------------------------------------------------------------


async def test_a_trusted_program_runs_alone_with_a_clean_environment(box: PooledSandbox) -> None:
    await output(box, "python", "import os, sys; os.environ['PYTHONPATH'] = '/work'; x = 1")
    await output(box, "bash", "echo 'raise SystemExit(\"tampered\")' > json.py; (sleep 60) & v=1")
    grader = b"import json, os; print(json.dumps(sorted(os.listdir('.')))); raise SystemExit(4)"
    result = await box.run_trusted(["python3", "-I", "-"], stdin=grader, timeout=10)
    assert (result.status, result.exit_code, result.output) == ("error", 4, '["json.py"]\n')
    result = await box.run_trusted(["sleep", "60"], timeout=0.5)
    assert result.status == "timeout"
    result = await run(box, "bash", "echo [$v]")
    assert (result.output, result.state_lost) == ("[]\n", True)
