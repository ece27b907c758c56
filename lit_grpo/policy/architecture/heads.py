"""The layer of multi-token prediction (MTP) of Qwen3.5 and its kin, which predicts a token more than the policy does.

From the policy's last hidden state ``h_i`` and the token ``x_{i+1}`` it computes ::

    u_{i+1} = norm(layer(fc[norm_e(embedding(x_{i+1})); norm_h(h_i)]))        logits of x_{i+2} = head(u_{i+1})

with the policy's own embedding and head, and a layer of the policy's own class that attends to ``u_1 ... u_{i+1}``
(DeepSeek-V3, arXiv 2412.19437, section 2.2; vLLM 0.32 and SGLang compute the same). For a token further, ``u`` takes
the place of ``h``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import pad
from transformers import AttentionInterface

from lit_grpo.policy.architecture.attention import OwnAttention
from lit_grpo.policy.architecture.decoder import decoder_of
from lit_grpo.policy.architecture.unread import TRAINED, find_unread

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
"""Mixes values of shape (rows, KV heads, T, size) for queries (rows, heads, T, key size): queries, keys, values, and
the factor of the scores."""
_KNOWN, _BEGIN = "_lit_grpo_prediction_head", "mtp."
MORE_KEYS = 8
"""Numbers by which a key is longer than a head: the first hides a sequence's first token, the others align."""
_HIDDEN = -30000.0


def prediction_head(model: PreTrainedModel) -> PredictionHead:
    """Return the policy's own layer of multi-token prediction, which is read from its files once.

    Raises:
        ValueError: The files hold none, or one that does not fit the policy.
    """
    found = vars(model).get(_KNOWN)
    if found is None:
        found = PredictionHead(model)
        object.__setattr__(model, _KNOWN, found)  # no part of the model: neither trained, synced nor saved with it
    return found.to(model.device)


class PredictionHead(torch.nn.Module):
    """A layer of multi-token prediction, with the weights of the policy's files; see :func:`prediction_head`.

    Args:
        model: The policy, whose embedding, rotary positions and classes it uses.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        decoder: Any = decoder_of(model)
        config, read = copy.deepcopy(decoder.config), find_unread(model).read()
        tensors = {name.removeprefix(_BEGIN): one for name, one in read if name.startswith(_BEGIN)}
        if "fc.weight" not in tensors:
            raise ValueError(
                f"{model.name_or_path or type(model).__name__} holds no layer of multi-token prediction "
                "(mtp.fc.weight), so its own heads cannot draft; take a policy that has one, or leave the heads out."
            )
        number = max(n for n, layer in enumerate(decoder.layers) if hasattr(layer, "self_attn"))
        self._decoder = (decoder,)  # no part of this module
        with torch.device(model.device):
            self.fc = torch.nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
            self.layers = torch.nn.ModuleList([type(decoder.layers[number])(config, number)])
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = (copy.deepcopy(decoder.norm) for _ in "123")
        for module in self.modules():  # each with a config of its own, or the attention of the policy would be switched
            if getattr(module, "config", None) is not None:
                module.config = config
        config._attn_implementation = "lit_grpo_heads"
        AttentionInterface.register("lit_grpo_heads", _attention)
        shapes = [{name: f"of shape {(*one.shape,)}" for name, one in s.items()} for s in (tensors, self.state_dict())]
        for name in sorted(shapes[0].keys() | shapes[1].keys()):
            held, own = (each.get(name, "absent") for each in shapes)
            if held != own:
                raise ValueError(
                    f"{_BEGIN}{name} is {held} in the policy's files, and {own} in the {type(self.layers[0]).__name__} "
                    "of its config.json, so its own heads cannot draft; put the config of these weights beside them, "
                    "or leave the heads out."
                )
        self.to(model.device, model.dtype).requires_grad_(False).eval()
        self.load_state_dict(tensors)

    def train_in(self, model: PreTrainedModel) -> None:
        """Let the weights be trained; exports and checkpoints of the policy have them from now on."""
        object.__setattr__(model, TRAINED, self.requires_grad_(True))

    def forward(
        self,
        hidden_BTD: torch.Tensor,
        tokens_BT: torch.Tensor,
        positions_BT: torch.Tensor,
        attend: Attend,
        is_first_BT: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return ``u`` of each token, shape (rows, T, hidden size).

        ``hidden_BTD`` is the hidden state before each token: the policy's last one, or for a further token what this
        returned. It gets no gradient, and neither do the embeddings. ``attend`` gets keys and queries that are
        ``MORE_KEYS`` numbers longer than values. No token sees those of ``is_first_BT``, which have no hidden state
        before them: by default those at position 0.
        """
        with torch.no_grad():
            embedded = self._decoder[0].embed_tokens(tokens_BT)
            angles = self._decoder[0].rotary_emb(embedded, positions_BT)
        normed = self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden_BTD.detach())
        own = {"attend": attend, "is_first_BT": positions_BT == 0 if is_first_BT is None else is_first_BT}
        return self.norm(self.layers[0](self.fc(torch.cat(normed, -1)), position_embeddings=angles, **own))

    def stored(self) -> dict[str, torch.Tensor]:
        """Return its weights with the names that they have in files."""
        return {f"{_BEGIN}{name}": one.detach() for name, one in self.state_dict().items()}


def _attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: None, **options: Any
) -> tuple[torch.Tensor, None]:
    """Let ``attend`` mix the values, in the signature of Hugging Face attention functions.

    A number more in queries and keys gives the sequence's first token, where the layer has nothing to compute from, a
    score so low that its weight is 0.
    """
    if any(options.get(name) is not None for name in ("softcap", "sliding_window", "s_aux")):
        raise OwnAttention("the layer of multi-token prediction has a window, a cap or sinks")
    size, scaling = query.shape[-1], options.get("scaling") or query.shape[-1] ** -0.5
    query, key = (pad(each.to(value.dtype), (0, MORE_KEYS)) for each in (query, key))
    query[..., size], key[..., size] = 1.0, options["is_first_BT"][:, None] * _HIDDEN
    return options["attend"](query, key, value, scaling).transpose(1, 2), None
