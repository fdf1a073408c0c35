"""Videos of trained agents: real frames of real games, readable by the library that reads them everywhere."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from gpu_replay import Field
from gpu_replay.cli import main
from gpu_replay.training.environments import EnvironmentSpec
from gpu_replay.training.networks import QNetwork
from gpu_replay.training.play import Video, load
from gpu_replay.training.registry import identify
from gpu_replay.training.rendering import RenderedAtari
from gpu_replay.training.settings import Settings

Image, ImageSequence = pytest.importorskip("PIL.Image"), pytest.importorskip("PIL.ImageSequence")
pytest.importorskip("tqdm")
save_file = pytest.importorskip("safetensors.torch").save_file
Capture = pytest.CaptureFixture[str]


def frames(path: Path) -> tuple[list[np.ndarray], list[int]]:
    """The pictures of a GIF as RGB, and how long each is shown, in milliseconds."""
    with Image.open(path) as video:
        found = [(np.asarray(each.convert("RGB")), each.info["duration"]) for each in ImageSequence.Iterator(video)]
    return [picture for picture, _ in found], [delay for _, delay in found]


def test_a_gif_shows_the_pictures_as_they_were_at_their_speed(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    palette = random.integers(0, 256, (90, 3), dtype=np.uint8)
    pictures, video = palette[random.integers(0, 90, (31, 20, 30))], Video(15.0, 3)
    for picture in pictures:
        video.add(picture)
    # pictures that do not change are one picture, shown longer
    video.hold()
    video.write(tmp_path / "video.gif")
    found, delays = frames(tmp_path / "video.gif")
    assert np.array_equal(np.stack(found), pictures.repeat(3, 1).repeat(3, 2))
    # 31 pictures at 15 a second, in hundredths of a second
    assert sum(delays[:-1]) == round(3000 / 15) * 10
    assert set(delays[:-1]) == {60, 70}
    assert delays[-1] > 500


@pytest.mark.parametrize("name", ["fine", "mlp"])
def test_a_network_saved_before_its_features_were_channels_last_plays_the_same(name: str, tmp_path: Path) -> None:
    settings, observation = Settings(network=name), Field((4, 42, 42), torch.uint8, torch.float32, 1 / 255)
    spec = EnvironmentSpec("pong", observation, 6, None, None)
    saved = QNetwork(spec.stacked, 6, settings)
    weights = {key: value.clone() for key, value in saved.state_dict().items()}
    obs = torch.randint(0, 256, (5, 4, 42, 42), dtype=torch.uint8)
    expected = saved(obs)
    if name == "fine":
        # the features of one channel after those of another
        first = saved.state_dict()["hidden.0.weight"]
        weights["hidden.0.weight"] = first.unflatten(1, (-1, 32)).transpose(1, 2).flatten(1)
    save_file({key: value.contiguous() for key, value in weights.items()}, tmp_path / "old", {"step": "1"})
    torch.testing.assert_close(load(tmp_path / "old", spec, settings)(obs), expected)


def test_colours_of_pong_are_what_the_agent_sees_in_grey() -> None:
    pytest.importorskip("ale_py")
    rendered = identify("pong").rendered(Settings.for_family("atari", sticky=0.25))
    assert isinstance(rendered, RenderedAtari)
    rendered.reset(5)
    frame = None
    for t in range(240):
        if frame is not None and t % 40 == 0:
            assert rendered.picture.shape == (210, 160, 3)
            grey = rendered.picture @ np.array([0.299, 0.587, 0.114])
            # means over the five by four pixels, or nearly, that each pixel of the agent's frame covers
            coarse = grey.reshape(42, 5, 160).mean(1).repeat(42, 1).reshape(42, 42, 160).mean(2)
            assert np.abs(coarse - frame).mean() < 4
        rendered.send(torch.tensor([t % 3]))
        frame = rendered.recv().frame[0].numpy()
    rendered.close()


def test_gymnasium_environments_are_drawn_by_themselves() -> None:
    pytest.importorskip("pygame")
    rendered = identify("CartPole-v1").rendered(Settings.for_family("vector"))
    rendered.reset(3)
    before = rendered.picture
    rendered.send(torch.ones(1, dtype=torch.int64))
    rendered.recv()
    assert (rendered.fps, before.shape, np.array_equal(before, rendered.picture)) == (50, (400, 600, 3), False)
    rendered.close()


def test_a_video_of_a_run_depends_on_the_seed_alone(catch_run: Path, tmp_path: Path, capsys: Capture) -> None:
    contents, target = [], tmp_path / "video.gif"
    for seed in ("1", "1", "2"):
        assert main(["play", str(catch_run), "--episodes", "2", "--seed", seed, "--output", str(target)]) == 0
        first, *episodes, last = capsys.readouterr().out.splitlines()
        assert first.startswith("catch, network of step ")
        assert [(each[:10], each[-9:]) for each in episodes] == [(f"episode {n}:", "length 11") for n in (1, 2)]
        assert str(target) in last
        contents.append(target.read_bytes())
    pictures, _ = frames(target)
    assert len(pictures) == 24
    # the ball is seen all the way down, and the paddle on the floor
    for t, picture in enumerate(pictures[:12]):
        cells = picture[10::20, 10::20, 0] > 100
        assert (picture.shape, cells.shape) == ((240, 240, 3), (12, 12))
        assert (cells[11].sum() >= 3, cells[t].sum() >= 1, cells.sum() in (3, 4)) == (True, True, True)
    assert contents[0] == contents[1] != contents[2]
    # cut off and enlarged, of the network alone, beside which the video is put
    shutil.copy(catch_run / "network.safetensors", tmp_path)
    flags = ["--max-steps", "5", "--scale", "3", "--epsilon", "1"]
    assert main(["play", str(tmp_path / "network.safetensors"), *flags]) == 0
    assert "length 5, cut off" in capsys.readouterr().out
    longer, _ = frames(tmp_path / "episode.gif")
    assert (len(longer), longer[0].shape) == (6, (720, 720, 3))


# pipes that imageio-ffmpeg leaves to the collector
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_mp4_shows_the_pictures(catch_run: Path, tmp_path: Path) -> None:
    imageio = pytest.importorskip("imageio")
    pytest.importorskip("imageio_ffmpeg")
    assert main(["play", str(catch_run), "--output", str(tmp_path / "video.mp4")]) == 0
    film = imageio.mimread(tmp_path / "video.mp4", memtest=False)
    # twelve pictures, and the last one for a moment more
    assert 12 <= len(film) <= 20
    assert main(["play", str(catch_run), "--output", str(tmp_path / "video.gif")]) == 0
    first = frames(tmp_path / "video.gif")[0][0].astype(int)
    assert film[0].shape == first.shape
    assert np.abs(film[0].astype(int) - first).mean() < 12
