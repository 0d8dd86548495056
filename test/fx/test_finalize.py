"""`finalize_quantized`: one call of oneDNN for each product, packed weights as constants, results as eager's."""

from __future__ import annotations

import pytest
import torch
import torch.ao.quantization.fx._decomposed  # defines the operators
from torch import nn

from altbackend import fx
from altbackend.compat.torch_api import exact_byte_products
from altbackend.fx_passes import onednn
from test.fx_passes.test_quantised import Convolutions, Dynamic, Linears

T = torch.Tensor
pytestmark = pytest.mark.skipif(
    not onednn.available() or not exact_byte_products(), reason="products of bytes are not exact on this processor"
)
CASES: dict[str, tuple[nn.Module, tuple[int, ...], dict[str, int]]] = {
    "linears": (Linears(), (2, 5, 64), {"qlinear_pointwise": 2}),
    "linears with zero points": (Linears(zero=5), (2, 5, 64), {"quantised_linear": 2}),
    "convolutions": (Convolutions(), (2, 3, 12, 10), {"qconv_pointwise": 2, "convolution_added_to": 1}),
    "groups": (Convolutions(groups=4), (2, 3, 12, 10), {"qconv_pointwise": 2, "convolution_added_to": 1}),
    "dynamic": (Dynamic(per_row=False), (2, 5, 64), {"qlinear_pointwise": 1}),
    "dynamic rows": (Dynamic(per_row=True), (2, 5, 64), {"_int_mm": 1}),
}


def calls(gm: torch.fx.GraphModule) -> list[str]:
    targets = [n.target for n in gm.graph.nodes if n.op == "call_function"]
    return [str(getattr(t, "_opname", getattr(t, "__name__", ""))) for t in targets]


@pytest.mark.parametrize("name", CASES)
def test_finalised(name: str) -> None:
    model, sizes, expected = CASES[name]
    torch.manual_seed(0)
    x = torch.randn(sizes)
    with torch.no_grad():
        program, want = torch.export.export(model.eval(), (x,)), model(x)
        finalised = fx.finalize_quantized(program)
        torch.testing.assert_close(finalised(x), want, rtol=0.01, atol=0.02)
    for operator, count in expected.items():
        assert calls(finalised).count(operator) == count, calls(finalised)
    assert not any("prepack" in name for name in calls(finalised))
    assert not list(finalised.parameters())
    again = fx.finalize_quantized(finalised)
    assert calls(again) == calls(finalised)


def test_packed_weights_replace_the_weights() -> None:
    program = torch.export.export(Linears().eval(), (torch.randn(5, 64),))
    finalised = fx.finalize_quantized(program)
    weights = [b for b in finalised.buffers() if b.dtype == torch.int8]
    assert [b.is_mkldnn for b in weights] == [True, True]


def test_preserved_attributes_may_change() -> None:
    torch.manual_seed(0)
    model, x = Linears().eval(), torch.randn(5, 64)
    finalised = fx.finalize_quantized(torch.export.export(model, (x,)), preserved_attrs=["bias"])
    with torch.no_grad():
        model.bias.mul_(2)
        finalised.get_parameter("bias").copy_(model.bias)
        torch.testing.assert_close(finalised(x), model(x), rtol=1e-4, atol=1e-5)


def test_a_graph_without_sizes() -> None:
    with pytest.raises(ValueError, match=r"torch\.export"):
        fx.finalize_quantized(torch.fx.symbolic_trace(nn.ReLU().eval()))
