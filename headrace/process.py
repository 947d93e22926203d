"""The frame that every process runs in: logging, telemetry, a clear end when it cannot start."""

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Coroutine
from typing import Any

from headrace import telemetry
from headrace.config import Environment
from headrace.errors import HeadraceError

_LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


def run_process(name: str, main: Callable[[Environment], Coroutine[Any, Any, None]]) -> None:
    """Run one process to its end.

    Reads HEADRACE_LOG_LEVEL (default INFO) and OTEL_EXPORTER_OTLP_ENDPOINT (set: export spans).

    Args:
        name: "gateway", "draft", "target" or "streamer".
        main: Builds its config from the environment and serves until a signal.
    """
    environment = Environment(os.environ)
    provider = None
    try:
        logging.basicConfig(
            level=environment.choice("HEADRACE_LOG_LEVEL", _LOG_LEVELS, "INFO"),
            format=f"%(asctime)s {name} %(levelname)s %(name)s: %(message)s",
            stream=sys.stderr,
        )
        is_exporting = environment.optional_text("OTEL_EXPORTER_OTLP_ENDPOINT") is not None
        provider = telemetry.set_up(name, is_exporting=is_exporting)
        asyncio.run(main(environment))
    except HeadraceError as error:
        sys.exit(f"headrace {name}: {error.message}")
    finally:
        if provider is not None:
            provider.shutdown()
