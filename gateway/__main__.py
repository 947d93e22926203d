"""The gateway process: config, serve, drain."""

import logging

from gateway.config import Config
from gateway.gateway import running_gateway
from headrace.config import Environment
from headrace.process import run_process
from headrace.rpc.server import Signals


async def main(environment: Environment) -> None:
    """Serve until a signal, then let the live requests finish; a second signal ends them."""
    # At level DEBUG it would log what it sends: outputs do not belong in logs.
    logging.getLogger("sse_starlette").setLevel(logging.INFO)
    config = Config.from_environment(environment)
    async with running_gateway(config) as gateway:
        signals = Signals()
        await signals.wait()
        await gateway.drain(config.drain_s, hurry=signals.wait)


if __name__ == "__main__":
    run_process("gateway", main)
