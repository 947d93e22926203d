"""Embeddings that read rows as tokens need them, against torch with the whole matrix."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

from headrace.errors import CheckpointCorrupt
from headrace.model.checkpoint import Checkpoint
from headrace.model.integrity import Integrity
from headrace.model.operations.embedding import EmbeddingRows
from headrace.model.sweep_plan import Piece

NUM_ROWS, WIDTH, PADDING = 50, 24, 7
TOKENS = torch.tensor([[3, 49, 3, 0, PADDING, 31, 3, 20, 19]])


def random_rows(dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(NUM_ROWS, WIDTH, generator=generator).to(dtype)


def by_row(module: nn.Embedding, directory: Path, parts: Sequence[Tensor]) -> Path:
    """Let a module read the rows of these parts, one tensor each, from a file that it returns."""
    (directory / "config.json").write_text("{}")
    path = directory / "model.safetensors"
    save_file({f"part{i}": part.contiguous() for i, part in enumerate(parts)}, path)
    checkpoint = Checkpoint.open(directory)
    pieces = [
        Piece(span=checkpoint.tensors[f"part{i}"], begin_row=0, end_row=len(part))
        for i, part in enumerate(parts)
    ]
    EmbeddingRows(
        module, pieces, Integrity(checkpoint), dtype=torch.float32, device=torch.device("cpu")
    )
    return path


@pytest.mark.parametrize("sizes", [[50], [20, 30], [1, 18, 31]], ids=str)
@torch.inference_mode()
def test_repeated_tokens_get_their_rows_from_whichever_tensor_has_them(
    sizes: list[int], tmp_path: Path
) -> None:
    rows = random_rows()
    module = nn.Embedding(NUM_ROWS, WIDTH, device="meta")
    by_row(module, tmp_path, torch.split(rows, sizes))
    for tokens in (TOKENS, TOKENS.flip(1), TOKENS[:, :1]):
        assert torch.equal(module(tokens), rows[tokens])


@torch.inference_mode()
def test_the_padding_token_has_the_row_of_the_file(tmp_path: Path) -> None:
    rows = random_rows()
    module = nn.Embedding(NUM_ROWS, WIDTH, padding_idx=PADDING, device="meta")
    by_row(module, tmp_path, [rows])
    assert torch.equal(module(TOKENS), rows[TOKENS])


@torch.inference_mode()
def test_scaled_embeddings_stay_scaled(tmp_path: Path) -> None:
    rows = random_rows()
    module = Gemma3TextScaledWordEmbedding(NUM_ROWS, WIDTH, PADDING, embed_scale=4.5)
    by_row(module, tmp_path, [rows])
    torch.testing.assert_close(module(TOKENS), 4.5 * rows[TOKENS])


@torch.inference_mode()
def test_rows_are_converted_to_what_the_model_computes_in(tmp_path: Path) -> None:
    rows = random_rows(torch.bfloat16)
    module = nn.Embedding(NUM_ROWS, WIDTH, device="meta")
    by_row(module, tmp_path, [rows])
    assert torch.equal(module(TOKENS), rows.float()[TOKENS])


@torch.inference_mode()
def test_a_file_that_became_shorter_is_corrupt(tmp_path: Path) -> None:
    module = nn.Embedding(NUM_ROWS, WIDTH, device="meta")
    path = by_row(module, tmp_path, [random_rows()])
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    with pytest.raises(CheckpointCorrupt, match=r"model\.safetensors"):
        module(TOKENS)
