"""Small random models with a real tokenizer, saved as Hugging Face directories."""

import json
from collections.abc import Sequence
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

_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ARCHITECTURES: dict[str, dict[str, Any]] = {
    **_FAMILIES,
    "mistral": {"sliding_window": 6},
    "qwen2": {},
    "gemma2": {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 16},
    "phi3": {},
    "olmo2": {},
    "granite": {},
    "cohere": {},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"head_dim": 16, "num_experts": 4, **_EXPERTS},
    "gpt_oss": {
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "gpt2": {"n_embd": 64, "n_layer": 4, "n_head": 4},
    "gpt_neox": {},
    "starcoder2": {"sliding_window": 6},
    "glm4": {"head_dim": 16},
    "llama4_text": {
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 128,
        "attention_chunk_size": 8,
        "no_rope_layers": [1, 1, 1, 0],
        "floor_scale": 4,
    },
    "exaone4": {"sliding_window": 6, "sliding_window_pattern": 4},
    "smollm3": {},
    "stablelm": {},
    "falcon": {},
    "nemotron": {},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "qk_nope_head_dim": 16,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        **_EXPERTS,
    },
}
ARCHITECTURES = tuple(_ARCHITECTURES)


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
        **_ARCHITECTURES.get(family, {}),
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


def split_into_shards(directory: Path, names: Sequence[str]) -> None:
    """Deal a model's tensors out to shards of these names in turn, with an index."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    path.unlink()
    weight_map = {name: names[i % len(names)] for i, name in enumerate(sorted(tensors))}
    for shard in names:
        held = {name: tensors[name] for name in tensors if weight_map[name] == shard}
        save_file(held, directory / shard, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


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
