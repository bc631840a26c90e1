"""The model in the form that is trained: whole sequences, keys and values expanded, everything differentiable.

It computes what `mla_backend.engine.model` does, whose names its parameters have. The indexer learns from attention, as
in DeepSeek-V3.2: the distribution of its scores is drawn to that of attention, summed over the heads. Nothing of it
flows back into the rest of the model.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from mla_backend.engine.config import INDEX_DIM, ModelConfig
from mla_backend.engine.model import LATENT_NORM_EPS, RMSNorm
from mla_backend.engine.rope import attention_scale, inverse_frequencies, rotate, rotation_scale, rotations_of

E4M3_MAX = 448.0
LOOK_BACK = 8
"""Tokens that heads of the first layer begin with looking back."""
LATENT_GROUP = 128
"""Values that share a scale in an fp8_ds_mla cache."""


@dataclass
class Mode:
    """How a forward pass is done."""

    sparse: bool = False
    """Attend to what the indexer selects, not to everything."""
    rounded: bool = False
    """Latent vectors and the indexer's queries and keys as they come out of FP8 caches."""
    queries: Tensor | None = None
    """int64 `[B, N]`: the positions at which the indexer learns; None: nowhere."""


def through_fp8(x: Tensor, group: int, *, power_of_two: bool = False) -> Tensor:
    """x after it has been rounded to e4m3, with a scale for each group of its last dim; gradients pass unchanged."""
    wide = x.detach().float().unflatten(-1, (-1, group))
    scales = wide.abs().amax(-1, keepdim=True).clamp(min=1e-4) / E4M3_MAX
    if power_of_two:
        scales = torch.exp2(torch.ceil(torch.log2(scales)))
    rounded = ((wide / scales).to(torch.float8_e4m3fn).float() * scales).flatten(-2).to(x.dtype)
    return x + (rounded - x.detach())


