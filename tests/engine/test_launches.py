"""How many operations a decode step is: on a GPU each is a launch of a microsecond or two, whatever it computes."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import engine_models
from engine_models import TOPK
from mla_backend.engine import Batch, Model, load_model, new_caches
from mla_backend.engine.mlp import MoE

MOST = {"MLP": 36, "MoE": 50}
"""Of a layer, where nobody has to choose; 34 and 47 were counted. Both kinds have 4 norms, 5 products, the attention
and its cache's write, 4 launches that rotate, and 15 that norm, rotate, quantise and write the indexer's keys. Then an
MLP is 4, and experts are 17, of which 12 choose among them and weight them. What is above the counts is room for
torch's own changes. 10 launches more in each of 61 layers would make a step 1 ms longer."""
TOKENS, BLOCKS, BLOCK_SIZE = 8, 64, 16


class Launches(TorchDispatchMode):
    """Counts the operations that compute something: not views, and not the memory that results are put into."""

    def __init__(self):
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        memory = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        fresh = any(x.untyped_storage().data_ptr() not in memory for x in tree_leaves(result) if torch.is_tensor(x))
        if function._schema.is_mutable or (fresh and "empty" not in str(function)):
            self.counts[str(function)] += 1
        return result


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory):
    """Models of two and three layers, the first of which has an MLP and the others experts, or all an MLP."""

    def new(name: str, layers: int, dense: int) -> Model:
        torch.manual_seed(0)
        shape = dict(num_hidden_layers=layers, first_k_dense_replace=dense, n_group=1, topk_group=1)
        folder: Path = tmp_path_factory.mktemp(name)
        return load_model(engine_models.save(engine_models.theirs("deepseek_v32", **shape), folder))

    return {
        "MLP": (new("two_dense", 2, 2), new("three_dense", 3, 3)),
        "MoE": (new("two", 2, 1), new("three", 3, 1)),
    }


def launches(model: Model, context: int) -> Counter[str]:
    """Of a step in which requests of this length decode, as a GPU computes it."""
    caches = new_caches(model.config, BLOCKS, BLOCK_SIZE)
    each = BLOCKS // TOKENS
    batch = Batch(
        block_table=torch.arange(BLOCKS, dtype=torch.int32).view(TOKENS, each),
        slots=torch.arange(TOKENS) * each * BLOCK_SIZE + context - 1,
        token_counts=[1] * TOKENS,
        context_lengths=[context] * TOKENS,
        logits_at=torch.arange(TOKENS),
        keeps_some=True,
    )
    with Launches() as counted:
        model(torch.arange(TOKENS), torch.full((TOKENS,), context - 1), batch, caches)
    return counted.counts


@pytest.mark.parametrize("kind", MOST)
def test_a_layer_is_few_launches(kind, models, monkeypatch):
    monkeypatch.setattr(MoE, "_dense_pays", lambda self, x: True)
    fewer, more = (launches(model, TOPK) for model in models[kind])
    layer = more - fewer
    assert 20 < layer.total() <= MOST[kind], layer
    assert not fewer - more


def test_what_layers_share_is_computed_once(models):
    fewer, more = (launches(model, TOPK) for model in models["MLP"])
    for shared in ("mla_backend.convert_indices.default", "mla_backend.plan.default", "aten.polar.default"):
        assert fewer[shared] == more[shared] == 1


def test_scoring_is_left_out_where_everything_is_taken(models):
    short, long = (launches(models["MLP"][0], context) for context in (TOPK, TOPK + 1))
    scoring = {"mla_backend.index_scores.default", "mla_backend.select_top.default"}
    assert scoring <= long.keys() and not scoring & short.keys()
    assert short["aten.linear.default"] < long["aten.linear.default"]


def test_choosing_is_few_launches(models):
    """Of a layer: the queries' product and 5 that rotate them, the weights' and 2 around it, scores, selection and
    slots."""
    fewer, more = (launches(model, TOPK + 1) - launches(model, TOPK) for model in models["MLP"])
    assert 5 < (more - fewer).total() <= 14, more - fewer


def test_dense_experts_give_what_grouped_ones_give(models, monkeypatch):
    moe, x = models["MoE"][0].model.layers[1].mlp, torch.randn(20, engine_models.SHAPE["hidden_size"]).bfloat16()
    added = []
    for way in (True, False):
        monkeypatch.setattr(MoE, "_dense_pays", lambda self, x, way=way: way)
        residual = torch.zeros_like(x)
        with torch.inference_mode():
            moe(x, residual)
        added.append(residual)
    assert added[1].float().std() > 0.1
    torch.testing.assert_close(*added, atol=0.02, rtol=0.02)  # bf16: activations or results are rounded
