"""The engine's models compute what transformers' do: the same tokens, however the work is cut."""

from pathlib import Path

import pytest
import torch
from torch import nn

import engine_models
from engine_models import MODELS, TOPK, Engine, prompt_of
from mla_backend.engine import ExactAttention, TokenBatch, load_model, new_caches
from mla_backend.engine.mlp import MoE

PROMPT = 3 * TOPK + 4
NEW_TOKENS = 33  # of the prefill, and of 32 decode steps
EXACT = {"cpu": 1e-4, "cuda": 5e-4}
"""Of logits that spread by 1: what fp32 sums in another order may differ by. On CPUs 2e-5 was seen. A GPU has sines and
powers of its own too, while the reference is computed on the CPU always."""
BOUNDS = {"bf16": (0.02, 0.15), "fp8_ds_mla": (0.1, 0.7)}
"""Of such logits after four layers of a smooth model: root mean square and largest error. Half of them were seen."""
SMOOTH = [name for name in MODELS if name.endswith("smooth")]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory):
    """Of a name in MODELS: transformers' model and a folder with its checkpoint, made once."""
    made: dict[str, tuple[nn.Module, Path]] = {}

    def get(name: str) -> tuple[nn.Module, Path]:
        if name not in made:
            torch.manual_seed(0)
            theirs = engine_models.theirs(name)
            made[name] = theirs, engine_models.save(theirs, tmp_path_factory.mktemp(name))
        return made[name]

    return get


@pytest.fixture
def load(checkpoints, device):
    """Of a name in MODELS: our model, in fp32 unless said otherwise."""
    return lambda name, dtype=torch.float32, **options: load_model(
        checkpoints(name)[1], dtype=dtype, device=device, **options
    )


@pytest.fixture
def exact(load):
    """Of a name in MODELS: an engine that attends exactly."""
    return lambda name: Engine(load(name, sparse=ExactAttention()), "fp32", "fp32")


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_tokens_are_those_of_transformers(name, checkpoints, exact, device):
    prompt = prompt_of(PROMPT)
    tokens, logits = engine_models.their_generation(checkpoints(name)[0], prompt, NEW_TOKENS)
    ours = exact(name).generate([prompt], NEW_TOKENS)[0]
    assert ours.generated == tokens
    # it is a test only if there is something to get wrong
    assert logits.std() > 0.5 and len(set(tokens)) > NEW_TOKENS / 2
    torch.testing.assert_close(ours.logits, logits, atol=EXACT[device], rtol=0)


@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa_shared"])
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_prompts_in_chunks_give_the_same(name, chunk, exact, device):
    prompt = prompt_of(PROMPT)
    whole = exact(name).generate([prompt], 10)[0]
    cut = exact(name).generate([prompt], 10, chunk)[0]
    assert cut.generated == whole.generated
    torch.testing.assert_close(cut.logits, whole.logits, atol=EXACT[device], rtol=0)


@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa_shared"])
def test_prompts_in_a_batch_give_what_they_give_alone(name, exact, device):
    # with chunks of 20 some decode while others prefill; contexts below, around and above the top-k. With these seeds
    # no choice of a token or an expert is closer than 4e-5, so that no rounding flips one
    prompts = [prompt_of(length, seed=7000 + length) for length in (1, 20, TOPK - 1, TOPK, TOPK + 1, 100)]
    together = exact(name).generate(prompts, 10, chunk=20)
    for prompt, ours in zip(prompts, together, strict=True):
        alone = exact(name).generate([prompt], 10)[0]
        assert ours.generated == alone.generated
        torch.testing.assert_close(ours.logits, alone.logits, atol=EXACT[device], rtol=0)


@pytest.mark.parametrize("name", SMOOTH)
@pytest.mark.parametrize("latent", BOUNDS)
@pytest.mark.parametrize("chunk", [7, PROMPT])
def test_kernels_stay_within_bounds(name, latent, chunk, checkpoints, load):
    theirs = checkpoints(name)[0]
    prompts = [prompt_of(PROMPT), prompt_of(2 * TOPK + 1, seed=1)]
    wanted = [engine_models.their_generation(theirs, prompt, NEW_TOKENS) for prompt in prompts]
    engine = Engine(load(name), latent, "fp32")
    typical, largest = BOUNDS[latent]
    for ours, (tokens, logits) in zip(
        engine.generate(prompts, NEW_TOKENS, chunk, [tokens for tokens, _ in wanted]), wanted, strict=True
    ):
        error = ours.logits - logits
        assert error.square().mean().sqrt() <= typical and error.abs().max() <= largest
        best_two = logits.topk(2).values
        sure = best_two[:, 0] - best_two[:, 1] > 2 * largest
        assert sure.any() or latent != "bf16"
        assert torch.equal(ours.logits[sure].argmax(-1), torch.tensor(tokens)[sure])


