# SPDX-License-Identifier: Apache-2.0
"""``make demo``: encode the bundled model, profile it, serve it on 127.0.0.1:8000.

Work is kept in ``demo/`` and done once; the server runs until Ctrl-C.
"""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODEL = Path("examples/tiny-moe")
ENCODED = Path("demo/tiny-moe-dpa")
LOG = Path("demo/server.log")
HOST, PORT = "127.0.0.1", 8000
START_TIMEOUT_S = 600

REQUEST = f"""\
curl http://{HOST}:{PORT}/v1/completions -H 'Content-Type: application/json' -d '{{
  "model": "tiny-moe", "prompt": "In the beginning God created", "max_tokens": 24, "temperature": 0}}'"""


def main() -> None:
    os.chdir(ROOT)
    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, signal.default_int_handler)
    ENCODED.parent.mkdir(exist_ok=True)
    _check_port()
    _encode()
    server = _start_server()
    try:
        _wait_until_ready(server)
        print(
            f"\nReady on http://{HOST}:{PORT} (log: {LOG}, stop with Ctrl-C). Try:\n\n{REQUEST}\n"
        )
        sys.stdout.flush()
        server.wait()
    except KeyboardInterrupt:
        print("\nstopping")
    finally:
        server.terminate()
        server.wait()


def _check_port() -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, PORT))
        except OSError:
            sys.exit(f"make demo: error: port {PORT} is in use (by another demo?); stop that first")


def _encode() -> None:
    cli = Path(sys.executable).with_name("vllm-dpa")
    text = str(MODEL / "text/calibration.txt")
    if not ENCODED.exists():
        _run(str(cli), "encode", str(MODEL), str(ENCODED), "--calibration", text)
    if not (ENCODED / "dpa/residuals.safetensors").exists():
        _run(str(cli), "profile", str(ENCODED), "--reference", str(MODEL), "--calibration", text)


def _run(*command: str) -> None:
    print("$", "vllm-dpa", *command[1:])
    sys.stdout.flush()
    if subprocess.run(command, check=False).returncode != 0:
        sys.exit(1)


def _start_server() -> subprocess.Popen[bytes]:
    command = ["vllm", "serve", str(ENCODED), "--quantization", "dpa-moe", "--host", HOST,
               "--port", str(PORT), "--served-model-name", "tiny-moe",
               "--additional-config", '{"dpa_moe": {"k_bar": 4.0}}']  # fmt: skip
    print("$", " ".join(command[:-1]), f"'{command[-1]}'")
    print("starting, about a minute ...")
    sys.stdout.flush()
    environment = {
        # The bundled model is small: the default would reserve half of the machine's memory.
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_PLUGINS": "dpa_moe",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command[0] = str(Path(sys.executable).with_name("vllm"))
    with LOG.open("wb") as log:
        return subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **environment}
        )


def _wait_until_ready(server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            tail = LOG.read_text(errors="replace").splitlines()[-20:]
            sys.exit("make demo: error: the server stopped:\n" + "\n".join(tail))
        try:
            urllib.request.urlopen(f"http://{HOST}:{PORT}/health", timeout=2)
            return
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    sys.exit(f"make demo: error: the server was not ready within {START_TIMEOUT_S} s; see {LOG}")


if __name__ == "__main__":
    main()
