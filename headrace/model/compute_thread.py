"""The one thread of a process that computes.

OpenMP keeps a team of threads for each thread that ever ran a parallel loop. With more of them than
cores it stops waiting actively between loops, and a forward pass of many small ones takes twice as
long; so loading, allocating and computing all run here, and nowhere else.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


class ComputeThread:
    """Runs one function at a time."""

    def __init__(self, num_threads: int) -> None:
        """Begin the thread with its first function.

        Args:
            num_threads: That work on one operation together.
        """
        self._executor = ThreadPoolExecutor(
            1,
            thread_name_prefix="compute",
            initializer=torch.set_num_threads,
            initargs=(num_threads,),
        )

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What a function returns, after those that came before it."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, partial(function, *args, **kwargs))
