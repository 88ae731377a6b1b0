"""From the bytes of an image file to pixels: what is accepted, and how large it may be."""

from io import BytesIO

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from vllm_kimi_k3.images.rules import ImageRules

#: Still images that Pillow decodes by itself, without a program or library that an image could attack.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "ICO", "PPM", "TGA", "QOI")
#: Modes that the processor resizes in; all others are brought to one of them here.
_KEPT = ("RGB", "RGBA", "L", "LA")
_SIXTEEN_BIT = ("I;16", "I;16L", "I;16B", "I;16N")


class ImageError(ValueError):
    """An image that cannot be shown to the model; the text says what it is and what to send instead."""


def decode(data: bytes, rules: ImageRules, most_pixels: int) -> Image.Image:
    """The image in a file, upright, in RGB, RGBA, L or LA; of an animation the first frame.

    Nothing is decoded before the header's size has been checked, so a small file cannot take much memory.

    Args:
        data: the whole file.
        rules: of the model's processor.
        most_pixels: width times height, at most.

    Raises:
        ImageError: no image file, of a format that is not taken, broken or cut short, too large, or so narrow that the
            resize would leave less than one pixel of it.
    """
    if not data:
        raise ImageError("the file is empty; send an image")
    try:
        with Image.open(BytesIO(data), formats=FORMATS) as file:
            check_size(*file.size, rules, most_pixels)
            file.load()
            return _plain(_upright(file))
    except ImageError:
        raise
    except UnidentifiedImageError as error:
        raise ImageError(f"no image of a format that is read here: {', '.join(FORMATS)}") from error
    except Image.DecompressionBombError as error:
        raise ImageError(f"{error}; send a smaller image") from error
    # Decoders raise whatever they trip over in a file that does not hold what it should.
    except Exception as error:
        raise ImageError(f"the image file is broken or cut short: {error}") from error


def check_size(width: int, height: int, rules: ImageRules, most_pixels: int) -> None:
    """Check the size of an image.

    Raises:
        ImageError: it is empty, too large or too narrow.
    """
    size = f"the image is {width}x{height} pixels"
    if width < 1 or height < 1:
        raise ImageError(f"{size}; send one with at least one pixel")
    if width * height > most_pixels:
        raise ImageError(f"{size}, more than the {most_pixels} that are taken; send a smaller one")
    if min(width, height) * rules.scale(width, height) < 1:
        raise ImageError(
            f"{size}; fitted into {rules.longest_side} pixels a side, less than one pixel of its shorter side would be "
            "left; send a less narrow one"
        )


def _upright(image: Image.Image) -> Image.Image:
    """Turned as its camera was held; as it is where what says so is broken."""
    try:
        turned = image.getexif().get(ExifTags.Base.Orientation, 1) != 1
    except Exception:
        turned = False
    return ImageOps.exif_transpose(image) if turned else image.copy()


def _plain(image: Image.Image) -> Image.Image:
    """An image in one of the kept modes."""
    if image.mode in _KEPT and "transparency" not in image.info:
        return image
    if image.mode in _SIXTEEN_BIT or image.mode == "I":
        # Pillow's own conversion cuts all above 255 off.
        return Image.fromarray((np.clip(np.asarray(image), 0, 65535) // 256).astype(np.uint8))
    if image.mode in ("F", "LAB", "HSV"):
        raise ImageError(f"pixels of mode {image.mode} have no certain colours; send 8 or 16 bits in grey or RGB")
    if image.mode in ("PA", "La", "RGBa") or "transparency" in image.info:
        return image.convert("RGBA")
    return image.convert("L" if image.mode == "1" else "RGB")
