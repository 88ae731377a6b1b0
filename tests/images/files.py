"""Image files made for tests, and image parts of requests."""

import base64
from io import BytesIO
from typing import Any

from PIL import Image


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    """An image as a file."""
    buffer = BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def data_uri(data: bytes, kind: str = "image/png") -> str:
    """A file as a data URI."""
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def image_part(image: Image.Image | bytes | str) -> dict[str, Any]:
    """An image part of a chat message, from pixels, a file or an address."""
    if isinstance(image, Image.Image):
        image = encoded(image)
    url = data_uri(image) if isinstance(image, bytes) else image
    return {"type": "image_url", "image_url": {"url": url}}
