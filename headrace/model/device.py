"""Where a model computes: the processor, or a CUDA device."""

import torch

from headrace.errors import ConfigError

CPU = torch.device("cpu")


def open_device(name: str) -> torch.device:
    """The device of that name.

    Args:
        name: cpu, cuda, cuda:1, ...; auto is cuda where there is one.

    Raises:
        ConfigError: There is no such device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"HEADRACE_DEVICE={name} cannot be used ({error}): set it to cpu, cuda or auto"
        ) from None
    return device
