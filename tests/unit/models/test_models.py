"""Models beyond parity with transformers: masks, recomputation, dtypes, sizes."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from megatron01.config import BertDataConfig, BertPretrainConfig
from megatron01.cost.memory import model_without_memory
from megatron01.data.bert import model_batch
from megatron01.errors import UserError
from megatron01.models import GPT2, Bert, layers, padded_vocab_size
from megatron01.models.layers import (
    _CUDNN_SINCE,
    MLP,
    SelfAttention,
    compile_layers,
    fusible_exact_gelu,
    fusible_gelu,
    hashed_dropout,
)
from megatron01.pretraining import BERT
from megatron01.training.pretrain import _deterministic
from tests.tiers import slow_after
from tests.triton_setup import DEVICE

GELUS = pytest.mark.parametrize(("gelu", "form"), [(fusible_gelu, "tanh"), (fusible_exact_gelu, "none")])
KINDS = pytest.mark.parametrize("kind", ["gpt2", "post", "pre"])
PLACEMENTS = pytest.mark.parametrize("placement", ["post", "pre"])


def gradients(model: torch.nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def total_loss(model: GPT2 | Bert, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model.loss(**batch) if isinstance(model, GPT2) else sum(model.loss(batch).values())


@GELUS
def test_the_gelu_of_compiled_layers_is_torchs(gelu, form):
    values = torch.linspace(-15.0, 15.0, 100_001, device=DEVICE).requires_grad_()
    exact = values.detach().double().requires_grad_()
    ours, expected = gelu(values), F.gelu(exact, approximate=form)
    assert (ours - expected).abs().max() < 1e-6
    (gradient,), (its_expected,) = (torch.autograd.grad(y.sum(), x) for y, x in ((ours, values), (expected, exact)))
    assert (gradient - its_expected).abs().max() < 3e-6
    narrow = values.detach().bfloat16().requires_grad_()
    output = gelu(narrow)
    assert output.dtype == narrow.dtype == torch.autograd.grad(output.sum(), narrow)[0].dtype


@pytest.mark.parametrize("kind", ["gpt2", "post"])
def test_gelus_for_compiled_layers_keep_their_gradients_when_compiled(model_and_batch, kind):
    model, batch = model_and_batch(kind)
    plain = gradients(model, total_loss(model, batch))
    for module in model.modules():
        if isinstance(module, MLP):
            module.gelu = fusible_gelu if kind == "gpt2" else fusible_exact_gelu
    compile_layers(model, backend="aot_eager")
    for name, gradient in gradients(model, total_loss(model, batch)).items():
        torch.testing.assert_close(gradient, plain[name], rtol=1e-4, atol=1e-6)


@KINDS
@pytest.mark.parametrize(("dropout", "is_hashed"), [(0.0, False), (0.3, False), (0.3, True)])
def test_recomputed_activations_give_the_same_gradients(model_and_batch, kind, dropout, is_hashed):
    results = []
    for recompute in ("none", "full", "selective"):
        changes = {"recompute_activations": recompute, "hidden_dropout": dropout, "attention_dropout": dropout}
        model, batch = model_and_batch(kind, **changes)
        model.transformer.hashes_dropout = is_hashed
        torch.manual_seed(3)
        loss = total_loss(model, batch)
        result = gradients(model, loss) | {"loss": loss.detach()}
        result["random state afterwards"] = torch.get_rng_state()
        results.append(result)
    for name, expected in results[0].items():
        assert all(torch.equal(result[name], expected) for result in results[1:]), name


@pytest.mark.parametrize("which", ["hidden_dropout", "attention_dropout"])
def test_embeddings_have_the_dropout_of_hidden_states(gpt_config, gpt_batch, which):
    model = GPT2(gpt_config(**{which: 0.5}), 53)
    assert bool(model.embedding(gpt_batch()["tokens"]).eq(0).any()) == (which == "hidden_dropout")


def test_dropout_is_active_in_training_only(gpt_config, gpt_batch):
    model = GPT2(gpt_config(hidden_dropout=0.5, attention_dropout=0.5), 53)
    tokens = gpt_batch()["tokens"]
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def new_key() -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, (2,), dtype=torch.int32)


def deviations(shares: torch.Tensor | float, probability: float, count: int) -> torch.Tensor:
    """How far shares of ``count`` independent events are from their probability, in standard deviations."""
    return (torch.as_tensor(shares) - probability) / (probability * (1 - probability) / count) ** 0.5


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_hashed_dropout(probability):
    """Elements are dropped with the probability, independently of neighbors, of the key before and of one near it."""
    torch.manual_seed(5)
    values = torch.ones(64, 64, 64)
    keys = [new_key() for _ in range(20)]
    keys += [key + torch.tensor([0, 1], dtype=torch.int32) for key in keys]
    dropped = torch.stack([hashed_dropout(values, probability, key).flatten() == 0 for key in keys])
    count, both = values.numel(), probability**2
    assert deviations(dropped.float().mean(1), probability, count).abs().max() < 5
    for lag in (1, 2, 31, 32, 64, 4096):
        pairs = (dropped[:, lag:] & dropped[:, :-lag]).float().mean(1)
        assert deviations(pairs, both, count - lag).abs().max() < 5, lag
    for one, other in ((dropped[:-1], dropped[1:]), (dropped[:20], dropped[20:])):
        assert deviations((one & other).float().mean(1), both, count).abs().max() < 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hashed_dropout_scales_and_has_the_gradient_of_its_mask(dtype):
    values = torch.randn(3, 5, 7).to(dtype).requires_grad_()
    key = new_key()
    output = hashed_dropout(values, 0.25, key)
    assert output.dtype == dtype and 0 < output.count_nonzero() < output.numel()
    torch.testing.assert_close(output, torch.where(output == 0, 0.0, values / 0.75))
    (gradient,) = torch.autograd.grad(output.sum(), values)
    torch.testing.assert_close(gradient, torch.where(output == 0, 0.0, torch.full_like(values, 1 / 0.75)))
    assert torch.equal(output, hashed_dropout(values, 0.25, key))
    assert not torch.equal(output, hashed_dropout(values, 0.25, key.flip(0)))  # both words count


def test_keys_of_dropout_are_new_in_each_pass_and_layer(gpt_config, gpt_batch):
    """They are drawn from torch's generator, and only in training."""
    model = GPT2(gpt_config(hidden_dropout=0.3), 53)
    model.transformer.hashes_dropout = True
    seen = []
    for layer in model.transformer.layers:
        layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[4]))
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        model.loss(**gpt_batch())
        model.loss(**gpt_batch())
    keys = torch.cat(seen).view(3, -1, 2)
    assert torch.equal(keys[0], keys[1])
    assert len(keys[[0, 2]].view(-1, 2).unique(dim=0)) == 2 * keys.shape[1]
    model.eval()
    before = torch.get_rng_state()
    assert torch.equal(model.loss(**gpt_batch()), model.loss(**gpt_batch()))
    assert torch.equal(torch.get_rng_state(), before)


