"""Image parts of a request, fetched and decoded: K3's rules on top of vLLM's media connector.

vLLM's connector brings the download limit, the timeout, the retries, the cache and ``--allowed-media-domains``; what is
added is which addresses are connected to, how files are decoded, and that whatever goes wrong is a client's 400.
"""

import asyncio
import binascii
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.request import getproxies

import aiohttp
import vllm.envs as envs
from PIL import Image
from vllm.connections import HTTPConnection
from vllm.exceptions import VLLMClientError, VLLMValidationError
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaIO, MediaWithBytes

from vllm_kimi_k3.images.address import AddressError, check_address
from vllm_kimi_k3.images.decode import ImageError, check_size, decode
from vllm_kimi_k3.images.rules import ImageRules

#: How much of an address or of data a message repeats.
_SHOWN = 80


class PublicConnection(HTTPConnection):
    """HTTP without connections to addresses that are not of the open Internet.

    The address is checked where the socket is made: after names are resolved, and again after each redirect. Only the
    server fetches so; whoever uses the offline API may connect to anything anyway.
    """

    def __init__(self) -> None:
        super().__init__()
        self._session: aiohttp.ClientSession | None = None

    async def get_async_client(self) -> aiohttp.ClientSession:
        """The session of this process, made at first use."""
        if self._session is None:
            connector = aiohttp.TCPConnector(socket_factory=_public_socket)
            self._session = aiohttp.ClientSession(connector=connector, trust_env=True)
        return self._session


def _public_socket(info: tuple[Any, ...]) -> socket.socket:
    family, kind, protocol, _, address = info
    # Behind a proxy the only address that we connect to is the proxy's, and it decides about the others.
    if not getproxies():
        check_address(address[0])
    return socket.socket(family, kind, protocol)


class ImageFileIO(MediaIO[MediaWithBytes[Image.Image]]):
    """Decodes image files by K3's rules.

    Args:
        rules: of the model's processor.
    """

    def __init__(self, rules: ImageRules) -> None:
        self.rules = rules

    def load_bytes(self, data: bytes) -> MediaWithBytes[Image.Image]:
        """The image in a file; raises ImageError."""
        return MediaWithBytes(decode(data, self.rules, envs.VLLM_MAX_IMAGE_PIXELS), data)

    def load_base64(self, media_type: str, data: str) -> MediaWithBytes[Image.Image]:
        """The image in a data URI; its media type is not looked at, the file says what it is."""
        try:
            return self.load_bytes(binascii.a2b_base64(data, strict_mode=True))
        except binascii.Error as error:
            raise ImageError(f"the data is no base64: {error}") from error

    def load_file(self, filepath: Path) -> MediaWithBytes[Image.Image]:
        """The image in a file of the server's; raises ImageError."""
        return self.load_bytes(filepath.read_bytes())


class ImageSource:
    """Fetches the images of requests.

    Args:
        model_config: vLLM's, of a K3.
        rules: of the model's processor.
    """

    def __init__(self, model_config: Any, rules: ImageRules) -> None:
        self.rules = rules
        self.file_io = ImageFileIO(rules)
        domains = model_config.allowed_media_domains
        connector: dict[str, Any] = {
            "allowed_local_media_path": model_config.allowed_local_media_path,
            "allowed_media_domains": domains,
        }
        if not domains:
            connector["connection"] = PublicConnection()
        self.connector = MEDIA_CONNECTOR_REGISTRY.load(envs.VLLM_MEDIA_CONNECTOR, **connector)

    def fetch(self, parts: Sequence[Mapping[str, Any]]) -> list[MediaWithBytes[Image.Image]]:
        """The images of image parts, in order.

        Raises:
            VLLMValidationError: an image cannot be had or shown; names which, and why.
        """
        return [self._fetch(position, part) for position, part in enumerate(parts)]

    async def fetch_async(self, parts: Sequence[Mapping[str, Any]]) -> list[MediaWithBytes[Image.Image]]:
        """Like :meth:`fetch`, all together."""
        waiting = [asyncio.ensure_future(self._fetch_async(position, part)) for position, part in enumerate(parts)]
        # None is left running when one fails: the memory of a request ends with it.
        await asyncio.wait(waiting)
        return [future.result() for future in waiting]

    def _fetch(self, position: int, part: Mapping[str, Any]) -> MediaWithBytes[Image.Image]:
        given = source_of(position, part)
        try:
            if isinstance(given, Image.Image):
                return self._pixels(given)
            timeout = envs.VLLM_IMAGE_FETCH_TIMEOUT
            return self.connector.load_from_url(given, self.file_io, fetch_timeout=timeout)
        except Exception as error:
            raise _refusal(position, given, error) from error

    async def _fetch_async(self, position: int, part: Mapping[str, Any]) -> MediaWithBytes[Image.Image]:
        given = source_of(position, part)
        try:
            if isinstance(given, Image.Image):
                return self._pixels(given)
            timeout = envs.VLLM_IMAGE_FETCH_TIMEOUT
            return await self.connector.load_from_url_async(given, self.file_io, fetch_timeout=timeout)
        except Exception as error:
            raise _refusal(position, given, error) from error

    def _pixels(self, image: Image.Image) -> MediaWithBytes[Image.Image]:
        check_size(*image.size, self.rules, envs.VLLM_MAX_IMAGE_PIXELS)
        return MediaWithBytes(image, f"{image.mode} {image.size} ".encode() + image.tobytes())


def source_of(position: int, part: Mapping[str, Any]) -> str | Image.Image:
    """The URL or the pixels of an image part, in any of the spellings that clients use.

    Raises:
        VLLMValidationError: there is none, or an empty one.
    """
    given = next((part[key] for key in ("image_url", "image_pil", "image", "url") if part.get(key)), None)
    if isinstance(given, Mapping):
        given = given.get("url")
    if isinstance(given, Image.Image) or (isinstance(given, str) and given):
        return given
    raise VLLMValidationError(
        f"images[{position}]: {given!r}: expected image_url with the image as a data URI or an address",
        parameter="messages",
    )


def _refusal(position: int, given: str | Image.Image, error: Exception) -> VLLMValidationError:
    """A client's error for whatever went wrong with an image."""
    shown = given if isinstance(given, str) else f"{given.mode} image"
    shown = f"{shown[:_SHOWN]}…" if len(shown) > _SHOWN else shown
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, AddressError):
        cause = cause.__cause__ or cause.__context__
    if cause is not None:
        reason = str(cause)
    elif isinstance(error, (ImageError, VLLMClientError, ValueError, RuntimeError)):
        reason = str(error)
    elif isinstance(error, TimeoutError):
        reason = "its server did not answer in time; send the image itself as a data URI"
    else:
        reason = f"it cannot be fetched: {error or type(error).__name__}"
    return VLLMValidationError(f"images[{position}]: {shown}: {reason}", parameter="messages")
