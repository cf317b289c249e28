"""Commands under torchrun and srun: processes with ranks, which meet through torch.distributed."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path

import click
import pytest
from builders import Tensor, assemble, state_dict_ops, torch_zip, written
from cli.conftest import Cli, wrapped
from conftest import LONG
from forks import TORCHRUN, Forks
from stores import Bucket

from ckptfix.cli.shared.ranks import World, world

# Rank 1 waits for rank 0 before it writes, so rank 0 is never the late one.
ALL_KILLS = [*product([False, True], [0], [0, 1], [False, True]), *product([False, True], [1], [0, 1], [False])]
KILLS = ALL_KILLS if LONG else [(False, 1, 0, False), (True, 0, 0, True)]
MEETING = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29411"}
SLURM = {"SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "77", "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1"}


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, None),
        ({"RANK": "1", "WORLD_SIZE": "2", **MEETING}, World(1, 2, "127.0.0.1", 29411)),
        ({"RANK": "0", "WORLD_SIZE": "1", **MEETING}, None),
        ({"RANK": "1", "WORLD_SIZE": "2"}, None),
        ({"RANK": "1", "WORLD_SIZE": "2", **MEETING, "CKPTFIX_RANKS": "off"}, None),
        (SLURM, None),
        ({**SLURM, "CKPTFIX_RANKS": "slurm"}, World(1, 4, "10.0.0.1", 20077)),
        ({**SLURM, **MEETING, "CKPTFIX_RANKS": "slurm"}, World(1, 4, "127.0.0.1", 29411)),
        ({**SLURM, "SLURM_NTASKS": "1", "CKPTFIX_RANKS": "slurm"}, None),
    ],
)
def test_what_the_environment_says(environment: dict[str, str], found: World | None) -> None:
    assert world(environment) == found


@pytest.mark.parametrize(
    "environment", [{"CKPTFIX_RANKS": "yes"}, {"CKPTFIX_RANKS": "on", "RANK": "0", "WORLD_SIZE": "2"}]
)
def test_what_cannot_be_meant_is_refused(environment: dict[str, str]) -> None:
    with pytest.raises(click.UsageError):
        world(environment)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_command_that_writes_no_folder_is_done_by_rank_0(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    path = written(tmp_path / "a.pth", wrapped())
    for name, value in {**MEETING, "RANK": str(rank), "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    for words in (["inspect", path], ["to-cpu", path, tmp_path / "b.pth", "-n"], ["to-cpu", path, "--in-place"]):
        before = path.read_bytes()
        done = cli(*words)
        assert done.exit_code == 0
        assert (done.stdout == "") == (rank == 1)
        assert done.stderr == ("" if rank else "2 ranks: rank 0 works alone\n")
        assert rank == 0 or path.read_bytes() == before


def shards(tensors: int = 6) -> bytes:
    items = {f"l{number}.weight": Tensor(str(number), (250, 1000), 250_000) for number in range(tensors)}
    pickle = assemble(("PROTO", 2), *state_dict_ops(items), "STOP")
    return torch_zip(pickle, [bytes([number]) * 1_000_000 for number in range(tensors)])


def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        found: int = free.getsockname()[1]
        return found


def ranks(size: int, *words: object, site: Path | None = None, timeout: int = 40) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) of each of `size` processes that do one command."""
    path = [*([str(site)] if site else []), *sys.path]
    shared = {
        "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port()), "CKPTFIX_RANKS": "on",
        "CKPTFIX_RANKS_TIMEOUT": str(timeout), "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "ckptfix", *map(str, words)], text=True,
            env={**os.environ, **shared, "RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(size)
    ]  # fmt: skip
    try:
        said = [one.communicate(timeout=240) for one in started]
    finally:
        for one in started:
            one.kill()
    return [(one.returncode, *text) for one, text in zip(started, said, strict=True)]


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.sampled(0, test_all=1)
@pytest.mark.slow
def test_two_ranks_write_what_one_does(cli: Cli, tmp_path: Path) -> None:
    path = written(tmp_path / "a.pth", shards())
    words = ["--to", "hf", "--shard-size", "2MB"]
    assert cli("convert", path, tmp_path / "one", *words).exit_code == 0
    first, second = ranks(2, "convert", path, tmp_path / "two", *words, "--json")
    assert (first[0], second) == (0, (0, "", "")), first
    assert json.loads(first[1])["output"] == str(tmp_path / "two")
    assert content(tmp_path / "two") == content(tmp_path / "one")
    assert len(content(tmp_path / "two")) == 4
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a.pth", "one", "two"]


@pytest.mark.campaign
def test_one_file_is_written_by_rank_0(tmp_path: Path) -> None:
    path = written(tmp_path / "a.pth", wrapped())
    first, second = ranks(2, "to-cpu", path, tmp_path / "b.pth")
    assert first[0] == 0 and "rank 0 wrote the output alone" in first[2], first
    assert second == (0, "", "")
    assert (tmp_path / "b.pth").exists()


INJECTED = """
import os, sys
sys.path[:0] = {path!r}
if os.environ.get("RANK") == "1":
    import ckptfix.io.folders as folders

    def shares(plan, size):
        {fault}

    folders.shares = shares
"""
FAULTS = {
    "killed": "os.kill(os.getpid(), 9)",
    "full": "raise OSError(28, 'No space left on device')",
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", [pytest.param("killed", marks=pytest.mark.campaign), "full"])
def test_a_rank_that_ends_takes_all_down(tmp_path: Path, fault: str) -> None:
    path = written(tmp_path / "a.pth", shards(3))
    site = tmp_path / "site"
    site.mkdir()
    written(site / "sitecustomize.py", INJECTED.format(path=sys.path, fault=FAULTS[fault]).encode())
    words = ["convert", path, tmp_path / "out", "--to", "hf", "--shard-size", "1MB"]
    first, second = ranks(2, *words, site=site, timeout=8 if fault == "killed" else 40)
    if fault == "killed":
        assert second == (-9, "", "")
        assert (first[0], first[1]) == (2, "")
        assert first[2].startswith("rank 1 of 2 is gone: it has been silent for 8 s\n"), first[2]
    else:
        assert first == (2, "", "")
        assert (second[0], second[1]) == (2, "")
        assert "rank 1 of 2: " in second[2] and "No space left on device" in second[2], second[2]
    assert "Traceback" not in first[2] + second[2]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a.pth", "site"]


Torchrun = Callable[..., tuple[int, str, str]]


@pytest.fixture
def torchrun(launcher: Forks) -> Torchrun:
    """A function that runs a command under torchrun: its exit code, its stdout, its stderr."""

    def run(size: int, *words: object, site: Path | None = None, restarts: int = 0) -> tuple[int, str, str]:
        launch = ["--nproc-per-node", size, "--max-restarts", restarts, "-m", "ckptfix"]
        path = [*([str(site)] if site else []), *sys.path]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
        done = launcher(TORCHRUN, [*launch, *words], environment=environment)
        return done.code, done.stdout, done.stderr

    return run


@pytest.mark.campaign
@pytest.mark.parametrize("size", [2, 4] if LONG else [2])
@pytest.mark.parametrize("to", [["hf", "--shard-size", "1MB"], ["dcp", "--shard-size", "2MB"]])
def test_torchrun(cli: Cli, torchrun: Torchrun, tmp_path: Path, size: int, to: list[str]) -> None:
    path = written(tmp_path / "a.pth", shards(9))
    assert cli("convert", path, tmp_path / "one", "--to", *to).exit_code == 0
    code, shown, said = torchrun(size, "convert", path, tmp_path / "all", "--to", *to)
    assert code == 0, said
    assert shown.count("converted ") == 1
    assert content(tmp_path / "all") == content(tmp_path / "one")


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """Tensors of which each makes a multipart upload."""
    items = {f"module.l{number}.weight": Tensor(str(number), (1500, 1000), 1_500_000) for number in range(4)}
    pickle = assemble(("PROTO", 2), *state_dict_ops(items), "STOP")
    return written(tmp_path / "large.pth", torch_zip(pickle, [bytes([number]) * 6_000_000 for number in range(4)]))


@pytest.mark.campaign
@pytest.mark.xdist_group("stores")
@pytest.mark.parametrize("size", [1, 2, 4] if LONG else [2])
def test_torchrun_in_a_bucket(
    bucket: Bucket, cli: Cli, torchrun: Torchrun, large: Path, tmp_path: Path, size: int
) -> None:
    assert cli("convert", large, tmp_path / "one", "--to", "hf", "--shard-size", "6MB").exit_code == 0
    assert cli("strip-module", tmp_path / "one", tmp_path / "stripped").exit_code == 0
    code, _, said = torchrun(size, "convert", large, bucket.url("one"), "--to", "hf", "--shard-size", "6MB")
    assert code == 0, said
    code, _, said = torchrun(size, "strip-module", bucket.url("one"), bucket.url("stripped"))
    assert code == 0, said
    for name in ("one", "stripped"):
        found = {key.partition("/")[2]: bucket.get(key) for key in bucket.below(f"{name}/")}
        assert found == content(tmp_path / name)
    assert not bucket.uploads()


KILLED = """
import os, sys, time
sys.path[:0] = {path!r}
first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
if first and {late} and os.environ.get("RANK") == "{other}":
    from ckptfix.io.ranks import Team

    Team.all_said = lambda team, key: time.sleep(60)
if os.environ.get("RANK") == "{other}":
    from datetime import timedelta
    from ckptfix.io.remote import rank_folder

    rank_folder.CLOCKS = timedelta(days=36_500)  # moto says that every upload began in 2010
if first and os.environ.get("RANK") == "{rank}":
    from ckptfix.io.remote.s3 import NewS3Object
    import ckptfix.io.folders as folders

    def killed(*args, **more):
        os.kill(os.getpid(), 9)

    NewS3Object.put = killed
    folders.write_plan = killed
"""


@pytest.mark.campaign
@pytest.mark.xdist_group("stores")
@pytest.mark.parametrize(("to_bucket", "rank", "restarts", "late"), KILLS)
def test_a_rank_is_killed_under_torchrun(
    bucket: Bucket, cli: Cli, torchrun: Torchrun, large: Path, tmp_path: Path,
    to_bucket: bool, rank: int, restarts: int, late: bool,
) -> None:  # fmt: skip
    """One error, nothing left behind; where torchrun starts all ranks again, the output is whole.

    `late`: the other rank has not begun to write when torchrun stops it.
    """
    site = tmp_path / "site"
    site.mkdir()
    written(site / "sitecustomize.py", KILLED.format(path=sys.path, rank=rank, other=1 - rank, late=late).encode())
    out = bucket.url("out") if to_bucket else tmp_path / "out"
    words = ["convert", large, out, "--to", "hf", "--shard-size", "6MB"]
    code, shown, said = torchrun(2, *words, site=site, restarts=restarts)
    # torchrun may stop the other rank before that one notices; then only torchrun reports it.
    assert said.count(f"rank {rank} of 2 is gone\n") <= 1, said
    assert (code, shown.count("converted ")) == ((0, 1) if restarts else (1, 0)), said
    names = [*bucket.below("out/"), *tmp_path.glob("out/*")]
    assert len(names) == (5 if restarts else 0)
    assert not bucket.uploads()
    assert not [path.name for path in tmp_path.iterdir() if path.name.endswith(".ckptfix-tmp")]
