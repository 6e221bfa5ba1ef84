# SPDX-License-Identifier: Apache-2.0
"""An encode that is killed goes on and ends with the same bytes; shards merge to the same bytes."""

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_model import content, make_model

from vllm_dpa.errors import DpaError
from vllm_dpa.profiling import encode as encode_module
from vllm_dpa.profiling import workspace as workspace_module
from vllm_dpa.profiling.encode import encode, encode_shard, merge
from vllm_dpa.profiling.fitters import StageA
from vllm_dpa.profiling.layer_fit import EncodeOptions
from vllm_dpa.profiling.workspace import Shard

OPTIONS = EncodeOptions(group_size=32)

# Encodes, and kills itself with SIGKILL at the n-th of the calls that change the disk.
KILLED = """
import os, signal, sys
from pathlib import Path
model, out, deadline = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
calls = 0
def dying(function):
    def wrapped(*args, **kwargs):
        global calls
        calls += 1
        if calls == deadline:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)
    return wrapped
from vllm_dpa.profiling.encode import encode
from vllm_dpa.profiling.layer_fit import EncodeOptions
os.replace, os.rename, os.unlink = dying(os.replace), dying(os.rename), dying(os.unlink)
Path.unlink = dying(Path.unlink)
encode(model, out, EncodeOptions(group_size=32))
print(calls)
"""


