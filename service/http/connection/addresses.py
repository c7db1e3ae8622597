"""The address of a request, which counts in limits and names a client without an API key."""

from __future__ import annotations

import functools
import ipaddress
from collections.abc import Mapping


def address_of(peer: str, headers: Mapping[bytes, bytes], header: str | None) -> str:
    """Return the address of a request, as `network_of` gives it. `peer` is the connection's address.

    header: set by a trusted proxy. Its last address counts, which the nearest proxy added. The client may have written
    the others. Without a valid address in it, the peer's address counts.
    """
    if header is not None:
        name = header.lower().encode()
        address = network_of(headers.get(name, b"").decode("latin-1").rpartition(",")[2].strip())
        if address is not None:
            return address
    return network_of(peer) or "unknown"


@functools.lru_cache(maxsize=1024)
def network_of(text: str) -> str | None:
    """Return what counts as one address: for IPv6 the /64, which one customer gets; None: not an address.

    A port may follow, as some proxies write it: 192.0.2.7:5678, [2001:db8::1]:443.
    """
    try:
        if text.startswith("["):
            text = text[1:].partition("]")[0]
        elif text.count(":") == 1:
            text = text.partition(":")[0]
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        if address.is_loopback:
            return str(address)
        return str(ipaddress.ip_network((address, 64), strict=False))
    return str(address)
