"""Frames of videos: order, pixels, rotation, depth, what is wrong with a video, and how upstream prepares frames."""

from __future__ import annotations

import gc
import itertools
import re
import subprocess
import sys
import tracemalloc
import wave
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import av
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from psutil import Process

from conformance.support.sentences import sentence
from harness.runtime.errors import ModelError
from harness.runtime.sam3.video.frames import Frames, frame_files, open_frames, upright

BUNNY = Path(__file__).resolve().parents[2] / "fixtures" / "videos" / "bigbuckbunny.mp4"


def picture(index: int, size: tuple[int, int] = (32, 16)) -> np.ndarray:
    """A frame of one colour on the left half and another on the right one, which tell its place in the video."""
    width, height = size
    pixels = np.empty((height, width, 3), np.uint8)
    pixels[:, : width // 2] = (20 * index % 200 + 30, 60, 100)
    pixels[:, width // 2 :] = (90, 200 - 20 * index % 150, 40)
    return pixels


def write_video(path: Path, frames: Any, codec: str = "ffv1", pixel_format: str = "yuv444p", **settings: Any) -> Path:
    """A video of frames uint8 [h, w, 3]; lossless by default."""
    frames = list(frames)
    rotation, options = settings.pop("rotation", None), settings.pop("options", {})
    with av.open(str(path), "w", **settings) as container:
        stream = container.add_stream(codec, 10, options=options)
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = pixel_format
        if rotation is not None:
            stream.set_display_rotation(*rotation)
        for pixels in frames:
            for packet in stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")):
                container.mux(packet)
        container.mux(stream.encode(None))
    return path


def read_until_fault(frames: Frames) -> tuple[list[np.ndarray], str]:
    """The frames before the fault, and its sentence."""
    read: list[np.ndarray] = []
    with pytest.raises(ModelError) as raised:
        for pixels in frames:
            read.append(pixels)
    return read, str(raised.value)


def differs_little(got: np.ndarray, expected: np.ndarray, most: int = 3) -> bool:
    """Colours that went through YUV."""
    return got.shape == expected.shape and int(np.abs(got.astype(int) - expected).max()) <= most


def test_clips_are_described() -> None:
    text = (BUNNY.parents[1] / "README.md").read_text(encoding="utf-8")
    for path in BUNNY.parent.iterdir():
        line = next(line for line in text.splitlines() if f"`videos/{path.name}`" in line)
        assert "CC BY 3.0" in line
        assert "Blender Foundation" in line


# Folders, lists, streams


@pytest.mark.parametrize(
    "names",
    [
        ["10.png", "9.PNG", "2.jpg", "001.bmp"],
        ["b.png", "a10.jpg", "a9.webp", "3.tiff"],
        ["00000.jpeg", "00001.jpeg", "00002.jpeg", "-1.png"],
    ],
)
def test_the_order_of_a_folder_is_upstreams(tmp_path: Path, names: list[str]) -> None:
    from harness.models.sam3.upstream import upstream

    for index, name in enumerate(names):
        Image.new("RGB", (8, 8), (40 * index,) * 3).save(tmp_path / name)
    (tmp_path / "notes.txt").write_text("no frame")
    with upstream():
        from sam3.model import io_utils

        zeros, ones = (0.0,) * 3, (1.0,) * 3
        loaded, height, width = io_utils.load_video_frames_from_image_folder(str(tmp_path), 8, True, zeros, ones, False)
    frames = open_frames(tmp_path)
    expected = [round(float(value)) // 40 for value in loaded[:, 0, 0, 0].float() * 255]
    assert [int(pixels[0, 0, 0]) // 40 for pixels in frames] == expected
    assert [names[index] for index in expected] == list(frames.names or ())
    assert (frames.length, height, width) == (len(names), 8, 8)


def test_hidden_files_are_no_frames(tmp_path: Path) -> None:
    for name in ("2.png", "10.png"):
        Image.fromarray(picture(0)).save(tmp_path / name)
    (tmp_path / "._2.png").write_bytes(b"a resource fork")
    assert [path.name for path in frame_files(tmp_path)] == ["2.png", "10.png"]


def test_lists_and_arrays(tmp_path: Path) -> None:
    file = tmp_path / "image.png"
    Image.fromarray(picture(2)).save(file)
    expected = [picture(index) for index in range(4)]
    frames = open_frames([expected[0], Image.fromarray(expected[1]), file, expected[3]])
    assert frames.length == 4
    for _ in range(2):
        np.testing.assert_array_equal(list(frames), expected)
    stacked = open_frames(np.stack(expected))
    assert stacked.length == 4
    np.testing.assert_array_equal(list(stacked), expected)
    assert open_frames(stacked) is stacked


def test_a_stream_has_no_end() -> None:
    buffer = picture(0)

    def camera() -> Any:
        for index in itertools.count():
            buffer[:] = picture(index)  # the same memory again, as cameras do
            yield buffer

    frames = open_frames(camera())
    assert (frames.length, frames.rate) == (None, None)
    tracemalloc.start()
    taken = list(itertools.islice(frames, 5))
    for _ in itertools.islice(frames, 500):
        pass
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    np.testing.assert_array_equal(taken, [picture(index) for index in range(5)])
    assert peak < 100 * buffer.nbytes, "500 frames were not kept"


# Files


def test_a_file_is_decoded_while_it_is_read() -> None:
    frames = open_frames(BUNNY)
    assert (frames.length, frames.rate) == (40, Fraction(25))
    tracemalloc.start()
    count = sum(1 for pixels in frames if pixels.shape == (240, 424, 3) and pixels.dtype == np.uint8)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == 40
    assert peak < 6 * 240 * 424 * 3, "not more than some frames were in memory"


def test_decoded_frames_do_not_wait_for_the_garbage_collector(tmp_path: Path) -> None:
    file = write_video(tmp_path / "clip.mp4", [picture(0, (640, 480))] * 120, "mpeg4", "yuv420p")
    gc.disable()
    try:
        sizes = [Process().memory_info().rss for _ in open_frames(file)]
    finally:
        gc.enable()
    assert max(sizes) - sizes[20] < 15e6, "100 frames of FFmpeg have 46 MB"


@pytest.mark.parametrize("name", ["clip.mkv", "clip.avi", "clip.nut"])
def test_pixels_of_a_file(tmp_path: Path, name: str) -> None:
    """Of an odd size too, whose rows FFmpeg keeps with gaps between them."""
    expected = [picture(index, (30, 17)) for index in range(5)]
    got = list(open_frames(write_video(tmp_path / name, expected)))
    assert all(pixels.flags.c_contiguous and pixels.flags.owndata for pixels in got)
    assert len(got) == 5
    assert all(differs_little(*both) for both in zip(got, expected, strict=True))


def test_ten_bits_become_eight(tmp_path: Path) -> None:
    expected = [picture(index) for index in range(3)]
    got = list(open_frames(write_video(tmp_path / "deep.mkv", expected, pixel_format="yuv444p10le")))
    assert [pixels.dtype for pixels in got] == [np.uint8] * 3
    assert all(differs_little(*both) for both in zip(got, expected, strict=True))


@pytest.mark.parametrize(
    ("rotation", "turned"),
    [
        ((0,), lambda pixels: pixels),
        ((90,), lambda pixels: np.rot90(pixels, 1)),
        ((180,), lambda pixels: np.rot90(pixels, 2)),
        ((-90,), lambda pixels: np.rot90(pixels, -1)),
        ((0, True, False), lambda pixels: pixels[:, ::-1]),
        ((0, False, True), lambda pixels: pixels[::-1]),
    ],
)
def test_the_rotation_of_a_file_is_applied(tmp_path: Path, rotation: Any, turned: Any) -> None:
    """`av_display_rotation_set` and `av_display_matrix_flip` of FFmpeg wrote the matrix; it turns counterclockwise."""
    pixels = picture(1, (32, 16))
    pixels[:4, :8] = 255
    file = write_video(tmp_path / "turned.mov", [pixels] * 2, "mpeg4", "yuv420p", rotation=rotation)
    plain = write_video(tmp_path / "plain.mov", [pixels] * 2, "mpeg4", "yuv420p")
    for got, upright_pixels in zip(open_frames(file), open_frames(plain), strict=True):
        np.testing.assert_array_equal(got, turned(upright_pixels))


@given(quarters=st.integers(0, 3), mirrored=st.booleans(), width=st.integers(1, 4), height=st.integers(1, 4))
def test_a_pixel_is_shown_where_the_display_matrix_puts_it(
    quarters: int, mirrored: bool, width: int, height: int
) -> None:
    turn = np.linalg.matrix_power(np.array([[0, 1], [-1, 0]]), quarters)
    linear = np.diag([-1, 1]) @ turn if mirrored else turn
    matrix = np.zeros((3, 3), np.int32)
    matrix[:2, :2], matrix[2, 2] = linear * 65536, 1 << 30
    pixels = np.arange(height * width * 3, dtype=np.uint8).reshape(height, width, 3)
    places = np.array([[x, y] for y in range(height) for x in range(width)]) @ linear
    columns, rows = (places - places.min(axis=0)).T
    expected = np.empty((rows.max() + 1, columns.max() + 1, 3), np.uint8)
    expected[rows, columns] = pixels.reshape(-1, 3)
    np.testing.assert_array_equal(upright(pixels, matrix), expected)


@pytest.mark.parametrize(("suffix", "settings"), [("gif", {}), ("png", {}), ("webp", {"lossless": True})])
def test_animated_images_are_videos(tmp_path: Path, suffix: str, settings: Any) -> None:
    expected = [picture(index) for index in range(4)]
    images = [Image.fromarray(pixels) for pixels in expected]
    file = tmp_path / f"moving.{suffix}"
    images[0].save(file, save_all=True, append_images=images[1:], duration=200, **settings)
    frames = open_frames(file)
    assert frames.length == 4
    np.testing.assert_array_equal(list(frames), expected)
    file.write_bytes(file.read_bytes()[:-60])
    read, told = read_until_fault(open_frames(file))
    np.testing.assert_array_equal(read, expected[: len(read)])
    assert str(file) in told


@pytest.mark.parametrize("name", ["still.png", "still.gif"])
def test_an_image_is_a_video_of_one_frame(tmp_path: Path, name: str) -> None:
    Image.fromarray(picture(0)).save(tmp_path / name)
    frames = open_frames(tmp_path / name)
    assert frames.length == 1
    np.testing.assert_array_equal(list(frames), [picture(0)])


# Faults


def test_what_is_no_video(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.mp4").write_text("not a video " * 100)
    (tmp_path / "nothing.mp4").touch()
    (tmp_path / "another.mp4").symlink_to(BUNNY)
    (tmp_path / "list.mp4").write_text("ffconcat version 1.0\nfile another.mp4\n")
    with wave.open(str(tmp_path / "sound.wav"), "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(8000)
        sound.writeframes(bytes(16000))
    for source, expected in (
        (tmp_path / "absent.mp4", sentence("no-such-file", name=tmp_path / "absent.mp4")),
        (tmp_path / "empty", sentence("no-images", folder=tmp_path / "empty")),
        (tmp_path / "text.mp4", sentence("not-a-video", path=tmp_path / "text.mp4")),
        (tmp_path / "nothing.mp4", sentence("not-a-video", path=tmp_path / "nothing.mp4")),
        (tmp_path / "list.mp4", sentence("not-a-video", path=tmp_path / "list.mp4")),
        (tmp_path / "sound.wav", sentence("no-video", path=tmp_path / "sound.wav")),
        (np.zeros((4, 4, 3), np.uint8), sentence("wrong-array", shape="[4, 4, 3]")),
        (7, sentence("not-a-video", name="int")),
    ):
        with pytest.raises(ModelError, match=f"^{expected}") as raised:
            open_frames(source)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("source", "name"), [([], "the list of frames"), (iter(()), "the stream")])
def test_no_frames(source: Any, name: str) -> None:
    read, told = read_until_fault(open_frames(source))
    assert not read and re.fullmatch(sentence("no-frames", name=name), told)


def test_a_frame_that_is_no_image() -> None:
    read, told = read_until_fault(open_frames([picture(0), np.zeros((16, 32), np.uint8)]))
    assert len(read) == 1
    assert re.match(sentence("bad-frame", index=1, name="the list of frames", error="uint8 [16, 32]"), told)


def test_a_broken_image_in_a_folder(tmp_path: Path) -> None:
    for index in range(4):
        Image.fromarray(picture(index)).save(tmp_path / f"{index}.png")
    (tmp_path / "2.png").write_bytes((tmp_path / "2.png").read_bytes()[:50])
    read, told = read_until_fault(open_frames(tmp_path))
    np.testing.assert_array_equal(read, [picture(0), picture(1)])
    assert re.match(sentence("bad-frame", index=2, name=tmp_path, error=tmp_path / "2.png"), told)


def test_the_size_changes_in_a_folder(tmp_path: Path) -> None:
    for index, size in enumerate([(32, 16), (32, 16), (16, 32)]):
        Image.fromarray(picture(index, size)).save(tmp_path / f"{index}.png")
    read, told = read_until_fault(open_frames(tmp_path))
    assert len(read) == 2
    assert re.match(sentence("frame-size", index=2, name=tmp_path, shape="16 x 32", size="32 x 16"), told)


def test_the_size_changes_in_a_file(tmp_path: Path) -> None:
    parts = []
    for size in [(64, 32), (48, 32)]:
        pictures = [picture(index, size) for index in range(4)]
        part = write_video(tmp_path / f"{size[0]}.mjpeg", pictures, "mjpeg", "yuvj420p")
        parts.append(part.read_bytes())
    file = tmp_path / "both.mjpeg"
    file.write_bytes(b"".join(parts))
    read, told = read_until_fault(open_frames(file))
    assert len(read) == 4
    assert re.match(sentence("frame-size", index=4, name=file, shape="48 x 32", size="64 x 32"), told)


def broken(whole: Path, packet: bytes, kept: int) -> Path:
    """The file with zeros for all but the first bytes of a packet."""
    content = bytearray(whole.read_bytes())
    begin = content.index(packet)
    content[begin + kept : begin + len(packet)] = bytes(len(packet) - kept)
    path = whole.with_stem("broken")
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("codec", ["libx264", "mjpeg"])
def test_a_broken_frame_in_a_file(tmp_path: Path, codec: str) -> None:
    """Half of a frame's bytes are overwritten; those before it are read as ever."""
    whole = tmp_path / "whole.mkv"
    pixel_format = "yuvj420p" if codec == "mjpeg" else "yuv420p"
    options = {"tune": "zerolatency"} if codec == "libx264" else {}
    random = np.random.default_rng(0)
    noise = [random.integers(0, 256, (64, 64, 3), dtype=np.uint8) for _ in range(8)]
    write_video(whole, noise, codec, pixel_format, options=options)
    expected = list(open_frames(whole))
    with av.open(str(whole)) as container:
        packet = [bytes(packet) for packet in container.demux(video=0)][5]
    file = broken(whole, packet, 40)
    read, told = read_until_fault(open_frames(file))
    assert len(read) == 5
    np.testing.assert_array_equal(read, expected[:5])
    assert re.match(sentence("undecodable", index=5, path=file), told)


@pytest.mark.parametrize("broken_packet", [7, 12, 20])
def test_frames_before_a_broken_one_are_whole(tmp_path: Path, broken_packet: int) -> None:
    """In a file whose frames refer to later ones too, so that some that are shown earlier need the broken one."""
    whole = write_video(tmp_path / "whole.mp4", open_frames(BUNNY), "libx264", "yuv420p")
    expected = list(open_frames(whole))
    with av.open(str(whole)) as container:
        packets = [(packet.dts, packet.pts, bytes(packet)) for packet in container.demux(video=0)]
    assert any(dts != pts for dts, pts, _ in packets), "frames are not decoded in the order in which they are shown"
    file = broken(whole, packets[broken_packet][2], 30)
    read, told = read_until_fault(open_frames(file))
    assert broken_packet - 4 <= len(read) <= broken_packet
    np.testing.assert_array_equal(read, expected[: len(read)])
    assert re.match(sentence("undecodable", index=len(read), path=file), told)


def test_joined_files_are_whole(tmp_path: Path) -> None:
    parts = [write_video(tmp_path / f"{i}.ts", [picture(i)] * 5, "libx264", "yuv420p").read_bytes() for i in range(2)]
    (tmp_path / "both.ts").write_bytes(b"".join(parts))
    assert len(list(open_frames(tmp_path / "both.ts"))) == 10


def test_an_edit_list_hides_frames(tmp_path: Path) -> None:
    """Frames before time 0, which a cut without encoding leaves in the file, are neither given nor counted."""
    whole = write_video(tmp_path / "whole.mp4", [picture(index) for index in range(12)], "libx264", "yuv420p")
    with av.open(str(whole)) as source, av.open(str(tmp_path / "cut.mp4"), "w") as target:
        stream = target.add_stream_from_template(source.streams.video[0])
        hidden = 4 * source.streams.video[0].time_base.denominator // 10
        for packet in source.demux(video=0):
            if packet.size:
                packet.pts, packet.dts, packet.stream = packet.pts - hidden, packet.dts - hidden, stream
                target.mux(packet)
    frames, expected = open_frames(tmp_path / "cut.mp4"), list(open_frames(whole))
    assert frames.length == 8
    np.testing.assert_array_equal(list(frames), expected[4:])


def test_a_variable_rate(tmp_path: Path) -> None:
    with av.open(str(tmp_path / "clip.mp4"), "w") as container:
        stream = container.add_stream("libx264", 10)
        stream.width, stream.height, stream.pix_fmt = 32, 16, "yuv420p"
        stream.codec_context.time_base = Fraction(1, 100)
        for index, time in enumerate((0, 10, 20, 100, 103, 400)):
            frame = av.VideoFrame.from_ndarray(picture(index), format="rgb24")
            frame.pts, frame.time_base = time, Fraction(1, 100)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    frames = open_frames(tmp_path / "clip.mp4")
    assert len(list(frames)) == frames.length == 6


@pytest.mark.parametrize(("name", "codec"), [("clip.mp4", "libx264"), ("clip.avi", "mjpeg"), ("clip.mkv", "libx264")])
def test_a_file_that_ends_early(tmp_path: Path, name: str, codec: str) -> None:
    random = np.random.default_rng(0)
    noise = [random.integers(0, 256, (64, 64, 3), dtype=np.uint8) for _ in range(12)]
    pixel_format = "yuvj420p" if codec == "mjpeg" else "yuv420p"
    options = {"tune": "zerolatency"} if codec == "libx264" else {}
    whole = write_video(
        tmp_path / f"whole_{name}",
        noise,
        codec,
        pixel_format,
        options=options,
        container_options={"movflags": "faststart"} if name.endswith("mp4") else {},
    )
    expected = list(open_frames(whole))
    assert len(expected) == 12
    cut = tmp_path / name
    content = whole.read_bytes()
    cut.write_bytes(content[: len(content) * 6 // 10])
    read, told = read_until_fault(open_frames(cut))
    assert 4 <= len(read) <= 8
    np.testing.assert_array_equal(read, expected[: len(read)])
    assert str(cut) in told
    assert f"{len(read)}" in told


WITHOUT_PYAV = """
import sys
sys.modules["av"] = None  # what an import of something absent finds
from harness.runtime.errors import ModelError
from harness.runtime.sam3.video.frames import open_frames
assert len(list(open_frames(sys.argv[2]))) == 2
try:
    open_frames(sys.argv[1])
except ModelError as error:
    print(error)
print("torch" in sys.modules)
"""


def test_without_pyav_a_sentence_says_how_to_install_it(tmp_path: Path) -> None:
    for index in range(2):
        Image.fromarray(picture(index)).save(tmp_path / f"{index}.png")
    command = [sys.executable, "-c", WITHOUT_PYAV, str(BUNNY), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    told, has_torch = done.stdout.splitlines()
    assert re.fullmatch(sentence("not-installed", path=BUNNY), told)
    assert has_torch == "False"


# How upstream prepares frames


def test_opencvs_loader_forgets_to_divide_by_255(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream's function, with a module in OpenCV's place that hands frames over; see `docs/design/video-rules.md`."""
    from harness.models.sam3.upstream import upstream

    frames = [np.array(Image.fromarray(pixels).resize((64, 64))) for pixels in itertools.islice(open_frames(BUNNY), 2)]
    frames[0][0, 0], frames[0][0, 1] = 0, 255
    waiting = [pixels[:, :, ::-1] for pixels in frames]
    capture = SimpleNamespace(
        isOpened=lambda: True,
        get=lambda prop: 64 if prop < 2 else len(frames),
        read=lambda: (True, waiting.pop(0)) if waiting else (False, None),
        release=lambda: None,
    )
    opencv = SimpleNamespace(
        VideoCapture=lambda path: capture,
        CAP_PROP_FRAME_HEIGHT=0,
        CAP_PROP_FRAME_WIDTH=1,
        CAP_PROP_FRAME_COUNT=2,
        COLOR_BGR2RGB=4,
        INTER_CUBIC=2,
        cvtColor=lambda pixels, code: pixels[:, :, ::-1],
        resize=lambda pixels, size, interpolation: pixels,
    )
    monkeypatch.setitem(sys.modules, "cv2", opencv)
    for index, pixels in enumerate(frames):
        Image.fromarray(pixels).save(tmp_path / f"{index}.png")
    half = (0.5, 0.5, 0.5)
    with upstream():
        from sam3.model import io_utils

        by_opencv, _, _ = io_utils.load_video_frames_from_video_file_using_cv2("clip.mp4", 64, half, half, True)
        from_folder, _, _ = io_utils.load_video_frames_from_image_folder(str(tmp_path), 64, True, half, half, False)
    assert (float(from_folder.min()), float(from_folder.max())) == (-1, 1)
    assert (float(by_opencv.min()), float(by_opencv.max())) == (-1, 509)
    expected = np.stack(frames).astype(np.float32).transpose(0, 3, 1, 2)
    np.testing.assert_array_equal(by_opencv.numpy(), (expected - 0.5) / 0.5)
    np.testing.assert_allclose(from_folder.float().numpy(), expected / 127.5 - 1, atol=2**-10)


def test_the_folder_of_images_is_the_reference(tmp_path: Path) -> None:
    """Upstream's folder of images makes of a frame what `Sam3Processor` does, but for fp16 and some steps of 1/255."""
    from harness.models.sam3.images import preprocess
    from harness.models.sam3.upstream import upstream

    (pixels,) = itertools.islice(open_frames(BUNNY), 1)
    Image.fromarray(pixels).save(tmp_path / "0.png")
    half = (0.5, 0.5, 0.5)
    with upstream():
        from sam3.model import io_utils

        loaded, _, _ = io_utils.load_video_frames_from_image_folder(str(tmp_path), 1008, True, half, half, False)
    reference = preprocess(Image.fromarray(pixels))
    difference = np.abs(loaded.float().numpy() - reference.numpy())
    assert difference.max() < 2 / 255 + 2**-10
    assert (difference > 2**-10).mean() < 0.005