@KINDS
def test_both_dropouts_of_a_layer_have_keys_of_their_own(model_and_batch, kind):
    model, batch = model_and_batch(kind, hidden_dropout=0.3)
    model.transformer.hashes_dropout = True
    with patch.object(layers, "hashed_dropout", side_effect=hashed_dropout) as hashed:
        total_loss(model, batch)
    keys = torch.stack([call.kwargs["key"] for call in hashed.call_args_list])
    assert len(keys.unique(dim=0)) == len(keys) == 2 * len(model.transformer.layers)


def test_hashed_dropout_follows_each_layers_own(gpt_config, gpt_batch):
    """A user may put layers, or their dropout alone, into evaluation mode; without dropout nothing is hashed."""
    model = GPT2(gpt_config(hidden_dropout=0.3), 53)
    model.transformer.hashes_dropout = True
    model.embedding.eval()
    model.transformer.layers[0].eval()
    assert not torch.equal(model.loss(**gpt_batch()), model.loss(**gpt_batch()))
    model.transformer.layers[1].dropout.eval()
    assert torch.equal(model.loss(**gpt_batch()), model.loss(**gpt_batch()))
    model = GPT2(gpt_config(hidden_dropout=0.0), 53)
    model.transformer.hashes_dropout = True
    with patch.object(layers, "hashed_dropout", side_effect=AssertionError):
        model.loss(**gpt_batch())


