"""Which modules run by tiles of tokens: found by what they do to a few tokens, whatever they are called."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from megatrain_accelerate.layers.token_tiles import PartCall, examine

D = 16


class Mlp(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, 64, dtype=dtype), nn.Linear(64, D, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


class RmsNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6))).to(x.dtype)


class Function(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.function = function
        self.linear = nn.Linear(D, D)

    def forward(self, x: torch.Tensor) -> object:
        return self.function(self.linear(self.linear(self.linear(x))))


class Attention(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal, self.qkv = causal, nn.Linear(D, 3 * D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(D, D, 3, groups=D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.convolution(nn.functional.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2)


class WithPositions(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + torch.arange(x.shape[1], device=x.device)[None, :, None]


class Experts(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        best = self.up(x).topk(2, -1).indices
        return super().forward(x) * best.float().sum(-1, keepdim=True)


class Dropped(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(x), 0.1, self.training)


class WithBuffer(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))


class Writing(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.mul_(2.0))


def reason_against(module: nn.Module, dtype: torch.dtype = torch.float32, dim: int = 1) -> str | None:
    example = torch.empty(2, 5, D, dtype=dtype) if dim else torch.empty(10, D, dtype=dtype)
    return examine(PartCall(module, module, (example,), {}), dim)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [0, 1])
def test_an_mlp_and_a_norm_treat_each_token_alone(dtype: torch.dtype, dim: int) -> None:
    assert reason_against(Mlp(dtype), dtype, dim) is None
    assert reason_against(RmsNorm().to(dtype), dtype, dim) is None


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Attention(causal=True), "depends on other tokens"),
        (Attention(causal=False), "depends on other tokens"),
        (Convolution(), "may combine neighbouring tokens"),
        (Function(lambda x: x - x.mean(1, keepdim=True)), "depends on other tokens"),
        (Function(lambda x: x.roll(1, 1)), "may combine neighbouring tokens"),
        (Function(lambda x: x.cumsum(1)), "may combine neighbouring tokens"),
        # Further away than the tokens that are tried out reach.
        (Function(lambda x: nn.functional.pad(x, (0, 0, 8, 0))[:, :-8]), "may combine neighbouring tokens"),
        (Function(lambda x: x + 0.0 * x.sum(1, keepdim=True)), "depends on other tokens"),
        (WithPositions(), "depends on its position"),
        (Experts(), "makes discrete choices that depend on values"),
        (Function(lambda x: x if x.sum() > 0 else -x), "makes discrete choices that depend on values"),
        (Dropped(), "random numbers"),
        (WithBuffer(), "buffers"),
        (Writing(), "writes to its inputs"),
        (Function(lambda x: (x, x)), "doesn't return one tensor"),
        (Function(lambda x: x.transpose(0, 1)), "doesn't return one tensor"),
        (Function(lambda x: x.log().sqrt()), "non-finite numbers"),
        (nn.Bilinear(D, D, D), "can't be tried out (TypeError"),
        (nn.Linear(D, D), "little besides its output"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else value,
)
def test_other_modules_run_whole_and_the_reason_is_known(module: nn.Module, reason: str) -> None:
    found = reason_against(module)
    assert found is not None
    assert reason in found


def test_dropout_that_is_off_is_no_obstacle() -> None:
    assert reason_against(Dropped().eval()) is None


def test_neither_weights_nor_generators_are_touched_and_no_gradient_flows() -> None:
    module = Mlp()
    before, state = {name: p.clone() for name, p in module.named_parameters()}, torch.get_rng_state()
    identities = [id(p) for p in module.parameters()]
    reason_against(module)
    assert torch.equal(torch.get_rng_state(), state)
    assert [id(p) for p in module.parameters()] == identities
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in module.named_parameters())


def test_a_trial_multiplies_by_whole_matrices_that_share_memory() -> None:
    """A matrix that repeats one number took minutes for a layer of 70B, in bf16 on CPUs without AVX-512."""
    seen: list[tuple[bool, int]] = []

    class Watched(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weights = (self.up.weight, self.down.weight)
            seen.extend((weight.is_contiguous(), weight.untyped_storage().data_ptr()) for weight in weights)
            return super().forward(x)

    assert reason_against(Watched(torch.bfloat16), torch.bfloat16) is None
    assert {contiguous for contiguous, _ in seen} == {True}
    assert len({memory for _, memory in seen}) == 1


def test_a_module_is_tried_out_within_a_run_without_data() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        example = mode.from_tensor(torch.empty(2, 5, D))
        module = Mlp()  # its weights have no data
        found = examine(PartCall(module, module, (example,), {}), 1)
        attention = Attention(causal=True)
        other = examine(PartCall(attention, attention, (example,), {}), 1)
    assert found is None
    assert other is not None


def test_kinds_differ_by_what_modules_compute_and_not_by_their_weights() -> None:
    def kind_of(module: nn.Module, tokens: int = 5, width: int = D) -> object:
        return PartCall(module, module, (torch.empty(2, tokens, width),), {}).kind(1)

    assert kind_of(Mlp()) == kind_of(Mlp())
    assert kind_of(Mlp()) == kind_of(Mlp(), tokens=7)
    assert kind_of(Mlp()) != kind_of(Mlp(), width=1)
    assert kind_of(Mlp()) != kind_of(Mlp(torch.bfloat16))
    assert kind_of(Dropped()) != kind_of(Dropped().eval())
    assert kind_of(Function(torch.sin)) != kind_of(Function(torch.cumsum))
