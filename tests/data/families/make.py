"""Make the tiny random models of this folder and what transformers computes with them.

Run where transformers is installed (it is no dependency of kvoy): ``python tests/data/families/make.py``.
Each folder holds a config.json as transformers writes it, fp32 weights, and expected.json: input_ids and the
logits of the listed positions, from transformers in fp32 on the CPU with eager attention.
"""

import json
import math
from pathlib import Path

import torch
import transformers as tf

VOCAB_TOKENS = 96
INPUT_TOKENS = 48
POSITIONS = (7, 23, 46, 47)
SIZES = {
    "vocab_size": VOCAB_TOKENS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 8.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0}
GEMMA_LAYERS = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
GEMMA_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
}


def cases() -> dict[str, tuple[type, object]]:
    """Folder name -> model class and config."""
    gemma = {**SIZES, "num_hidden_layers": 4, "head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 8}
    return {
        "llama": (tf.LlamaForCausalLM, tf.LlamaConfig(**SIZES)),
        "llama_tied_head_dim": (tf.LlamaForCausalLM, tf.LlamaConfig(**SIZES, head_dim=16, tie_word_embeddings=True)),
        "llama_llama3": (tf.LlamaForCausalLM, tf.LlamaConfig(**SIZES, head_dim=16, rope_parameters=LLAMA3)),
        "llama_yarn": (tf.LlamaForCausalLM, tf.LlamaConfig(**SIZES, head_dim=16, rope_parameters=YARN)),
        "llama_linear": (tf.LlamaForCausalLM, tf.LlamaConfig(**SIZES, rope_parameters=LINEAR)),
        "qwen2": (tf.Qwen2ForCausalLM, tf.Qwen2Config(**SIZES)),
        "qwen3": (tf.Qwen3ForCausalLM, tf.Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True)),
        "mistral_window": (tf.MistralForCausalLM, tf.MistralConfig(**SIZES, sliding_window=12)),
        "gemma3": (
            tf.Gemma3ForCausalLM,
            tf.Gemma3TextConfig(**gemma, layer_types=GEMMA_LAYERS, rope_parameters=GEMMA_ROPE),
        ),
    }


def randomise(model: torch.nn.Module) -> None:
    """Weights that make every part matter: no zero bias, no norm of one, attention that is not flat."""
    for name, weight in model.named_parameters():
        if "norm" in name:
            centre = 0.0 if model.config.model_type == "gemma3_text" else 1.0
            weight.data.normal_(centre, 0.3)
        elif weight.dim() == 1 or "embed" in name:
            weight.data.normal_(0.0, 0.5)
        else:
            weight.data.normal_(0.0, 1.5 / math.sqrt(weight.shape[1]))


def make(folder: Path, model_class: type, config: object) -> None:
    config._attn_implementation = "eager"
    model = model_class(config).eval()
    randomise(model)
    model.save_pretrained(folder)
    input_ids = torch.randint(3, VOCAB_TOKENS, (1, INPUT_TOKENS))
    with torch.no_grad():
        logits = model(input_ids).logits[0, list(POSITIONS)]
    expected = {
        "input_ids": input_ids[0].tolist(),
        "positions": list(POSITIONS),
        "logits": [[round(x, 5) for x in row] for row in logits.tolist()],
        "transformers": tf.__version__,
    }
    (folder / "expected.json").write_text(json.dumps(expected) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for number, (name, (model_class, config)) in enumerate(cases().items()):
        torch.manual_seed(number)
        make(Path(__file__).parent / name, model_class, config)