@pytest.mark.parametrize("name", SMOOTH)
def test_models_compute_in_bf16(name, checkpoints, load):
    prompt = prompt_of(TOPK)  # all of it is selected, whatever rounding does to the indexer
    logits = engine_models.their_generation(checkpoints(name)[0], prompt, 1)[1]
    ours = Engine(load(name, torch.bfloat16), "fp8_ds_mla", "fp8").generate([prompt], 1)[0]
    assert (ours.logits - logits).square().mean().sqrt() <= 0.15


@pytest.mark.parametrize("keys, overlap", [("fp32", 1.0), ("bf16", 0.97), ("fp8", 0.9)])
@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa"])
def test_keys_of_fewer_bits_select_mostly_the_same(name, keys, overlap, load):
    prompt = prompt_of(PROMPT)

    def selected(keys: str) -> torch.Tensor:
        engine = Engine(load(name), "bf16", keys)
        engine.free = list(range(len(engine.free)))
        found = []
        engine.model.model.layers[0].self_attn.indexer.register_forward_hook(lambda *call: found.append(call[-1]))
        engine.generate([prompt], 1)
        slots, lengths = (tensor.cpu() for tensor in found[0])
        assert torch.equal(lengths, torch.arange(1, PROMPT + 1).clamp(max=TOPK).int())
        return slots[TOPK:]

    same = (selected(keys).unsqueeze(2) == selected("fp32").unsqueeze(1)).any(2).float().mean()
    assert same >= overlap


def test_dense_experts_give_what_grouped_ones_give(load, monkeypatch):
    moe = load("deepseek_v32_no_yarn", torch.bfloat16).model.layers[1].mlp
    x, added = torch.randn(20, engine_models.SHAPE["hidden_size"]).bfloat16().to(moe.gate.weight.device), []
    for way in (True, False):
        monkeypatch.setattr(MoE, "_dense_pays", lambda self, x, way=way: way)
        added.append(torch.zeros_like(x))
        with torch.inference_mode():
            moe(x, added[-1])
    assert added[1].float().std() > 0.1
    torch.testing.assert_close(*added, atol=0.02, rtol=0.02)  # bf16: activations or results are rounded


def test_a_token_without_a_slot_is_not_cached(checkpoints):
    model = load_model(checkpoints("deepseek_v32")[1], dtype=torch.float32)
    for keys in ("fp32", "fp8"):
        caches = new_caches(model.config, blocks=2, block_size=4, latent="bf16", keys=keys)
        batch = TokenBatch(torch.tensor([[0]], dtype=torch.int32), torch.tensor([0, -1]), [2], [2], torch.tensor([0]))
        model(torch.tensor([5, 6]), torch.tensor([0, 1]), batch, caches)
        for cache in caches:
            assert cache.latent[0, 0].any() and not cache.latent[0, 1:].any() and not cache.latent[1].any()
            assert cache.keys.view(torch.uint8)[0].any() and not cache.keys.view(torch.uint8)[1].any()


def test_an_empty_batch_gives_no_logits(checkpoints):
    model = load_model(checkpoints("deepseek_v32")[1])
    nothing = torch.empty(0, dtype=torch.int64)
    batch = TokenBatch(torch.empty(0, 0, dtype=torch.int32), nothing, [], [], nothing)
    assert model(nothing, nothing, batch, new_caches(model.config, 1)).shape == (0, model.config.vocab_size)


def test_wrong_arguments_are_named(checkpoints):
    model = load_model(checkpoints("deepseek_v32")[1], dtype=torch.float32)
    table, slots, at = torch.tensor([[0]], dtype=torch.int32), torch.tensor([0, 1]), torch.tensor([1])
    with pytest.raises(ValueError, match="token_counts must be 1 numbers"):
        TokenBatch(table, slots, [1], [2], at)
    with pytest.raises(ValueError, match="context_lengths must be 1 numbers"):
        TokenBatch(table, slots, [2], [1], at)
    with pytest.raises(ValueError, match="latent must be one of bf16, fp8_ds_mla, nvfp4_352, fp32; got 'fp8'"):
        new_caches(model.config, 1, latent="fp8")
    with pytest.raises(ValueError, match="keys must be one of bf16, fp8, mxfp4_68, fp32; got 'int8'"):
        new_caches(model.config, 1, keys="int8")
    caches = new_caches(model.config, 1)
    batch = TokenBatch(table, slots, [2], [2], at)
    with pytest.raises(ValueError, match="caches must be 4, one a layer; got 1"):
        model(slots, slots, batch, caches[:1])
    with pytest.raises(ValueError, match=r"token_ids and positions must be \[T=2\]"):
        model(slots[:1], slots, batch, caches)
