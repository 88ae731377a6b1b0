"""Which addresses the server may fetch images from: those of the open Internet, unless its operator names the host."""

import ipaddress


class AddressError(Exception):
    """An image's host lies at an address that is not fetched from."""


def check_address(address: str) -> None:
    """Check an IP address, as a connection is about to be made to it.

    Raises:
        AddressError: it is private, loopback, link-local, multicast or reserved, also as an IPv4 address within IPv6.
    """
    # Link-local IPv6 addresses carry the interface behind a percent sign.
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        found = found.ipv4_mapped or found.sixtofour or found
    if not found.is_global or found.is_multicast:
        raise AddressError(
            f"{address} is not an address of the open Internet; send the image itself, or have the server's operator "
            "name the host with --allowed-media-domains"
        )
