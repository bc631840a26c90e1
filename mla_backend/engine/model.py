"""DeepSeek-V3.2 and GLM-5 in plain PyTorch, over a paged cache.

The names of modules and parameters are those of the checkpoints' tensors.
"""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from mla_backend.engine.batch import LayerCache, TokenBatch
from mla_backend.engine.config import ModelConfig
from mla_backend.engine.indexer import Indexer
from mla_backend.engine.mlp import MLP, MoE
from mla_backend.engine.rope import attention_scale, inverse_frequencies, rotate, rotation_scale, rotations_of
from mla_backend.engine.sparse import KernelAttention, SparseAttention
from mla_backend.engine.step import EngineStep, Selection
from mla_backend.engine.weights import Checkpoint, load_weights

LATENT_NORM_EPS = 1e-6
"""Of the norms inside of attention, whatever rms_norm_eps says of the others; as in transformers."""


class RMSNorm(nn.Module):
    """`[..., size]` over its root mean square, in fp32."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Multi-head latent attention, absorbed: all heads attend to one latent vector a token, and only that is cached.

    A key of a head would be `latent @ w_key`, a value `latent @ w_value`. Absorbed, `w_key` is applied to the query
    instead of to every key, and `w_value` to the sum of latent vectors instead of to each of them.
    """

    def __init__(self, config: ModelConfig, layer: int, dtype: torch.dtype, sparse: SparseAttention):
        super().__init__()
        self.config, self.sparse, self.scale = config, sparse, attention_scale(config)
        self.q_a_proj = nn.Linear(config.hidden_size, config.q_lora_rank, bias=False, dtype=dtype)
        self.q_a_layernorm = RMSNorm(config.q_lora_rank, LATENT_NORM_EPS, dtype)
        self.q_b_proj = nn.Linear(config.q_lora_rank, config.heads * config.query_dim, bias=False, dtype=dtype)
        cached = config.latent_dim + config.rope_dim
        self.cached_end = config.q_lora_rank + cached
        self.kv_a_proj_with_mqa = nn.Linear(config.hidden_size, cached, bias=False, dtype=dtype)
        self.kv_a_layernorm = RMSNorm(config.latent_dim, LATENT_NORM_EPS, dtype)
        expanded = config.heads * (config.nope_dim + config.value_dim)
        self.kv_b_proj = nn.Linear(config.latent_dim, expanded, bias=False, dtype=dtype)
        self.o_proj = nn.Linear(config.heads * config.value_dim, config.hidden_size, bias=False, dtype=dtype)
        self.indexer = None if config.shares_selection[layer] else Indexer(config, dtype)
        self.from_hidden: Tensor | None = None
        self.w_key: Tensor | None = None
        self.w_value: Tensor | None = None

    def merge(self) -> None:
        """Rearranges the loaded weights for larger products. Has to be called once, before the first forward pass.

        `from_hidden` joins the projections of the hidden states: `q_a_proj`, `kv_a_proj_with_mqa` and the indexer's
        `wk`. `kv_b_proj` is split into `w_key` `[H, nope_dim, 512]` and `w_value` `[H, 512, value_dim]`.
        """
        together = [self.q_a_proj, self.kv_a_proj_with_mqa, *([] if self.indexer is None else [self.indexer.wk])]
        self.from_hidden = torch.cat([projection.weight for projection in together])
        self.q_a_proj = self.kv_a_proj_with_mqa = None
        if self.indexer is not None:
            self.indexer.wk = None
        per_head = self.kv_b_proj.weight.unflatten(0, (self.config.heads, -1))
        w_key, w_value = per_head.split([self.config.nope_dim, self.config.value_dim], dim=1)
        self.w_key, self.w_value = w_key.contiguous(), w_value.transpose(1, 2).contiguous()
        self.kv_b_proj = None

    def forward(
        self, hidden: Tensor, residual: Tensor, step: EngineStep, cache: LayerCache, selection: Selection | None
    ) -> Selection:
        """Adds attention over hidden, the normed residual, to the residual `[T, hidden_size]` in place.

        Returns:
            What was attended to, for layers that share it.
        """
        config = self.config
        projected = functional.linear(hidden, self.from_hidden)
        q_latent, kv_c, k_rope, raw_keys = projected.tensor_split(
            (config.q_lora_rank, config.q_lora_rank + config.latent_dim, self.cached_end), dim=-1
        )
        q_latent = self.q_a_layernorm(q_latent)
        q_nope, q_rope = (
            self.q_b_proj(q_latent)
            .unflatten(-1, (config.heads, config.query_dim))
            .split([config.nope_dim, config.rope_dim], dim=-1)
        )
        # the key is one more head here, so that all are rotated at once
        ropes = torch.cat([q_rope, k_rope.unsqueeze(1)], dim=1)
        ropes = rotate(ropes, step.rotations.unsqueeze(1), hidden.dtype, interleaved=True)
        self.sparse.write(self.kv_a_layernorm(kv_c), ropes[:, -1], cache.latent, step.batch.slots)
        if self.indexer is not None:
            selection = self.indexer(hidden, q_latent, raw_keys, step, cache.keys)

        q = (q_nope.transpose(0, 1) @ self.w_key).transpose(0, 1), ropes[:, :-1]
        out = self.sparse.attend(q, cache.latent, *selection, self.scale, step.plan)  # [T, H, 512]
        values = out.new_empty(len(out), config.heads, config.value_dim)
        torch.bmm(out.transpose(0, 1), self.w_value, out=values.transpose(0, 1))
        residual.addmm_(values.flatten(1), self.o_proj.weight.t())
        return selection


