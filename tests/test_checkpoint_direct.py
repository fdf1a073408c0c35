"""Files written and read around the page cache: the same bytes as through it, wherever the system says no."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpu_replay import CheckpointError, Field, ReplayBuffer
from gpu_replay.checkpoint import direct

PAGE = 4096
SIZES = [0, 1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 2 * PAGE + 17, 5 * PAGE, 5 * PAGE + 8]

pytestmark = pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="this system has one way to files")


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file goes around the page cache, two pages at a time."""
    monkeypatch.setattr(direct, "LEAST_BYTES", 0)
    monkeypatch.setattr(direct, "BUFFER_BYTES", 2 * PAGE)
    monkeypatch.setattr(direct, "_own", threading.local())


@pytest.fixture(params=["direct", "not known", "refused later", "short"], name="system", autouse=True)
def system_fixture(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the system does: all of it, nothing, refuses the third call, or moves half of what it is given."""
    import fcntl

    control, write, readv, calls = fcntl.fcntl, os.write, os.readv, [0]

    def refuse(fd: int, command: int, *given: Any) -> Any:
        if command == fcntl.F_SETFL and given[0] & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no other way")
        return control(fd, command, *given)

    def third(fd: int) -> None:
        calls[0] += 1
        if calls[0] >= 3 and control(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "not aligned")

    if request.param == "not known":
        monkeypatch.setattr(fcntl, "fcntl", refuse)
    elif request.param == "refused later":
        monkeypatch.setattr(os, "write", lambda fd, data: (third(fd), write(fd, data))[1])
        monkeypatch.setattr(os, "readv", lambda fd, parts: (third(fd), readv(fd, parts))[1])
    elif request.param == "short":
        monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[: -(-len(data) // 2)]))
        monkeypatch.setattr(os, "readv", lambda fd, parts: readv(fd, [parts[0][: -(-len(parts[0]) // 2)]]))
    return str(request.param)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("piece", [7, PAGE, 3 * PAGE + 5])
def test_bytes_come_back(size: int, piece: int, tmp_path: Path) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8).tobytes()
    path = tmp_path / "file"
    with direct.Writer(path, size) as out:
        for begin in range(0, size, piece):
            out.write(data[begin : begin + piece])
        modified = out.finish()
    assert path.read_bytes() == data
    assert path.stat().st_mtime_ns == modified
    found = bytearray(size + 5)
    with direct.Reader(path, size) as file:
        for begin in range(0, size, piece):
            part = memoryview(found)[begin : min(begin + piece, size)]
            assert file.readinto(part) == len(part)
        # nothing comes after the end
        assert file.readinto(memoryview(found)[size:]) == 0
    assert bytes(found[:size]) == data


def test_large_files_go_around_the_page_cache(system: str, tmp_path: Path) -> None:
    with direct.Writer(tmp_path / "file", PAGE) as out:
        assert out.direct == (system != "not known")
        out.finish()


def test_what_is_there_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "outside")
    (tmp_path / "file").write_bytes(b"here")
    for name in ("link", "file"):
        with pytest.raises(FileExistsError):
            direct.Writer(tmp_path / name, PAGE)
    assert not (tmp_path / "outside").exists()
    assert (tmp_path / "file").read_bytes() == b"here"


def test_a_full_disk_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(fd: int, data: Any) -> int:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, "write", full)
    with direct.Writer(tmp_path / "file", PAGE) as out, pytest.raises(OSError, match="no space left"):
        out.write(bytes(3 * PAGE))


def test_a_checkpoint_of_large_files(tmp_path: Path) -> None:
    """Damage and missing ends are found as in small ones."""
    buffer = ReplayBuffer(50, {"a": Field((301,), torch.float64), "b": Field((), torch.bool)}, device="cpu")
    values = torch.randn(70, 301, dtype=torch.float64)
    buffer.add(a=values, b=torch.ones(70, dtype=torch.bool))
    buffer.save(tmp_path / "c")
    found = ReplayBuffer.load(tmp_path / "c", device="cpu")
    assert torch.equal(found[found.keys()].a, values[20:])
    file = max((tmp_path / "c").glob("*.safetensors"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[-9] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="its checksum differs"):
        ReplayBuffer.load(tmp_path / "c", device="cpu")
