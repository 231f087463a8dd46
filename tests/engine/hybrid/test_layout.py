"""The inference layout: every weight lies somewhere, none twice, and sizes that do not divide are refused."""

from __future__ import annotations

import pytest
import torch

from engine.adapters import Factors
from engine.hybrid.families import describe
from engine.hybrid.layout import check_sizes, plan_layout
from engine.hybrid.reshard import Swap
from engine.hybrid.sources import Sources
from tests.engine.hybrid import tiny


def slices(model, tp_rank: int, tp_size: int, dtype=torch.float32) -> dict[str, torch.Tensor]:
    sources = Sources(model)
    sources.refresh()
    decoder = describe(model.config)
    swap = Swap(sources, lambda _: plan_layout(decoder, sources.has, False, tp_rank, tp_size), dtype, 8)
    return {name: tensor for bucket in swap.run() for name, tensor in bucket.items()}


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_ranks_together_keep_every_weight(name, tp_size):
    model = tiny.build(tiny.FAMILIES[name])
    decoder = describe(model.config)
    if decoder.heads % tp_size:
        with pytest.raises(ValueError, match=f"{decoder.heads} attention heads"):
            check_sizes(decoder, tp_size)
        return
    parameters = dict(model.named_parameters(remove_duplicate=False))
    seen = {n: torch.zeros(p.shape).reshape(p.shape[0], -1) for n, p in parameters.items()}
    for rank in range(tp_size):
        for target in plan_layout(decoder, parameters.__contains__, False, rank, tp_size):
            for piece in target.pieces:
                seen[piece.source][slice(*piece.rows), slice(*piece.cols)] += 1
    names = decoder.names
    copies = max(1, tp_size // decoder.kv_heads)
    for parameter, count in seen.items():
        assert count.min() >= 1, parameter
        whole = "norm" in parameter or "ln_" in parameter or (names.positions and parameter.startswith(names.positions))
        whole = whole or "project_" in parameter
        if whole:
            assert count.unique().tolist() == [tp_size], parameter
        elif copies > 1 and ("k_proj" in parameter or "v_proj" in parameter or "qkv_proj" in parameter):
            assert count.max() == copies, parameter
        else:
            assert count.unique().tolist() == [1], parameter


def test_llamas_slices_one_by_one():
    model = tiny.build(tiny.llama())
    weights = {name: p.detach() for name, p in model.named_parameters()}
    got = slices(model, 1, 2)
    path = "model.layers.1."
    attention, mlp = path + "self_attn.", path + "mlp."
    q, k, v = (weights[f"{attention}{x}_proj.weight"] for x in "qkv")
    assert torch.equal(got["1.qkv.weight"], torch.cat([q[16:], k[8:], v[8:]]))
    assert torch.equal(got["1.attention_out.weight"], weights[attention + "o_proj.weight"][:, 16:])
    gate, up = weights[mlp + "gate_proj.weight"], weights[mlp + "up_proj.weight"]
    assert torch.equal(got["1.up.weight"], torch.cat([gate[24:], up[24:]]))
    assert torch.equal(got["1.down.weight"], weights[mlp + "down_proj.weight"][:, 24:])
    # 97 rows are 49 and 48: the last slice ends in a row of zeros
    assert torch.equal(got["head.weight"][:48], weights["lm_head.weight"][49:])
    assert got["head.weight"].shape == (49, 32) and not got["head.weight"][48].any()


def test_fused_and_transposed_weights():
    model = tiny.build(tiny.FAMILIES["gpt2"])
    block = model.transformer.h[0]
    got = slices(model, 1, 2)
    fused = block.attn.c_attn.weight.detach().T
    assert torch.equal(got["0.qkv.weight"], torch.cat([fused[16:32], fused[48:64], fused[80:96]]))
    assert torch.equal(got["0.attention_out.weight"], block.attn.c_proj.weight.detach().T[:, 16:])
    assert "0.down.bias" not in got and "0.down.bias" in slices(model, 0, 2)
    model = tiny.build(tiny.FAMILIES["bloom"])
    fused = model.transformer.h[0].self_attention.query_key_value.weight.detach().view(4, 3, 8, 32)
    assert torch.equal(slices(model, 1, 2)["0.qkv.weight"], fused[2:].transpose(0, 1).reshape(-1, 32))


def test_fewer_key_heads_than_ranks():
    model = tiny.build(tiny.llama())
    k = model.model.layers[0].self_attn.k_proj.weight.detach()
    for rank in range(4):
        got = slices(model, rank, 4)["0.qkv.weight"]
        assert torch.equal(got[8:16], k[8 * (rank // 2) : 8 * (rank // 2) + 8])


def test_sizes_that_do_not_divide_are_all_named():
    decoder = describe(tiny.llama(num_attention_heads=6, num_key_value_heads=2, hidden_size=48, intermediate_size=50))
    with pytest.raises(ValueError) as refusal:
        check_sizes(decoder, 4)
    line = str(refusal.value)
    assert "inference_tp_size=4" in line and "6 attention heads" in line and "50 MLP features" in line
    assert "[1, 2]" in line and "\n" not in line
    check_sizes(decoder, 2)
    with pytest.raises(ValueError, match="3 key/value heads"):
        check_sizes(describe(tiny.llama(num_attention_heads=12, num_key_value_heads=3, hidden_size=48)), 2)


def test_adapters_are_merged_and_the_base_is_left_alone():
    from peft import LoraConfig, get_peft_model

    base = tiny.build(tiny.FAMILIES["gpt2"])
    model = get_peft_model(base, LoraConfig(r=2, lora_alpha=6, target_modules=["c_attn"], fan_in_fan_out=True))
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    layer = base.transformer.h[0].attn.c_attn
    merged = layer.base_layer.weight + 3.0 * (layer.lora_B["default"].weight @ layer.lora_A["default"].weight).T
    assert torch.allclose(slices(model, 0, 1)["0.qkv.weight"], merged.T, atol=1e-6)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("flipped", [False, True])
def test_some_rows_of_an_adapters_product(flipped):
    draw = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 5, generator=draw), torch.randn(7, 2, generator=draw)
    product = 0.5 * (b @ a)
    product = product.T if flipped else product
    factors = Factors(a, b, 0.5, flipped)
    torch.testing.assert_close(factors.product(), product)
    torch.testing.assert_close(factors.product(slice(1, 4)), product[1:4])