class Layer(nn.Module):
    """Attention and then an MLP or experts, each added to its input."""

    def __init__(
        self, config: ModelConfig, layer: int, dtype: torch.dtype, sparse: SparseAttention, batch_invariant: bool
    ):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps, dtype)
        self.self_attn = Attention(config, layer, dtype, sparse)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps, dtype)
        self.mlp = (
            MoE(config, dtype, batch_invariant)
            if config.is_moe[layer]
            else MLP(config.hidden_size, config.mlp_size, dtype)
        )

    def merge(self) -> None:
        """Rearranges the loaded weights. Has to be called once, before the first forward pass."""
        self.self_attn.merge()
        self.mlp.merge()

    def forward(self, residual: Tensor, step: EngineStep, cache: LayerCache, selection: Selection | None) -> Selection:
        """Adds to the residual `[T, hidden_size]` in place."""
        selection = self.self_attn(self.input_layernorm(residual), residual, step, cache, selection)
        self.mlp(self.post_attention_layernorm(residual), residual)
        return selection


class Decoder(nn.Module):
    """The layers between token ids and the last hidden states."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, sparse: SparseAttention, batch_invariant: bool):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
        self.layers = nn.ModuleList(Layer(config, i, dtype, sparse, batch_invariant) for i in range(config.layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, dtype)


class Model(nn.Module):
    """A causal language model. Its parameters are uninitialised until `load_weights` has filled them.

    Args:
        config: its shape.
        dtype: what it computes in. Routing and the indexer's scores are always fp32.
        sparse: how it attends; by default with the ops of the library.
        batch_invariant: give a token the same bits whatever else is in the batch. Holds as long as all batches have the
            same number of requests with one token each, which `Runner` sees to. Slower.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        sparse: SparseAttention | None = None,
        batch_invariant: bool = False,
    ):
        super().__init__()
        self.config, self.batch_invariant = config, batch_invariant
        self.sparse = KernelAttention(batch_invariant) if sparse is None else sparse
        self.model = Decoder(config, dtype, self.sparse, batch_invariant)
        self._frequencies: Tensor | None = None
        self.lm_head = None
        if not config.tied_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype)

    @torch.inference_mode()
    def forward(
        self, token_ids: Tensor, positions: Tensor, batch: TokenBatch, caches: list[LayerCache], widen: bool = True
    ) -> Tensor:
        """One step of all requests of a batch: their tokens are written to the caches and attend to their contexts.

        Args:
            token_ids: int64 `[T]`.
            positions: int64 `[T]`, each token's position in its request.
            batch: where the tokens belong.
            caches: one a layer, as `new_caches` makes them.
            widen: return fp32; False leaves logits in the dtype of the model, for callers that convert them anyway.

        Returns:
            Logits fp32 `[N, vocab_size]` of the tokens `batch.logits_at`.
        """
        if len(caches) != self.config.layers:
            raise ValueError(f"caches must be {self.config.layers}, one a layer; got {len(caches)}")
        tokens = (len(batch.slots),)
        if token_ids.shape != tokens or positions.shape != tokens:
            raise ValueError(
                f"token_ids and positions must be [T={tokens[0]}] as slots of batch is; "
                f"got {list(token_ids.shape)} and {list(positions.shape)}"
            )
        if not len(token_ids):
            return torch.empty(0, self.config.vocab_size, device=token_ids.device)
        hidden = self.model.embed_tokens(token_ids)
        step, selection = self._step(positions, batch, caches), None
        for layer, cache in zip(self.model.layers, caches, strict=True):
            selection = layer(hidden, step, cache, selection)
        hidden = self.model.norm(hidden[batch.logits_at])
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        logits = functional.linear(hidden, head.weight)
        return logits.float() if widen else logits

    def _step(self, positions: Tensor, batch: TokenBatch, caches: list[LayerCache]) -> EngineStep:
        config = self.config
        if self._frequencies is None or self._frequencies.device != positions.device:
            self._frequencies = inverse_frequencies(config, positions.device)
        step = EngineStep(
            batch,
            positions,
            rotations_of(positions.unsqueeze(1) * self._frequencies, rotation_scale(config.yarn)),
            topk=config.index_topk,
            block_size=caches[0].latent.shape[1],
        )
        topk = min(config.index_topk, step.longest)
        step.plan = self.sparse.plan(step.lengths.clamp(max=topk), topk, config.heads)
        return step


def load_model(
    folder: str | Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    sparse: SparseAttention | None = None,
    batch_invariant: bool = False,
) -> Model:
    """The model of a checkpoint: `config.json` and safetensors, in the Hugging Face layout.

    Args:
        folder: where they are.
        dtype: what the model computes in, and what weights are kept as.
        device: where it runs.
        sparse: how it attends; by default with the ops of the library.
        batch_invariant: as for `Model`.
    """
    config = ModelConfig.from_folder(folder)
    with torch.device("meta"):  # nothing is allocated before the weights are read
        model = Model(config, dtype, sparse, batch_invariant)
    load_weights(model, Checkpoint(folder, config.weight_block), config.layers, device)
    for layer in model.model.layers:
        layer.merge()
    return model.eval()