def test_gpt2_is_causal(gpt_config, gpt_batch):
    model = GPT2(gpt_config(), 53)
    tokens = gpt_batch()["tokens"]
    changed = tokens.clone()
    changed[:, 6] = (changed[:, 6] + 1) % 53
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :6], after[:, :6])
    assert not torch.allclose(before[:, 6:], after[:, 6:])


def test_gpt2_loss_mask(gpt_config, gpt_batch):
    model = GPT2(gpt_config(), 53)
    batch = gpt_batch()
    expected = F.cross_entropy(model(batch["tokens"]).transpose(1, 2), batch["labels"], reduction="none")
    kept = expected[batch["loss_mask"] == 1].mean()
    torch.testing.assert_close(model.loss(**batch), kept, rtol=1e-5, atol=1e-6)
    nothing = model.loss(**(batch | {"loss_mask": torch.zeros_like(batch["loss_mask"])}))
    assert nothing.item() == 0
    assert all(gradient.eq(0).all() for gradient in gradients(model, nothing).values())


@PLACEMENTS
def test_bert_gathering_before_the_head_equals_the_dense_loss(model_and_batch, placement):
    model, batch = model_and_batch(placement)
    losses = model.loss(batch)
    gathered = gradients(model, sum(losses.values()))

    output = model(batch["text"], batch["types"], batch["padding_mask"])
    lm_loss = F.cross_entropy(output.lm_logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-1)
    sentence_loss = F.cross_entropy(output.sentence_logits, batch["is_random"])
    torch.testing.assert_close(losses["lm_loss"], lm_loss)
    torch.testing.assert_close(losses["sentence_loss"], sentence_loss)
    for name, gradient in gradients(model, lm_loss + sentence_loss).items():
        torch.testing.assert_close(gathered[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


@PLACEMENTS
def test_bert_ignores_what_stands_in_the_padding(model_and_batch, placement):
    model, batch = model_and_batch(placement)
    padding = batch["padding_mask"] == 0
    assert padding.any()
    changed = batch | {"text": batch["text"].masked_fill(padding, 7), "types": batch["types"].masked_fill(padding, 1)}
    assert {k: v.item() for k, v in model.loss(batch).items()} == {k: v.item() for k, v in model.loss(changed).items()}
    # a shorter batch without that padding gives the same loss
    length = int(batch["padding_mask"][1:].sum(1).max())
    assert length < batch["text"].shape[1]
    rows = {key: value[1:] for key, value in batch.items()}
    short = {key: value[:, :length] if value.ndim == 2 else value for key, value in rows.items()}
    torch.testing.assert_close(model.loss(short), model.loss(rows))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bert_without_a_masked_token(bert_config, bert_batch, dtype):
    model = Bert(bert_config(), 53, binary_head=False).to(dtype)
    batch = bert_batch()
    batch |= {"labels": torch.full_like(batch["labels"], -1), "loss_mask": torch.zeros_like(batch["loss_mask"])}
    loss = model.loss(batch)["lm_loss"]
    assert loss.item() == 0 and loss.dtype == torch.float32
    assert all(gradient.eq(0).all() for gradient in gradients(model, loss).values())


def as_trained(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The batch as the loader yields it."""
    return {
        name: torch.from_numpy(value) for name, value in model_batch({k: v.numpy() for k, v in batch.items()}).items()
    }


@pytest.mark.parametrize("collate", [dict, as_trained])
def test_bert_with_a_sequence_of_nothing_but_padding(model_and_batch, collate):
    model, batch = model_and_batch("post")
    batch["padding_mask"][2] = 0
    losses = model.loss(collate(batch))
    assert all(loss.isfinite() for loss in losses.values())
    assert all(gradient.isfinite().all() for gradient in gradients(model, sum(losses.values())).values())


@PLACEMENTS
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
@pytest.mark.parametrize("has_padding", [True, False])
def test_bert_without_its_padding_is_the_same(model_and_batch, placement, recompute, has_padding):
    model, batch = model_and_batch(placement, recompute_activations=recompute)
    if not has_padding:
        batch["padding_mask"] = torch.ones_like(batch["padding_mask"])
    collated = as_trained(batch)
    num_rows = []
    model.transformer.layers[0].mlp.register_forward_pre_hook(
        lambda _, inputs: num_rows.append(inputs[0].shape[:-1].numel())
    )
    expected, losses = model.loss(batch), model.loss(collated)
    assert num_rows == [batch["text"].numel(), batch["padding_mask"].sum()]
    assert ("padding_mask" in collated) == has_padding
    for name, loss in losses.items():
        torch.testing.assert_close(loss, expected[name])
    found = gradients(model, sum(losses.values()))
    for name, gradient in gradients(model, sum(expected.values())).items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_a_second_derivative_with_selective_recomputation_is_refused(model_and_batch, recompute):
    model, batch = model_and_batch("gpt2", recompute_activations=recompute)
    with sdpa_kernel(SDPBackend.MATH):  # others have no second derivative
        loss = model(batch["tokens"]).square().mean()
        refused = nullcontext() if recompute == "none" else pytest.raises(UserError, match="differentiated again")
        with refused:
            torch.autograd.grad(loss, list(model.parameters()), create_graph=True, allow_unused=True)


def test_parts_of_a_value_and_other_layouts_of_it_are_not_computed_again():
    """What the function returns would be taken for a part of it, or for its transpose."""
    values = torch.randn(4, 4, requires_grad=True)
    found = []
    for enabled in (False, True):
        value = torch.sin(values)
        with layers.computed_again(value, torch.sin, values, enabled=enabled):
            outputs = (value.square(), value[1:].square(), value.t() ** 3)
        found.append([torch.autograd.grad(output.sum(), values, retain_graph=True)[0] for output in outputs])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


class Synchronizations(TorchDispatchMode):
    """Counts operations that make the host wait for a GPU (host syncs)."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        waits = (torch.ops.aten.nonzero, torch.ops.aten._local_scalar_dense, torch.ops.aten.masked_select)
        self.count += func.overloadpacket in waits
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_the_host_waits_for_nothing_in_a_pass(model_and_batch, recompute):
    for kind, collate in (("gpt2", dict), ("post", as_trained)):
        model, batch = model_and_batch(kind, recompute_activations=recompute)
        batch = collate(batch)
        with Synchronizations() as waited, torch.autograd.set_multithreading_enabled(False):
            total_loss(model, batch).backward()
        assert waited.count == 0, model


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@KINDS
def test_sixteen_bit_parameters(model_and_batch, kind, dtype):
    model, batch = model_and_batch(kind, attention_dropout=0.1)
    model.eval()
    expected = total_loss(model, batch).item()
    model.to(dtype)
    loss = total_loss(model, batch)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected, rel=0.02)
    for name, gradient in gradients(model.train(), total_loss(model, batch)).items():
        assert gradient.dtype == dtype and gradient.isfinite().all(), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@KINDS
@pytest.mark.parametrize("rows_of_a_chunk", [5, 1000])
def test_autocast(model_and_batch, kind, dtype, rows_of_a_chunk):
    """In a loop of somebody's own, which keeps fp32 weights."""
    model, batch = model_and_batch(kind)
    model.token_loss.chunk_bytes = rows_of_a_chunk * 64 * 4
    expected_loss = total_loss(model, batch)
    expected = gradients(model, expected_loss)
    with torch.autocast("cpu", dtype):
        loss = total_loss(model, batch)
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(expected_loss.item(), rel=0.01)
    for name, gradient in gradients(model, loss).items():
        assert gradient.dtype == torch.float32
        if not name.endswith("query_key_value.bias"):  # the key's gradient is rounding noise
            assert (gradient - expected[name]).norm() < 0.05 * expected[name].norm(), name


def test_the_loss_of_a_model_without_memory(model_and_batch):
    model, batch = model_and_batch("gpt2")
    total_loss(model.to("meta"), {name: tensor.to("meta") for name, tensor in batch.items()}).backward()
    assert all(parameter.grad.is_meta for parameter in model.parameters())


@KINDS
def test_every_parameter_gets_a_gradient(model_and_batch, kind):
    """An unused parameter would have no gradient, which the optimizers' flat buffers do not expect."""
    model, batch = model_and_batch(kind)
    found = gradients(model, total_loss(model, batch))
    word_embeddings = found.pop("embedding.word_embeddings.weight")
    assert word_embeddings[53:].eq(0).all() and word_embeddings[:53].ne(0).any(1).all()
    assert all(gradient.ne(0).any() for name, gradient in found.items())


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_too_long_a_sequence(gpt_config, bert_config, gpt_batch, bert_batch, kind):
    with pytest.raises(UserError, match="sequence of 21 tokens is longer than max_position_embeddings 20"):
        if kind == "gpt2":
            GPT2(gpt_config(), 53).loss(**gpt_batch(seq_length=21))
        else:
            Bert(bert_config(), 53, binary_head=True).loss(bert_batch(seq_length=21))


def test_padded_vocab_size():
    assert [padded_vocab_size(size, 128) for size in (30522, 28996, 50257, 128, 1)] == [30592, 29056, 50304, 128, 128]
    assert padded_vocab_size(5000, 1) == 5000


def test_padding_the_vocabulary_changes_no_loss(gpt_config, gpt_batch):
    losses = [GPT2(gpt_config(make_vocab_size_divisible_by=size), 53).loss(**gpt_batch()) for size in (1, 16, 128)]
    torch.testing.assert_close(losses[1], losses[0])
    torch.testing.assert_close(losses[2], losses[0])


@pytest.mark.parametrize(
    ("num_layers", "hidden_size", "heads", "published"),
    [(12, 768, 12, 124e6), (24, 1024, 16, 355e6), (36, 1280, 20, 774e6), (48, 1600, 25, 1558e6)],
)
def test_published_parameter_counts(gpt_config, num_layers, hidden_size, heads, published):
    with torch.device("meta"):
        model = GPT2(
            gpt_config(
                num_layers=num_layers,
                hidden_size=hidden_size,
                num_attention_heads=heads,
                max_position_embeddings=1024,
                make_vocab_size_divisible_by=1,
            ),
            50257,
        )
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(published, rel=5e-3)


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_flops_are_those_of_the_matrix_products(gpt_config, bert_config, gpt_batch, bert_batch, kind):
    if kind == "gpt2":
        model, batch = GPT2(gpt_config(), 53), gpt_batch()
        num_tokens, length = 33, 11
    else:
        batch, length = bert_batch(), 13
        num_tokens = batch["text"].numel()
        share = (batch["labels"] >= 0).sum().item() / num_tokens
        model = Bert(bert_config(), 53, binary_head=False, masked_share=share)
    # FLOPs of the CPU's fused attention are not counted, those of the plain one are
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        total_loss(model, batch).backward()
    expected = num_tokens * model.flops_per_token(length)
    assert counter.get_total_flops() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("most", "share"), [(None, 0.4), (2, 0.2), (20, 0.4)])
def test_flops_follow_the_share_that_is_masked(bert_config, most, share):
    """In training and in plans."""
    data = BertDataConfig(seq_length=10, mask_prob=0.4, max_predictions_per_seq=most)
    config = BertPretrainConfig(model=bert_config(), data=data)
    trained, planned = BERT.build_model(config, SimpleNamespace(vocab_size=53)), model_without_memory(config)[0]
    assert trained.masked_share == planned.masked_share == share
    usual = Bert(bert_config(), 53, binary_head=True).flops_per_token(10)
    assert trained.flops_per_token(10) > usual


@pytest.mark.parametrize("kind", ["gpt2", *slow_after(0, ["post", "pre"])])
def test_compiled_layers(gpt_config, bert_config, gpt_batch, bert_batch, kind):
    """Same gradients as uncompiled, and one compilation for all layers and any number of tokens, also with a mask."""
    torch.compiler.reset()
    build = gpt_batch if kind == "gpt2" else lambda seed: as_trained(bert_batch(seed=seed))
    model = GPT2(gpt_config(), 53) if kind == "gpt2" else Bert(bert_config(norm_placement=kind), 53, binary_head=True)
    compiled, names = copy.deepcopy(model), list(model.state_dict())
    counter = CompileCounterWithBackend("aot_eager")
    assert compile_layers(compiled, backend=counter)
    for seed in range(3):
        expected = gradients(model, total_loss(model, build(seed=seed)))
        found = gradients(compiled, total_loss(compiled, build(seed=seed)))
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6, msg=name)
    assert counter.frame_count == 1 and list(compiled.state_dict()) == names


