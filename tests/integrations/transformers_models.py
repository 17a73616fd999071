"""Small random models of transformers, and what the tests give them: padded batches, packed documents."""

from __future__ import annotations

import pytest
import torch
import transformers

CLOSE = {"rtol": 0.0, "atol": 1e-5}
LENGTHS = (7, 12, 1)
VOCABULARY = 50
CACHE_BY_ITS_OLD_NAME = pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")


def bert(**changes):
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
    config = transformers.BertConfig(vocab_size=VOCABULARY, max_position_embeddings=64, **{**sizes, **changes})
    return transformers.BertModel(config, add_pooling_layer=False).eval()


def llama(kv_heads=2, **changes):
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
    config = transformers.LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=kv_heads, **{**sizes, **changes})
    return transformers.LlamaForCausalLM(config).eval()


def mistral(sliding_window):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    config = transformers.MistralConfig(
        vocab_size=VOCABULARY, num_key_value_heads=2, sliding_window=sliding_window, **sizes
    )
    return transformers.MistralForCausalLM(config).eval()


def run(model, name, **inputs):
    """Hidden states or logits with the attention of that name."""
    model.set_attn_implementation(name)
    with torch.no_grad():
        return model(**inputs)[0]


def padded(side, lengths=LENGTHS):
    """(input_ids, attention_mask) with padding on that side."""
    ids = torch.randint(1, VOCABULARY, (len(lengths), max(lengths)))
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    return ids, mask if side == "right" else mask.flip(1)


def packed(lengths=LENGTHS):
    """(input_ids [1,T], position_ids [1,T], cu_seq_lens [documents + 1])."""
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    boundaries = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    return torch.randint(1, VOCABULARY, (1, sum(lengths))), positions, boundaries


def one_by_one(model, ids, lengths=LENGTHS):
    """What transformers' SDPA makes of each document alone."""
    return torch.cat([run(model, "sdpa", input_ids=part) for part in ids.split(list(lengths), dim=1)], dim=1)
