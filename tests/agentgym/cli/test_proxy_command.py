"""The recording endpoint as a program of its own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from openai import OpenAI


@pytest.mark.parametrize("background", [False, True])
def test_sessions_are_kept_when_the_server_is_stopped(tmp_path: Path, background: bool) -> None:
    root = str(Path(__file__).parents[3])
    code = f"import sys; sys.path.insert(0, {root!r}); from agentgym.cli import main; main()"
    if background:  # as a shell starts it with &
        code = f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); {code}"
    arguments = ["proxy", "model=tiny", "port=0", "threads=1", "output=sessions.jsonl"]
    command = [sys.executable, "-u", "-c", code, *arguments]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        assert server.stdout is not None
        url = server.stdout.readline().split(" at ")[1].split(";")[0]
        with OpenAI(base_url=url, api_key="mine") as client:
            reply = client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": "What is 3 + 4?"}],
                max_tokens=5,
                extra_body={"return_token_ids": True},
            )
        server.send_signal(signal.SIGTERM)
        rest = server.stdout.read()
    assert server.returncode == 0, rest
    assert "session mine ended: 1 requests" in rest
    assert "Traceback" not in rest
    (line,) = (tmp_path / "sessions.jsonl").read_text().splitlines()
    (segment,) = json.loads(line)["segments"]
    choice = reply.choices[0]
    assert segment["response_ids"] == choice.model_dump()["token_ids"]
    assert sum(segment["response_mask"]) == len(segment["response_ids"]) > 0
