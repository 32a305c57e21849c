"""The multi-token-prediction head, trained the way vLLM runs it.

transformers loads Qwen3.5 checkpoints without their `mtp.*` tensors, so the
head is built here from its decoder layer. Parameter names match the checkpoint.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel


class MtpHead(nn.Module):
    """One MTP layer, used recursively to draft several tokens.

    `model` is a `Qwen3_5ForCausalLM` or `Qwen3_5MoeForCausalLM`; its last layer
    must be a full-attention layer, whose class the head's own layer copies.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        config = model.config
        hidden = config.hidden_size
        norm_class = type(model.model.norm)
        layer_class = type(model.model.layers[-1])
        self.pre_fc_norm_embedding = norm_class(hidden, eps=config.rms_norm_eps)
        self.pre_fc_norm_hidden = norm_class(hidden, eps=config.rms_norm_eps)
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.layers = nn.ModuleList([layer_class(config, config.num_hidden_layers - 1)])
        self.norm = norm_class(hidden, eps=config.rms_norm_eps)
        self.apply(model._init_weights)

    def forward(
        self, model: PreTrainedModel, tokens: Tensor, hidden: Tensor, steps: int
    ) -> list[Tensor]:
        """Hidden states of `steps` recursive drafts from every position.

        `tokens` is [batch, length], `hidden` [batch, length, hidden_size], the
        trunk's output after its last norm. Item k of the result, of shape
        [batch, length - k - 1, hidden_size], predicts at index t the token at
        t + k + 2. As in the engine, step k of the chain that starts at t sees
        the first step's keys up to t and then only its own chain's keys.
        """
        batch, length = tokens.shape
        cache = DynamicCache()
        embedded = model.model.embed_tokens(tokens)
        outputs: list[Tensor] = []
        mask = torch.zeros(0)
        for step in range(steps):
            width = length - step - 1
            next_token = embedded[:, step + 1 : step + 1 + width]
            fused = self.fc(
                torch.cat(
                    [
                        self.pre_fc_norm_embedding(next_token),
                        self.pre_fc_norm_hidden(hidden[:, :width]),
                    ],
                    dim=-1,
                )
            )
            own = torch.ones(width, width, dtype=torch.bool)
            own = own.tril() if step == 0 else torch.eye(width, dtype=torch.bool)
            mask = own if step == 0 else torch.cat([mask[:width], own], dim=1)
            positions = torch.arange(step, step + width).expand(batch, width)
            state = self.layers[0](
                fused,
                position_embeddings=model.model.rotary_emb(fused, positions),
                attention_mask=mask[None, None],
                past_key_values=cache,
            )
            hidden = self.norm(state)
            outputs.append(hidden)
        return outputs
