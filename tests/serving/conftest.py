# SPDX-License-Identifier: Apache-2.0
"""Real ``vllm serve`` processes, driven by the openai client."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

START_TIMEOUT_S = 400
VLLM = str(Path(sys.executable).with_name("vllm"))
ENVIRONMENT = {
    "VLLM_PLUGINS": "dpa_moe",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


@dataclass
class Completion:
    """One answer: generated ids, and the log-probability of every prompt token but the first."""

    token_ids: list[int]
    prompt_logprobs: list[float]


@dataclass
class Server:
    """A running ``vllm serve``."""

    process: subprocess.Popen[bytes]
    client: openai.OpenAI
    log: Path

    def complete(self, prompt: list[int], max_tokens: int) -> Completion:
        """Greedy continuation of token ids."""
        answer = self.client.completions.create(
            model="tiny",
            prompt=prompt,
            max_tokens=max_tokens,
            temperature=0,
            extra_body={"ignore_eos": True, "prompt_logprobs": 0, "return_token_ids": True},
        )
        choice: Any = answer.choices[0]
        logprobs = [
            position[str(token)]["logprob"]
            for position, token in zip(choice.prompt_logprobs[1:], prompt[1:], strict=True)
        ]
        return Completion(choice.token_ids, logprobs)


def serve_command(checkpoint: Path, port: int, options: dict[str, Any], *extra: str) -> list[str]:
    config = json.dumps({"dpa_moe": options})
    return [VLLM, "serve", str(checkpoint), "--quantization", "dpa-moe", "--host", "127.0.0.1",
            "--port", str(port), "--served-model-name", "tiny", "--additional-config", config,
            "--max-model-len", "256", "--max-num-batched-tokens", "512", "--max-num-seqs", "8",
            *extra]  # fmt: skip


@pytest.fixture(scope="session")
def refuse() -> Callable[..., str]:
    """Runs ``vllm serve``, which must exit by itself and not with 0; returns what it printed."""

    def run(checkpoint: Path, options: dict[str, Any]) -> str:
        result = subprocess.run(
            serve_command(checkpoint, free_port(), options, "--enforce-eager"),
            capture_output=True,
            text=True,
            timeout=START_TIMEOUT_S,
            env={**os.environ, **ENVIRONMENT},
            check=False,
        )
        assert result.returncode != 0
        return result.stdout + result.stderr

    return run


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Server]]:
    """Starts a server and waits until it is healthy; stops all of them after the module."""
    servers: list[Server] = []

    def start(checkpoint: Path, options: dict[str, Any], *extra: str) -> Server:
        port = free_port()
        log = tmp_path_factory.mktemp("server") / "log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                serve_command(checkpoint, port, options, *extra),
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **ENVIRONMENT},
            )
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
        server = Server(process, client, log)
        servers.append(server)
        _wait(server, port)
        return server

    yield start
    for server in servers:
        server.process.terminate()
    for server in servers:
        server.process.wait(60)


def _wait(server: Server, port: int) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            break
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2)
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    pytest.fail("the server did not start:\n" + server.log.read_text(errors="replace")[-4000:])
