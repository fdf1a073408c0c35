"""Videos of trained agents: real frames of real games, readable by the library that reads them everywhere."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

from gpu_replay.cli import main
from gpu_replay.training.environments import Actors
from gpu_replay.training.play import Video
from gpu_replay.training.registry import CPU, identify
from gpu_replay.training.rendering import RenderedAtari, RenderedEnvironment
from gpu_replay.training.settings import Settings

Image = pytest.importorskip("PIL.Image")
pytest.importorskip("tqdm")
pytest.importorskip("safetensors")
Capture, Patch = pytest.CaptureFixture[str], pytest.MonkeyPatch


def frames(path: Path) -> tuple[list[np.ndarray], list[int]]:
    """The pictures of a GIF as RGB, and how long each is shown, in milliseconds."""
    pictures, delays = [], []
    with Image.open(path) as video:
        for place in range(video.n_frames):
            video.seek(place)
            pictures.append(np.asarray(video.convert("RGB")))
            delays.append(video.info["duration"])
    return pictures, delays


def noise(count: int, colours: int, shape: tuple[int, int] = (20, 30)) -> list[np.ndarray]:
    random = np.random.default_rng(count)
    palette = random.integers(0, 256, (colours, 3), dtype=np.uint8)
    return [palette[random.integers(0, colours, shape)] for _ in range(count)]


def video_of(pictures: list[np.ndarray], fps: float, scale: int = 1) -> Video:
    video = Video(fps, scale)
    for picture in pictures:
        video.add(picture)
    return video


def test_a_gif_shows_the_pictures_as_they_were_at_their_speed(tmp_path: Path) -> None:
    pictures = noise(31, 90)
    video_of(pictures, 15.0, 3).write(tmp_path / "video.gif")
    shown, delays = frames(tmp_path / "video.gif")
    assert len(shown) == 31
    for found, picture in zip(shown, pictures, strict=True):
        assert np.array_equal(found, picture.repeat(3, 0).repeat(3, 1))
    # 31 pictures at 15 a second, in hundredths of a second
    assert (sum(delays), set(delays)) == (round(3100 / 15) * 10, {60, 70})


def test_of_many_colours_the_best_are_kept(tmp_path: Path) -> None:
    pictures = noise(5, 5_000)
    video_of(pictures, 50.0).write(tmp_path / "video.gif")
    shown, _ = frames(tmp_path / "video.gif")
    error = np.abs(np.stack(shown).astype(int) - np.stack(pictures))
    assert 0 < error.mean() < 20


def test_the_end_is_held(tmp_path: Path) -> None:
    video = video_of(noise(3, 9), 10.0)
    video.hold()
    assert len(video.images) == 10
    video.write(tmp_path / "video.gif")
    # pictures that do not change are one picture, shown longer
    shown, delays = frames(tmp_path / "video.gif")
    assert (len(shown), delays) == (3, [100, 100, 800])


def watch(rendered: RenderedEnvironment, steps: int, actions: int) -> list[tuple[np.ndarray, bool]]:
    """Pictures of random play, and whether an episode ended with each."""
    actors, generator = Actors(rendered, CPU), torch.Generator().manual_seed(0)
    actors.reset(3)
    seen = [(rendered.picture.copy(), False)]
    for _ in range(steps):
        rendered.send(torch.randint(0, actions, (1,), generator=generator))
        step = actors.recv()
        seen.append((rendered.picture.copy(), bool(step.terminated | step.truncated)))
    return seen


def test_the_board_of_catch_shows_the_ball_all_the_way_down() -> None:
    seen = watch(identify("catch").rendered(Settings()), 11, 3)
    for t, (picture, ended) in enumerate(seen):
        assert picture.shape == (240, 240, 3)
        cells = picture[10::20, 10::20, 0] > 100
        assert cells[11].sum() >= 3
        assert cells[t].sum() >= 1
        assert cells.sum() in (3, 4)
        assert ended == (t == 11)


def test_colours_of_pong_are_what_the_agent_sees_in_grey() -> None:
    pytest.importorskip("ale_py")
    settings = Settings.for_family("atari", sticky=0.25)
    rendered = identify("pong").rendered(settings)
    assert isinstance(rendered, RenderedAtari)
    actors, generator = Actors(rendered, CPU), torch.Generator().manual_seed(0)
    actors.reset(5)
    balls = 0
    for t in range(1_200):
        if t % 50 == 0:
            assert rendered.picture.shape == (210, 160, 3)
            grey = rendered.picture @ np.array([0.299, 0.587, 0.114])
            # means over the five by four pixels, or nearly, that each pixel of the agent's frame covers
            coarse = grey.reshape(42, 5, 160).mean(1).repeat(42, 1).reshape(42, 42, 160).mean(2)
            assert np.abs(coarse - actors.stack.frame[0].numpy()).mean() < 4
        balls += int((rendered.picture[34:194] == 236).all(2).any())
        rendered.send(torch.randint(0, 3, (1,), generator=generator))
        step = actors.recv()
        actors.push(step)
        if step.terminated:
            break
    assert balls > 200
    assert bool(step.terminated)
    rendered.close()


def test_emulators_that_part_are_noticed(monkeypatch: Patch) -> None:
    pytest.importorskip("ale_py")
    rendered = RenderedAtari("pong", Settings.for_family("atari"))
    rendered.reset(1)
    rendered.send(torch.tensor([0]))
    shown = rendered._screen.recv()
    monkeypatch.setattr(rendered._screen, "recv", lambda: type(shown)(**{**vars(shown), "reward": shown.reward + 1}))
    with pytest.raises(RuntimeError, match="differ in reward"):
        rendered.recv()
    rendered.close()


def test_gymnasium_environments_are_drawn_by_themselves() -> None:
    pytest.importorskip("pygame")
    rendered = identify("CartPole-v1").rendered(Settings.for_family("vector"))
    assert rendered.fps == 50
    seen = watch(rendered, 60, 2)
    endings = [place for place, (_, ended) in enumerate(seen) if ended]
    assert endings
    for place in endings:
        # the last picture of an episode shows the cart where it was, the next the new one
        before, last, after = (seen[place + i][0].astype(int) for i in (-1, 0, 1))
        assert np.abs(last - before).mean() < np.abs(after - last).mean()
    assert all(picture.shape == (400, 600, 3) for picture, _ in seen)
    rendered.close()


@pytest.fixture(scope="module")
def catch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that knows little."""
    pytest.importorskip("matplotlib")
    folder = tmp_path_factory.mktemp("play") / "run"
    flags = ["--device", "cpu", "--steps", "960", "--warmup", "200", "--eval-episodes", "8", "--eval-every", "480"]
    assert main(["train", "catch", *flags, "--output", str(folder)]) == 0
    return folder