@pytest.mark.parametrize("recompute", slow_after(1, ["none", "full", "selective"]))
def test_gradients_of_compiled_layers_arrive_layer_by_layer(gpt_config, gpt_batch, recompute):
    """The gradients of a layer are ready before the backward pass of the layer below begins."""
    torch.compiler.reset()
    events = []

    def announced(graph, inputs):
        return make_boxed_func(lambda *values: (events.append("backward"), graph(*values))[1])

    backend = aot_autograd(fw_compiler=lambda graph, inputs: make_boxed_func(graph), bw_compiler=announced)
    dropout = {"hidden_dropout": 0.2, "attention_dropout": 0.2}
    eager, model = (GPT2(gpt_config(recompute_activations=recompute, **dropout), 53) for _ in range(2))
    compile_layers(model, backend=backend)
    for name, parameter in model.transformer.layers.named_parameters():
        layer = name.partition(".")[0]
        parameter.register_post_accumulate_grad_hook(lambda _, layer=layer: events.append(layer))
    results = []
    for one in (eager, model):
        torch.manual_seed(3)
        results.append(gradients(one, total_loss(one, gpt_batch())))
    assert events == ["backward", *["1"] * 12, "backward", *["0"] * 12]
    assert all(torch.equal(results[1][name], gradient) for name, gradient in results[0].items())


