# SPDX-License-Identifier: Apache-2.0
"""A whole model through vLLM's engine on the CPU: prefill and decode against bf16 of the same shape.

    python -m vllm_dpa.benchmarks.cpu_engine CHECKPOINT --k-bar 2,4,8 --batches 1,8

CHECKPOINT is an encoded one, such as ``examples/synthetic_moe.py`` writes; bf16 gets random weights of
the shape in its config.json. Both rarely fit in memory together, so the engines take turns, each in a
process of its own, for some rounds; a number is the median over all repetitions of all rounds.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

PROMPT, DECODED = 512, 16
ENVIRONMENT = {
    "VLLM_PLUGINS": "dpa_moe",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the budget is changed, and memory read, in this process
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "OMP_WAIT_POLICY": "passive",
}


class Engine:
    """One vLLM engine in this process."""

    def __init__(self, checkpoint: Path, bf16: bool, max_chunks: int) -> None:
        from vllm import LLM

        options: dict[str, Any] = {
            "skip_tokenizer_init": True,
            "dtype": "bfloat16",
            "enable_prefix_caching": False,
            "max_model_len": 2 * PROMPT,
        }
        start = time.perf_counter()
        if bf16:
            with tempfile.TemporaryDirectory() as folder:
                config = json.loads((checkpoint / "config.json").read_text())
                del config["quantization_config"]
                (Path(folder) / "config.json").write_text(json.dumps(config))
                self._llm = LLM(folder, load_format="dummy", **options)
        else:
            runtime = {"dpa_moe": {"max_chunks": max_chunks}}
            self._llm = LLM(str(checkpoint), additional_config=runtime, **options)
        self.facts = {"start_s": time.perf_counter() - start, **memory()}

    def set_k_bar(self, k_bar: float) -> None:
        from vllm_dpa import runtime

        runtime.worker().k_bar.fill_(k_bar)

    def seconds(self, batch: int, prompt: int, new_tokens: int) -> float:
        """Wall time of one batch of random prompts."""
        import torch
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False
        )
        ids = torch.randint(100, 50000, (batch, prompt)).tolist()
        prompts = [{"prompt_token_ids": row} for row in ids]
        start = time.perf_counter()
        self._llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start

    def prefill(self) -> float:
        """Tokens per second."""
        return PROMPT / self.seconds(1, PROMPT, 1)

    def decode(self, batch: int) -> float:
        """Tokens per second of all sequences, without the first token's prefill."""
        both = self.seconds(batch, 16, 1 + DECODED)
        return batch * DECODED / (both - self.seconds(batch, 16, 1))


def memory() -> dict[str, float]:
    """Present and highest resident memory of this process, GB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"resident_gb": pages * resource.getpagesize() / 1e9, "peak_gb": peak * 1024 / 1e9}


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """What one engine does in one round: name of a figure -> repetitions."""
    bf16 = arguments.engine == "bf16"
    engine = Engine(arguments.checkpoint, bf16, max(round(k + 0.499) for k in arguments.k_bar))
    figures: dict[str, list[float]] = defaultdict(list)
    for repetition in range(arguments.repetitions + 1):
        for k_bar in [None] if bf16 else arguments.k_bar:
            name = "bf16" if k_bar is None else f"k-bar {k_bar:g}"
            if k_bar is not None:
                engine.set_k_bar(k_bar)
            found = {f"{name}, prefill of {PROMPT}": engine.prefill()}
            for batch in arguments.batches:
                found[f"{name}, decode of {batch}"] = engine.decode(batch)
            if repetition:  # the first one warms up
                for key, value in found.items():
                    figures[key].append(value)
    return {"facts": engine.facts, "figures": figures}


def profile(arguments: argparse.Namespace) -> None:
    """Print where the time of decode steps of one sequence goes, by operator."""
    import torch

    engine = Engine(arguments.checkpoint, arguments.engine == "bf16", 8)
    if arguments.engine != "bf16":
        engine.set_k_bar(arguments.k_bar[0])
    engine.seconds(1, 16, 8)
    with torch.profiler.profile() as found:
        engine.seconds(1, 16, 33)
    table = found.key_averages().table(sort_by="self_cpu_time_total", row_limit=16)
    print(table)


def run_in_turns(arguments: argparse.Namespace) -> dict[str, Any]:
    """All engines for all rounds, each in a fresh process."""
    facts: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    figures: dict[str, list[float]] = defaultdict(list)
    for _ in range(arguments.rounds):
        for engine in ("bf16", "dpa"):
            command = [sys.executable, "-m", "vllm_dpa.benchmarks.cpu_engine", *sys.argv[1:]]
            child = subprocess.run(
                [*command, "--engine", engine], stdout=subprocess.PIPE, text=True, check=True
            )
            found = json.loads(child.stdout.strip().splitlines()[-1])
            for key, value in found["facts"].items():
                facts[engine][key].append(value)
            for key, values in found["figures"].items():
                figures[key] += values
    return {
        "facts": {e: {k: median(v) for k, v in f.items()} for e, f in facts.items()},
        "tokens_per_s": {key: median(values) for key, values in figures.items()},
        "repetitions": {key: len(values) for key, values in figures.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--k-bar", type=numbers(float), default=[2.0, 4.0, 8.0])
    parser.add_argument("--batches", type=numbers(int), default=[1, 8])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=5, help="per round")
    parser.add_argument("--profile", action="store_true", help="of --engine: decode by operator")
    parser.add_argument("--engine", choices=("bf16", "dpa"), help="only this one, one round")
    arguments = parser.parse_args()
    if arguments.engine is None:
        print(json.dumps(run_in_turns(arguments), indent=1))
        return
    os.environ.update(ENVIRONMENT)
    if arguments.profile:
        profile(arguments)
    else:
        print(json.dumps(measure(arguments)))


def numbers(kind: type) -> Any:
    return lambda text: [kind(part) for part in text.split(",")]


if __name__ == "__main__":
    main()
