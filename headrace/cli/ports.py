"""TCP ports, checked before anything starts."""

import socket

from headrace.errors import ConfigError


def claim_port(host: str, port: int, option: str) -> int:
    """A port that a process can listen on now.

    Args:
        host: The interface.
        port: The wanted port; 0 picks a free one.
        option: The option that sets it, for the error.

    Raises:
        ConfigError: The port is taken or the interface is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"cannot listen on port {port} of {host} ({error.strerror}): choose another with "
                f"{option}"
            ) from None
        return int(probe.getsockname()[1])