def test_an_episode_of_a_run_becomes_a_video(catch: Path, capsys: Capture) -> None:
    assert main(["play", str(catch), "--episodes", "2", "--seed", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("catch, network of step ")
    assert [line.split(":")[0] for line in lines[1:3]] == ["episode 1", "episode 2"]
    assert all(line.endswith("length 11") for line in lines[1:3])
    path = catch / "episode.gif"
    assert str(path) in lines[3]
    shown, _ = frames(path)
    assert len(shown) == 24
    assert path.stat().st_size < 100_000


def test_the_video_depends_on_the_seed_alone(catch: Path, tmp_path: Path) -> None:
    contents = []
    for seed in ("1", "1", "2"):
        target = tmp_path / "video.gif"
        assert main(["play", str(catch / "network.safetensors"), "--seed", seed, "--output", str(target)]) == 0
        contents.append(target.read_bytes())
    assert contents[0] == contents[1] != contents[2]


def test_an_episode_can_be_cut_off_and_enlarged(catch: Path, tmp_path: Path, capsys: Capture) -> None:
    target = tmp_path / "video.gif"
    flags = ["--max-steps", "5", "--scale", "3", "--epsilon", "1", "--output", str(target)]
    assert main(["play", str(catch), *flags]) == 0
    assert "length 5, cut off" in capsys.readouterr().out
    shown, _ = frames(target)
    assert (len(shown), shown[0].shape) == (6, (720, 720, 3))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere is not there"),
        ([str(Path(__file__))], "cannot be read"),
        (["{run}", "--output", "video.avi"], "must end in .gif or .mp4"),
        (["{run}", "--output", "no/where/video.gif"], "there is no folder"),
    ],
)
def test_what_cannot_be_played_is_refused(catch: Path, capsys: Capture, arguments: list[str], message: str) -> None:
    filled = [str(catch) if part == "{run}" else part for part in arguments]
    assert main(["play", *filled]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_weights_of_something_else_are_refused(tmp_path: Path, capsys: Capture) -> None:
    from safetensors.torch import save_file

    save_file({"weight": torch.zeros(2)}, tmp_path / "network.safetensors")
    assert main(["play", str(tmp_path)]) == 2
    assert "was not written by `gpu-replay train`" in capsys.readouterr().err


def test_without_imageio_an_mp4_is_refused(catch: Path, monkeypatch: Patch, capsys: Capture) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name.startswith("imageio") else find(name))
    assert main(["play", str(catch), "--output", "video.mp4"]) == 2
    assert 'imageio_ffmpeg are needed for an .mp4 but not installed. Run: pip install "imageio[ffmpeg]"' in (
        capsys.readouterr().err
    )


# pipes that imageio-ffmpeg leaves to the collector
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_mp4_shows_the_pictures(catch: Path, tmp_path: Path) -> None:
    imageio = pytest.importorskip("imageio")
    pytest.importorskip("imageio_ffmpeg")
    assert main(["play", str(catch), "--output", str(tmp_path / "video.mp4")]) == 0
    shown = imageio.mimread(tmp_path / "video.mp4", memtest=False)
    # twelve pictures, and the last one for a moment more
    assert 12 <= len(shown) <= 20
    assert main(["play", str(catch), "--output", str(tmp_path / "video.gif")]) == 0
    first = frames(tmp_path / "video.gif")[0][0].astype(int)
    assert shown[0].shape == first.shape
    assert np.abs(shown[0].astype(int) - first).mean() < 12