@pytest.mark.slow
def test_layers_compiled_for_the_gpu_or_a_cpu(gpt_config, gpt_batch):
    torch.compiler.reset()
    model = GPT2(gpt_config(), 53).to(DEVICE)
    batch = {name: tensor.to(DEVICE) for name, tensor in gpt_batch().items()}
    expected = gradients(model, total_loss(model, batch))
    compile_layers(model)
    for name, gradient in gradients(model, total_loss(model, batch)).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-5, msg=name)


def fusible_linear(in_features, out_features, part_size, dtype):
    linear = layers.FusibleLinear(in_features, out_features, dtype=dtype)
    linear.part_size = part_size
    return linear


@pytest.mark.parametrize("part_size", [6, 12])
def test_linear_that_sums_the_bias_gradient_by_sequence(part_size):
    linear = fusible_linear(5, 12, part_size, torch.float64)
    hidden = torch.randn(3, 4, 5, dtype=torch.float64, requires_grad=True)
    values = (hidden, linear.weight, linear.bias)
    torch.testing.assert_close(linear(hidden), F.linear(*values))

    def call(hidden, weight, bias):
        return torch.func.functional_call(linear, {"weight": weight, "bias": bias}, (hidden,))

    assert torch.autograd.gradcheck(call, values)


def test_linear_that_sums_the_bias_gradient_in_other_precisions():
    linear = fusible_linear(4, 8, 8, torch.bfloat16)
    for shape, total in (((4, 4096, 4), 4 * 4096), ((3, 259, 4), 776)):  # of 3 * 259, rounded once
        linear.zero_grad()
        linear(torch.ones(shape, dtype=torch.bfloat16)).sum().backward()
        assert linear.bias.grad.eq(total).all()  # a sum in bf16 would end at 256
    linear.float().zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        output = linear(torch.ones(2, 3, 4))
    output.sum().backward()
    assert output.dtype == torch.bfloat16 and linear.bias.grad.eq(6).all() and linear.bias.grad.dtype == torch.float32


