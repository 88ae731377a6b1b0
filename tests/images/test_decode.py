"""Image files: what they become, and what is refused."""

import struct
import time
import tracemalloc
import zlib

import numpy as np
import pytest
from PIL import Image

from tests.images.files import encoded
from tests.images.pictures import picture, pixels
from vllm_kimi_k3.images.decode import ImageError, decode
from vllm_kimi_k3.images.rules import ImageRules

RULES = ImageRules()
MOST = 178_956_970


def read(data: bytes, most: int = MOST) -> Image.Image:
    return decode(data, RULES, most)


def png(width: int, height: int, rows: bytes = b"") -> bytes:
    """A greyscale PNG whose header says what it likes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA"])
@pytest.mark.parametrize("form", ["PNG", "WEBP", "TIFF"])
def test_lossless_files_give_back_their_pixels(mode: str, form: str) -> None:
    image = picture(37, 61, mode)
    options = {"lossless": True, "exact": True} if form == "WEBP" else {}
    found = read(encoded(image, form, **options))
    # WebP knows colour only.
    expected = image.convert("RGBA" if "A" in mode else "RGB") if form == "WEBP" else image
    assert found.mode == expected.mode and found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("form", ["JPEG", "BMP", "GIF", "PPM", "AVIF"])
def test_other_forms_are_read(form: str) -> None:
    found = read(encoded(Image.new("RGB", (40, 30), (200, 30, 30)), form))
    assert found.size == (40, 30) and found.mode == "RGB"
    assert np.abs(np.asarray(found).astype(int) - [200, 30, 30]).max() <= 6


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_photograph_stands_upright(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = picture(40, 24)
    found = read(encoded(image, exif=exif))
    turns = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_270,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_90,
    }
    expected = image.transpose(turns[orientation]) if orientation in turns else image
    assert found.size == expected.size and found.tobytes() == expected.tobytes()


def test_a_broken_orientation_is_none() -> None:
    image = picture(20, 20)
    assert read(encoded(image, exif=b"Exif\x00\x00MM\x00*\x00\x00\xff\xff")).tobytes() == image.tobytes()


def test_a_palette_becomes_colours_and_keeps_its_transparency() -> None:
    image = picture(30, 30).quantize(16)
    assert read(encoded(image)).tobytes() == image.convert("RGB").tobytes()
    clear = read(encoded(image, transparency=3))
    assert clear.mode == "RGBA"
    hidden = np.asarray(clear)[..., 3] == 0
    assert (hidden == (np.asarray(image) == 3)).all() and hidden.any()


def test_sixteen_bits_become_eight_and_not_white() -> None:
    values = np.arange(0, 65536, 64, dtype=np.uint16).reshape(32, 32)
    found = np.asarray(read(encoded(Image.fromarray(values))))
    assert (found == values // 256).all()
    assert set(np.asarray(read(encoded(Image.fromarray(values > 30000)))).flat) == {0, 255}


def test_print_colours_become_those_of_a_screen() -> None:
    found = read(encoded(Image.new("CMYK", (20, 20), (0, 255, 255, 0)), "TIFF"))
    assert found.mode == "RGB" and found.getpixel((3, 3)) == (255, 0, 0)


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG"])
def test_an_animation_shows_its_first_frame(form: str) -> None:
    frames = [Image.new("RGB", (30, 30), colour) for colour in ("red", "blue", "lime")]
    found = read(encoded(frames[0], form, save_all=True, append_images=frames[1:]))
    red, green, blue = found.convert("RGB").getpixel((5, 5))
    assert red > 240 and green < 15 and blue < 15


REFUSED = {
    "empty": (b"", "the file is empty"),
    "text": (b"<html>not found</html>", "no image of a format"),
    "svg": (b'<svg xmlns="http://www.w3.org/2000/svg"/>', "no image of a format"),
    "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "no image of a format"),
    "truncated PNG": (encoded(picture(300, 200))[:5000], "broken or cut short"),
    "truncated JPEG": (encoded(picture(300, 200), "JPEG")[:3000], "broken or cut short"),
    "header alone": (encoded(picture(300, 200))[:20], "no image of a format|broken or cut short"),
    "no pixels": (png(0, 10), "broken or cut short|no image of a format|at least one pixel"),
    "narrow": (encoded(Image.new("L", (1, 20000))), "1x20000 pixels; fitted into 7168 pixels a side, less than one"),
    "bomb": (png(30000, 30000), "send a smaller image"),
    "bomb under Pillow's limit": (png(13377, 13377, b"\0" * 9), "broken or cut short"),
    "float": (encoded(Image.new("F", (9, 9)), "TIFF"), "pixels of mode F"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_shown_is_refused_with_its_reason(name: str) -> None:
    data, reason = REFUSED[name]
    with pytest.raises(ImageError, match=reason):
        read(data)


def test_the_size_is_checked_before_anything_is_decoded() -> None:
    tracemalloc.start()
    begin = time.process_time()
    with pytest.raises(ImageError, match="12000x12000 pixels, more than the 1000000 that are taken"):
        read(png(12000, 12000, b"\0" * (12001 * 12000 // 100)), 1_000_000)
    assert tracemalloc.get_traced_memory()[1] < 20_000_000 and time.process_time() - begin < 5
    tracemalloc.stop()


def test_every_cut_of_a_file_is_an_image_or_an_error() -> None:
    """Whatever Pillow trips over is the file's fault, never the server's."""
    for form in ("PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP"):
        data = encoded(picture(24, 24), form)
        for end in range(1, len(data), max(1, len(data) // 40)):
            for broken in (data[:end], data[:end] + bytes([data[end] ^ 0x55]) + data[end + 1 :]):
                try:
                    assert read(broken).size[0] > 0
                except ImageError as error:
                    assert str(error)


def test_the_goldens_formula_reads_back() -> None:
    assert np.array_equal(np.asarray(read(encoded(picture(64, 48)))), pixels(64, 48, "RGB"))
