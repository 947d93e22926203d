"""Libraries that generate with a model that stays on disk: accelerate and AirLLM."""

import json
from collections.abc import Sequence
from pathlib import Path

from headrace.bench.peers.environment import PeerEnvironment, output_of, same_torch
from headrace.bench.peers.peer import NUM_REQUESTS, NUM_TOKENS, Figures, Workload

_SCRIPT = Path(__file__).with_name("generate.py")
_TIMEOUT_S = 3600.0


class OffloadingPeer:
    """Runs generate.py with one of them."""

    def __init__(self, library: str, requirements: Sequence[str], workload: Workload) -> None:
        self.name = library
        self._workload = workload
        self._work_dir = workload.converted(library)
        self._environment = PeerEnvironment(
            directory=workload.cache / library, requirements=(same_torch(), *requirements)
        )

    async def prepare(self) -> str:
        """See Peer."""
        await self._environment.prepare()
        self._work_dir.mkdir(parents=True, exist_ok=True)
        return await self._environment.version_of(self.name)

    async def measure(self) -> Figures:
        """See Peer."""
        command = self._workload.cap.command(
            *(str(self._environment.python), str(_SCRIPT), self.name),
            *(str(self._workload.target.directory), str(self._work_dir)),
            *(str(self._workload.memory_bytes), str(NUM_TOKENS), str(NUM_REQUESTS)),
        )
        output = await output_of(command, environment={"HF_HUB_OFFLINE": "1"}, timeout_s=_TIMEOUT_S)
        return Figures(**json.loads(output.strip().splitlines()[-1]))

    def files(self) -> Sequence[Path]:
        """See Peer."""
        own = (path for path in self._work_dir.rglob("*") if path.is_file())
        return [*self._workload.target.files, *own]


def accelerate(workload: Workload) -> OffloadingPeer:
    """Hugging Face accelerate's disk offload."""
    return OffloadingPeer("accelerate", ("accelerate", "transformers"), workload)


def airllm(workload: Workload) -> OffloadingPeer:
    """AirLLM 4; splits the model into a second copy first."""
    return OffloadingPeer("airllm", ("airllm>=4,<5",), workload)