def test_a_compiled_model_can_be_pickled(gpt_config):
    model = GPT2(gpt_config(), 53)
    assert compile_layers(model) and model.transformer.hashes_dropout
    assert isinstance(model.transformer.layers[1].mlp.dense_4h_to_h, layers.FusibleLinear)
    copied = pickle.loads(pickle.dumps(model))
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in copied.state_dict().items())


def test_a_model_without_such_layers_is_left_alone():
    assert not compile_layers(torch.nn.Linear(2, 2))


def test_dropout_is_not_hashed_where_it_is_not_wanted(gpt_config):
    """Keys are the same on all tensor-parallel ranks, whose masks must differ."""
    model = GPT2(gpt_config(), 53)
    compile_layers(model, hashes_dropout=False)
    assert not model.transformer.hashes_dropout


def test_attention_copies_nothing_to_change_a_layout(gpt_config):
    """Heads are views of the projection, and their gradients are assembled in its layout."""
    attention = SelfAttention(gpt_config(), causal=True)
    called, copied = [], []

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            name, result = function._schema.name.partition("::")[2], function(*args, **(kwargs or {}))
            called.append(name)
            is_layout = name in ("clone", "copy_", "contiguous", "_unsafe_view")  # torch 2.15 calls the last in linear
            if is_layout and (name == "copy_" or result.data_ptr() != args[0].data_ptr()):
                copied.append(name)
            return result

    hidden = torch.randn(3, 11, 24, requires_grad=True)
    with torch.autograd.set_multithreading_enabled(False), Calls():
        attention(hidden, None).sum().backward()
    assert called.count("stack") == 1 and not copied, called


