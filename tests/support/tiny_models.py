"""Small random models with a real tokenizer, saved as Hugging Face directories."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

VOCAB_SIZE = 272
EOS_ID = 256

_CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "qwen3": {"head_dim": 16, "tie_word_embeddings": True},
    "gemma3_text": {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16},
}
FAMILIES = tuple(_FAMILIES)


def make_tiny_model(
    directory: Path,
    family: str = "llama",
    *,
    seed: int = 0,
    num_layers: int = 4,
    max_context_tokens: int = 512,
    dtype: torch.dtype = torch.float32,
    **overrides: Any,
) -> Path:
    """Save a random model of a family; greedy text of it varies instead of looping at once."""
    torch.manual_seed(seed)
    values: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": max_context_tokens,
        "bos_token_id": None,
        "eos_token_id": EOS_ID,
        "pad_token_id": EOS_ID,
        **_FAMILIES.get(family, {}),
        **overrides,
    }
    config = AutoConfig.for_model(family, **values)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.15)
    model.to(dtype).save_pretrained(directory)
    save_tokenizer(directory)
    return directory


def make_noisy_copy(source: Path, directory: Path, *, noise: float, seed: int = 1) -> Path:
    """Copy a model with Gaussian noise on every matrix, in units of its standard deviation."""
    generator = torch.Generator().manual_seed(seed)
    directory.mkdir()
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            (directory / path.name).write_bytes(path.read_bytes())
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.dim() > 1:
            scale = noise * float(tensor.float().std())
            random = torch.randn(tensor.shape, generator=generator) * scale
            tensors[name] = (tensor.float() + random).to(tensor.dtype)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def save_tokenizer(directory: Path) -> None:
    """Save a byte-level tokenizer with a chat template: one token a byte, 16 special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    specials += [f"<|spare{i}|>" for i in range(VOCAB_SIZE - 256 - len(specials))]
    tokenizer.add_special_tokens(specials)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", clean_up_tokenization_spaces=False
    )
    fast.chat_template = _CHAT_TEMPLATE
    fast.save_pretrained(directory)