class Indexer(nn.Module):
    """Scores of tokens for queries; parameters as in the engine's."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.heads, self.topk, self.rope_dim = config.index_heads, config.index_topk, config.rope_dim
        self.interleaved = config.index_rope_interleaved
        self.wq_b = nn.Linear(config.q_lora_rank, self.heads * INDEX_DIM, bias=False)
        self.wk = nn.Linear(config.hidden_size, INDEX_DIM, bias=False)
        self.k_norm = nn.LayerNorm(INDEX_DIM, eps=1e-6)
        self.weights_proj = nn.Linear(config.hidden_size, self.heads, bias=False)

    def _rotated(self, x: Tensor, rotations: Tensor) -> Tensor:
        turned = rotate(x[..., : self.rope_dim], rotations, x.dtype, interleaved=self.interleaved)
        return torch.cat([turned, x[..., self.rope_dim :].to(turned.dtype)], dim=-1)

    def keys(self, hidden: Tensor, rotations: Tensor, rounded: bool) -> Tensor:
        """`[B, T, 128]`."""
        keys = self._rotated(self.k_norm(self.wk(hidden)), rotations)
        return through_fp8(keys, INDEX_DIM, power_of_two=True) if rounded else keys

    def scores(self, hidden: Tensor, q_latent: Tensor, rotations: Tensor, keys: Tensor, rounded: bool) -> Tensor:
        """Of queries `[B, N]` for all keys: fp32 `[B, N, T]`, later tokens included."""
        queries = self.wq_b(q_latent).unflatten(-1, (self.heads, INDEX_DIM))
        queries = self._rotated(queries, rotations.unsqueeze(-2))
        if rounded:
            queries = through_fp8(queries, INDEX_DIM)
        weights = self.weights_proj(hidden).float() * (self.heads * INDEX_DIM) ** -0.5
        products = torch.relu(queries.flatten(1, 2) @ keys.transpose(1, 2).to(queries.dtype))
        products = products.unflatten(1, (-1, self.heads))  # [B, N, heads, T]
        return (weights.to(products.dtype).unsqueeze(2) @ products).squeeze(2).float()

    @torch.no_grad()
    def selection(self, *query_and_keys, causal: Tensor) -> Tensor:
        """bool `[B, T, T]`: the tokens that each token attends to."""
        scores = self.scores(*query_and_keys).masked_fill(~causal, -torch.inf)
        best = scores.topk(min(self.topk, scores.shape[-1])).indices
        return torch.zeros_like(scores, dtype=torch.bool).scatter_(2, best, True) & causal


class Attention(nn.Module):
    """Multi-head latent attention with keys and values of each head."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config, self.scale = config, attention_scale(config)
        self.q_a_proj = nn.Linear(config.hidden_size, config.q_lora_rank, bias=False)
        self.q_a_layernorm = RMSNorm(config.q_lora_rank, LATENT_NORM_EPS, torch.float32)
        self.q_b_proj = nn.Linear(config.q_lora_rank, config.heads * config.query_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(config.hidden_size, config.latent_dim + config.rope_dim, bias=False)
        self.kv_a_layernorm = RMSNorm(config.latent_dim, LATENT_NORM_EPS, torch.float32)
        self.kv_b_proj = nn.Linear(config.latent_dim, config.heads * (config.nope_dim + config.value_dim), bias=False)
        self.o_proj = nn.Linear(config.heads * config.value_dim, config.hidden_size, bias=False)
        self.indexer = Indexer(config)

    def forward(self, hidden: Tensor, rotations: Tensor, causal: Tensor, mode: Mode) -> tuple[Tensor, Tensor | None]:
        """hidden `[B, T, hidden_size]` to the same, and the loss of the indexer."""
        config = self.config
        q_latent = self.q_a_layernorm(self.q_a_proj(hidden))
        queries = self.q_b_proj(q_latent).unflatten(-1, (config.heads, config.query_dim))
        q_nope, q_rope = queries.split([config.nope_dim, config.rope_dim], dim=-1)
        latent, k_rope = self.kv_a_proj_with_mqa(hidden).split([config.latent_dim, config.rope_dim], dim=-1)
        latent = self.kv_a_layernorm(latent)
        if mode.rounded:
            latent = through_fp8(latent, LATENT_GROUP)
        expanded = self.kv_b_proj(latent).unflatten(-1, (config.heads, -1))
        k_nope, values = expanded.split([config.nope_dim, config.value_dim], dim=-1)
        q_rope = rotate(q_rope, rotations.unsqueeze(1), q_rope.dtype, interleaved=True)
        k_rope = rotate(k_rope, rotations, k_rope.dtype, interleaved=True).unsqueeze(2).expand(-1, -1, config.heads, -1)
        queries = torch.cat([q_nope, q_rope], dim=-1).transpose(1, 2)
        keys = torch.cat([k_nope, k_rope], dim=-1).transpose(1, 2)

        loss, selected = None, None
        if mode.sparse or mode.queries is not None:
            inputs, detached = hidden.detach(), q_latent.detach()
            index_keys = self.indexer.keys(inputs, rotations, mode.rounded)
            if mode.queries is not None:
                loss = self._indexer_loss(inputs, detached, queries, keys, index_keys, rotations, causal, mode)
            if mode.sparse:
                query = (inputs, detached, rotations)
                selected = self.indexer.selection(*query, index_keys, mode.rounded, causal=causal).unsqueeze(1)
        out = functional.scaled_dot_product_attention(
            queries, keys, values.transpose(1, 2), attn_mask=selected, is_causal=selected is None, scale=self.scale
        )
        return self.o_proj(out.transpose(1, 2).flatten(2)), loss

    def begin_with_copies(self, seen: Tensor | None = None) -> None:
        """Queries attend to tokens like their own, and get them as they are.

        seen: `[q_lora_rank, hidden_size]`, what queries and keys see of a token; random if not given.
        """
        config, from_hidden = self.config, self.kv_a_proj_with_mqa.weight[: self.config.latent_dim]
        if seen is not None:
            self.q_a_proj.weight.copy_(seen)
        heads = self.q_b_proj.weight.unflatten(0, (config.heads, -1))[:, : config.nope_dim]
        per_head = self.kv_b_proj.weight.unflatten(0, (config.heads, -1))
        per_head[:, : config.nope_dim] = heads @ self.q_a_proj.weight @ torch.linalg.pinv(from_hidden)
        values = per_head[:, config.nope_dim :] @ from_hidden  # [H, value_dim, hidden_size]
        self.o_proj.weight.copy_(0.25 * values.flatten(0, 1).T)

    def begin_with_looking_back(self, hidden: Tensor, most: int) -> Tensor:
        """Head h attends to what is h % most + 1 tokens back, whatever it is.

        hidden: `[N, hidden_size]`, tokens as the layer sees them.

        Returns:
            What heads copy of a token, `[q_lora_rank, hidden_size]`: the heads at the same distance share the work.
        """
        config = self.config
        latent, key = self.kv_a_proj_with_mqa(hidden).mean(0).split([config.latent_dim, config.rope_dim])
        query = self.q_a_layernorm(self.q_a_proj(hidden)).mean(0)
        frequencies = inverse_frequencies(config)
        a, b = key[0::2], key[1::2]
        # the pairs that turn fast enough to tell neighbours apart
        a, b = (x / (a.square() + b.square()) * (frequencies > 0.06) for x in (a, b))
        from_hidden = self.kv_a_proj_with_mqa.weight[: config.latent_dim]
        rows = nn.init.orthogonal_(torch.empty(config.q_lora_rank, config.hidden_size))
        values = rows @ torch.linalg.pinv(from_hidden)
        queries = self.q_b_proj.weight.unflatten(0, (config.heads, -1))
        expanded = self.kv_b_proj.weight.unflatten(0, (config.heads, -1))
        for head in range(config.heads):
            turn = -(head % most + 1) * frequencies
            wanted = torch.stack([a * turn.cos() - b * turn.sin(), b * turn.cos() + a * turn.sin()], dim=1).flatten()
            queries[head, : config.nope_dim] *= 0.1
            queries[head, config.nope_dim :] = 20 * torch.outer(wanted, query) / query.square().sum()
            part = slice(head // most * config.value_dim, (head // most + 1) * config.value_dim)
            expanded[head, config.nope_dim :] = values[part]
            out = slice(head * config.value_dim, (head + 1) * config.value_dim)
            self.o_proj.weight[:, out] = 0.7 * rows[part].T
        return rows

    def _indexer_loss(
        self,
        hidden: Tensor,
        q_latent: Tensor,
        queries: Tensor,
        keys: Tensor,
        index_keys: Tensor,
        rotations: Tensor,
        causal: Tensor,
        mode: Mode,
    ) -> Tensor:
        """How far the indexer's distribution is from that of attention to all tokens, at the queries of the mode."""
        at = mode.queries
        rows = torch.arange(len(at), device=at.device).unsqueeze(1)
        later = ~causal[at]  # [B, N, T]
        with torch.no_grad():
            scores = queries.detach().transpose(1, 2)[rows, at].transpose(1, 2) @ keys.detach().transpose(2, 3)
            scores = (scores.float() * self.scale).masked_fill(later.unsqueeze(1), -torch.inf)
            target = scores.softmax(-1).mean(1)
        found = self.indexer.scores(hidden[rows, at], q_latent[rows, at], rotations[at], index_keys, mode.rounded)
        logs = found.masked_fill(later, -torch.inf).log_softmax(-1).masked_fill(later, 0.0)
        return (target * (target.clamp(min=1e-9).log() - logs)).sum(-1).mean()


class MLP(nn.Module):
    """Gated by SiLU."""

    def __init__(self, hidden_size: int, size: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, size, bias=False)
        self.up_proj = nn.Linear(hidden_size, size, bias=False)
        self.down_proj = nn.Linear(size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class MoE(nn.Module):
    """All experts compute all tokens, and count as much as the router says: wasteful, and quick at this size."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.kept, self.scale = config.experts_per_token, config.expert_scale
        self.gate = nn.Linear(config.hidden_size, config.experts, bias=False)
        self.gate.e_score_correction_bias = nn.Parameter(torch.zeros(config.experts), requires_grad=False)
        self.experts = nn.ModuleList(MLP(config.hidden_size, config.expert_size) for _ in range(config.experts))
        self.shared_experts = MLP(config.hidden_size, config.expert_size * config.shared_experts)
        self.load = torch.zeros(config.experts)
        """Of the last pass: the share of tokens that each expert got."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            scores = self.gate(x.float()).sigmoid()
        chosen = (scores + self.gate.e_score_correction_bias).topk(self.kept).indices
        kept = torch.zeros_like(scores).scatter_(-1, chosen, 1.0)
        self.load = kept.detach().flatten(0, -2).mean(0)
        weights = scores * kept
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.scale
        out = torch.stack([expert(x) for expert in self.experts], dim=-1)
        return (out * weights.unsqueeze(-2).to(out.dtype)).sum(-1) + self.shared_experts(x)

    @torch.no_grad()
    def balance(self, step: float = 1e-3) -> None:
        """Makes experts that got more than their share less likely to be chosen, without a loss for it."""
        load = self.load.to(self.gate.e_score_correction_bias)
        self.gate.e_score_correction_bias += step * torch.sign(load.mean() - load)


class Layer(nn.Module):
    """Attention and an MLP or experts."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps, torch.float32)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps, torch.float32)
        self.mlp = MoE(config) if config.is_moe[layer] else MLP(config.hidden_size, config.mlp_size)

    def forward(self, hidden: Tensor, *context) -> tuple[Tensor, Tensor | None]:
        attended, loss = self.self_attn(self.input_layernorm(hidden), *context)
        hidden = hidden + attended
        return hidden + self.mlp(self.post_attention_layernorm(hidden)), loss


class Decoder(nn.Module):
    """What lies between token ids and the last hidden states."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, torch.float32)


class Network(nn.Module):
    """The whole model, in fp32; run it under autocast for less."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        if config.expert_groups != 1 or not config.normalise_expert_weights or config.family != "deepseek_v32":
            raise ValueError("config must be deepseek_v32 with n_group 1 and norm_topk_prob")
        self.config = config
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        for name, parameter in self.named_parameters():
            if name.endswith("norm.weight"):
                nn.init.ones_(parameter)
            elif parameter.dim() == 2:
                size = 0.5 if "embed_tokens" in name else parameter.shape[1] ** -0.5
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    size *= (2 * config.layers) ** -0.5
                nn.init.normal_(parameter, std=size)

    @torch.no_grad()
    def begin_with_recall(self) -> None:
        """Gives random weights the rough shape that recall takes, which training from noise finds late and at once.

        What a head attends to is copied rather than mixed up, and what is copied to the end is what is said: values
        and outputs are transposes of each other, and so are the embedding and the output. Later layers attend to
        tokens that are like the query. The first layer looks back by 1 to 8 tokens, so that later ones find values by
        the names before them.
        """
        config, layers = self.config, self.model.layers
        embedding = self.model.embed_tokens.weight
        embedding += 0.5 * torch.randn(config.hidden_size)  # common to all: what can be attended to whatever it is
        self.lm_head.weight.copy_(0.125 * embedding)
        for layer in layers:
            layer.self_attn.begin_with_copies()
        rows = layers[0].self_attn.begin_with_looking_back(layers[0].input_layernorm(embedding), LOOK_BACK)
        layers[1].self_attn.begin_with_copies(rows)

    def forward(self, ids: Tensor, mode: Mode) -> tuple[Tensor, list[Tensor]]:
        """Token ids `[B, T]` to the last hidden states `[B, T, hidden_size]`, for `lm_head`, and the indexers'
        losses."""
        positions = torch.arange(ids.shape[1], device=ids.device)
        angles = positions.unsqueeze(1).float() * inverse_frequencies(self.config, ids.device)
        rotations = rotations_of(angles, rotation_scale(self.config.yarn))
        causal = positions.unsqueeze(1) >= positions
        hidden, losses = self.model.embed_tokens(ids), []
        for layer in self.model.layers:
            hidden, loss = layer(hidden, rotations, causal, mode)
            losses += [] if loss is None else [loss]
        return self.model.norm(hidden), losses

    def balance(self) -> None:
        """After a step: evens out the experts' load."""
        for module in self.modules():
            if isinstance(module, MoE):
                module.balance()