def encode_killed(model: Path, out: Path, deadline: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", KILLED, str(model), str(out), str(deadline)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )


def leftovers(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.name.startswith("."))


def test_killed_anywhere_it_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    whole = tmp_path / "whole"
    done = encode_killed(model, whole, -1)
    calls = int(done.stdout)
    expected = content(whole)
    for moment in (2, calls // 3, 2 * calls // 3, calls - 1):
        out = tmp_path / f"killed-{moment}"
        assert encode_killed(model, out, moment).returncode == -signal.SIGKILL
        if out.exists():  # killed while it dropped what is no longer needed
            with pytest.raises(DpaError, match="exists"):
                encode(model, out, OPTIONS)
        else:
            encode(model, out, OPTIONS)
        assert content(out) == expected
    assert leftovers(tmp_path) == []


def test_finished_layers_are_not_fitted_again(tmp_path: Path) -> None:
    model, out = make_model(tmp_path / "model"), tmp_path / "out"
    fitted: list[str] = []

    class Counting(StageA):
        def fit(self, weights, options, advance):
            fitted.append(weights.shape.prefix)
            if len(fitted) == 2:
                raise KeyboardInterrupt
            return super().fit(weights, options, advance)

    with pytest.raises(KeyboardInterrupt):
        encode(model, out, OPTIONS, Counting())
    assert not out.exists()
    encode(model, out, OPTIONS, Counting())
    assert [prefix.split(".")[2] for prefix in fitted] == ["0", "1", "1"]
    assert leftovers(tmp_path) == []


def test_bad_weight_in_a_later_layer_loses_nothing(tmp_path: Path) -> None:
    model, out = make_model(tmp_path / "model"), tmp_path / "out"
    good = load_file(model / "model.safetensors")
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    bad = good | {name: torch.full_like(good[name], torch.nan)}
    save_file(bad, model / "model.safetensors")
    with pytest.raises(DpaError, match=r"up_proj\.weight holds NaN"):
        encode(model, out, OPTIONS)
    assert leftovers(tmp_path) == [".out.partial"]
    save_file(good, model / "model.safetensors")
    encode(model, out, OPTIONS)
    encode(model, tmp_path / "again", OPTIONS)
    assert content(out) == content(tmp_path / "again")


def unfinished(tmp_path: Path) -> tuple[Path, Path]:
    """A model and the OUT of an encode that has one of two layers."""
    model, out = make_model(tmp_path / "model"), tmp_path / "out"
    encode_shard(model, out, OPTIONS, shard=Shard(1, 2))
    return model, out


@pytest.mark.parametrize(
    ("change", "named"),
    [({"tier_exponent": 0.25}, "options"), ({"scale_layout": "per_chunk"}, "options")],
)
def test_going_on_with_other_options_is_refused(
    tmp_path: Path, change: dict[str, object], named: str
) -> None:
    model, out = unfinished(tmp_path)
    with pytest.raises(DpaError, match=f"unfinished encode with other {named}"):
        encode(model, out, OPTIONS.model_copy(update=change))
    encode(model, out, OPTIONS)


def test_going_on_with_another_model_is_refused(tmp_path: Path) -> None:
    _, out = unfinished(tmp_path)
    other = make_model(tmp_path / "other", torch.float32)
    with pytest.raises(DpaError, match="unfinished encode with other model"):
        encode(other, out, OPTIONS)
    with pytest.raises(DpaError, match="made from another model"):
        merge(other, out)


def test_second_process_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    model, out = unfinished(tmp_path)
    with (tmp_path / ".out.partial/lock-1-of-1").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(DpaError, match="being encoded by another process"):
            encode(model, out, OPTIONS)


@pytest.mark.parametrize("count", [2, 3])
def test_shards_merge_to_the_same_bytes(tmp_path: Path, count: int) -> None:
    model, out = make_model(tmp_path / "model"), tmp_path / "out"
    for index in range(count, 0, -1):
        encode_shard(model, out, OPTIONS, shard=Shard(index, count))
    merge(model, out)
    encode(model, tmp_path / "whole", OPTIONS)
    assert content(out) == content(tmp_path / "whole")
    assert leftovers(tmp_path) == []


def test_merge_names_the_missing_layer(tmp_path: Path) -> None:
    model, out = unfinished(tmp_path)
    with pytest.raises(DpaError, match=r"1 of 2 layers are not encoded yet.*model\.layers\.1"):
        merge(model, out)


def test_merge_of_nothing_is_refused(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    with pytest.raises(DpaError, match="encode all shards first"):
        merge(model, tmp_path / "out")


@pytest.mark.parametrize("text", ["", "1", "0/2", "3/2", "a/b", "1/2/3", "-1/2"])
def test_bad_shard_is_refused(text: str) -> None:
    with pytest.raises(DpaError, match="give I/N"):
        Shard.parse(text)


def test_full_disk_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(tmp_path / "model")

    class Usage:
        free = 1000

    monkeypatch.setattr(workspace_module.shutil, "disk_usage", lambda _: Usage)
    with pytest.raises(DpaError, match=r"0\.0 GiB free, encoding needs"):
        encode(model, tmp_path / "out", OPTIONS)
    assert leftovers(tmp_path) == []


def test_result_does_not_depend_on_the_number_of_threads(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            encode(model, tmp_path / str(threads), OPTIONS)
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert content(tmp_path / "1") == content(tmp_path / "3")


def test_disk_never_holds_more_than_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Watched at every file that is completed; the headers of many tiny files are allowed for."""
    model, out = make_model(tmp_path / "model"), tmp_path / "out"
    source = encode_module.SourceCheckpoint(model)
    planned = encode_module.disk_bytes(source, encode_module._settings(OPTIONS), source.layers)
    sizes: list[int] = []
    replace = os.replace

    def watch(a: Path, b: Path) -> None:
        replace(a, b)
        if str(b).endswith(".safetensors"):
            files = [p for p in (tmp_path / ".out.partial").rglob("*") if p.is_file()]
            headers = sum(8 + int.from_bytes(p.read_bytes()[:8], "little")
                          for p in files if p.suffix == ".safetensors")  # fmt: skip
            quality = sum(p.stat().st_size for p in files if ".quality." in p.name)
            sizes.append(sum(p.stat().st_size for p in files) - headers - quality)

    monkeypatch.setattr(os, "replace", watch)
    encode(model, out, OPTIONS)
    assert 0.8 * planned < max(sizes) <= planned + 2000