@pytest.mark.parametrize("masked", [False, True])
def test_the_kernel_of_attention_has_a_name(gpt_config, masked):
    attention = SelfAttention(gpt_config(attention_dropout=0.1), causal=True)
    assert attention.kernel(3, 11, masked=masked) == "math"  # the only one on CPUs with dropout


@pytest.mark.parametrize(
    ("shape", "num_cached", "deterministic", "is_left_out"),
    [
        ((2, 1, 1, 64), 0, False, True),
        ((2, 1, 1, 128), 0, False, False),
        ((2, 1, 1, 128), 127, False, True),
        ((2, 1, 128, 128), 0, False, True),
        (None, 0, False, False),
        (None, 0, True, True),
    ],
)
def test_cudnns_attention_is_left_out_where_it_was_not_tried(gpt_config, shape, num_cached, deterministic, is_left_out):
    GPT2(gpt_config(), 53)
    enabled, during = torch.backends.cuda.cudnn_sdp_enabled, []
    before = enabled()

    class Looks(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            during.append(enabled())
            return function(*args, **(kwargs or {}))

    mask = None if shape is None else torch.zeros(shape)
    hidden, cache = torch.randn(2, (128 if shape is None else shape[-1]) - num_cached, 24), layers.LayerCache(128)
    if num_cached:
        cache.append(*torch.randn(2, 2, 3, num_cached, 8))
    with _deterministic(deterministic), Looks():
        SelfAttention(gpt_config(), causal=False)(hidden, mask, cache if num_cached else None)
    if TorchVersion(torch.__version__) < _CUDNN_SINCE:
        assert not before and set(during) == {False} and not enabled()
    else:
        assert before and set(during) == ({True, False} if is_left_out else {True}) and enabled()


def test_cudnns_attention_stays_off_where_the_user_has_turned_it_off(gpt_config):
    with sdpa_kernel(SDPBackend.MATH):
        GPT2(gpt_config(), 53)
        assert not torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU: the backward pass of attention")
@pytest.mark.parametrize("masked", [False, True])
def test_deterministic_gradients_of_attention_are_the_same_bits(gpt_config, masked):
    config = gpt_config(hidden_size=1024, num_attention_heads=16, attention_dropout=0.1)
    attention = SelfAttention(config, causal=not masked).to(DEVICE, torch.bfloat16)
    hidden = torch.randn(4, 1088, 1024, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    mask = torch.zeros(4, 1, 1, 1088, device=DEVICE, dtype=torch.bfloat16) if masked else None
    found = []
    with _deterministic(True):
        for _ in range(5):
            torch.manual_seed(1)
            (gradient,) = torch.autograd.grad(attention(hidden, mask).square().sum(), hidden)
            found.append(gradient)
    assert all(torch.equal(gradient, found[0]) for gradient in found)


@pytest.mark.parametrize("kind", ["gpt2", "post"])
def test_the_stack_of_layers_traces_without_a_graph_break(model_and_batch, kind):
    torch.compiler.reset()
    model, batch = model_and_batch(kind)  # BERT's 13 positions are no multiple of 128
    expected = total_loss(model, batch)
    model.transformer.compile(backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(total_loss(model, batch), expected)
